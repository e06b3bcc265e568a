"""The largest values only: top-k of each run, two bits each (SparseLoCo, arXiv:2508.15706; A3).

A run is 4096 consecutive elements. Of each run the ``k`` elements of largest magnitude are kept
(of equal ones those that come first), of the last, shorter one of n elements ``ceil(k n / 4096)``.
A kept element's value takes two bits: sign and one of two magnitudes that the tensor's kept
elements share. The magnitudes are those of a two-means clustering. Everything else is read as 0:
what was not sent is for error feedback to keep.

Places ascend, and are stored as P. Elias ("Efficient storage and retrieval by content and address
of static files", 1974) and R. Fano have it: of the i-th kept element's index in the tensor the
lowest ``log2(4096 / k)`` bits lie as they are, and the rest, ``h``, is bit ``i + h`` of a line of
bits, which is 1. That line has two bits for each kept element, so sizes follow from shapes, and any
run can be read by itself. With k = 64 a place takes 8 bits; no coder that knows nothing of the
values could do with less than 7.4.

Tensors below 1,024 elements go as int8: their places would cost more than their values.

Bits per parameter: ``(4 + log2(4096 / k)) k / 4096``; 0.16 at k = 64.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray

from distribai.core.codecs import HIGH, LEVELS, LOW, PARTS, RUN, SMALL, SPARSE_K, low_bits
from distribai.core.tensors import TensorSpec
from distribai.errors import Integrity
from distribai.merge.bits import pack, unpack
from distribai.merge.codecs import Part, Reader
from distribai.merge.codecs.integers import INT8

_RUNS = 32
"""Runs at a time: half a megabyte of values, which a second-level cache holds."""

_SWEEPS = 8
"""Rounds of two-means at most; it settles within a few on heavy-tailed values."""

EXACT = 2.0**29
"""Sums of numbers between ``a`` and ``b`` are exact in double precision, in any order, as long as
their count times ``b`` is at most so many ``a``: all are multiples of the last place of the least,
which is at least ``a / 2^24``, and no sum has more than ``2^53`` of these."""


class Sparse:
    """A codec that keeps ``k`` of 4096 elements; ``k`` is a power of two from 16 to 1024."""

    def __init__(self, k: int, name: str) -> None:
        self.name, self._k, self._low = name, k, low_bits(k)

    def parts(self, spec: TensorSpec) -> tuple[Part, ...]:
        """Two-bit values without suffix, their places in two parts, and the two magnitudes."""
        return PARTS[self.name](spec)

    def encode(self, values: NDArray[np.float32]) -> Mapping[str, NDArray[Any]]:
        """Selects, clusters, packs."""
        if values.size < SMALL:
            return INT8.encode(values)
        at = self._select(values)
        kept = values[at]
        size = np.abs(kept)
        levels, bound = two_means(size)
        codes = (size > bound).astype(np.uint8) | (kept < 0).astype(np.uint8) << np.uint8(1)
        line = np.zeros(2 * at.size, np.uint8)
        line[np.arange(at.size) + (at >> self._low)] = 1
        low = (at & (1 << self._low) - 1).astype(np.uint8)
        return {
            "": pack(codes, 2),
            HIGH: np.packbits(line, bitorder="little"),
            LOW: pack(low, self._low),
            LEVELS: levels,
        }

    def reader(self, spec: TensorSpec, parts: Mapping[str, NDArray[Any]]) -> Reader:
        """Fills with zeros and puts the kept elements in their places."""
        if spec.size < SMALL:
            return INT8.reader(spec, parts)
        codes, high, low, levels = parts[""], parts[HIGH], parts[LOW], parts[LEVELS]
        if not (np.isfinite(levels).all() and 0 <= levels[0] <= levels[1]):
            raise _malformed(spec, "its magnitudes are none")
        table = np.concatenate([levels, -levels]).astype(np.float32)

        def read(start: int, stop: int, scratch: NDArray[np.float32], /) -> NDArray[np.float32]:
            begin, end = start * self._k // RUN, -(-stop * self._k // RUN)
            line = np.unpackbits(high[begin // 4 : -(-end // 4)], bitorder="little")
            ones = np.flatnonzero(line[: 2 * (end - begin)])
            order = np.arange(end - begin)
            if ones.size != order.size:
                raise _malformed(spec, "it has more or fewer places than values")
            at = (ones - order) << self._low | unpack(low, begin, end, self._low)
            # Each in its run and ascending: no element twice, none beyond the end.
            ascend = (np.diff(at) > 0).all() and (at // RUN == order // self._k).all()
            if at.size and not (ascend and at[-1] < stop - start):
                raise _malformed(spec, "its places do not ascend within their runs")
            scratch[...] = 0
            scratch[at] = table[unpack(codes, begin, end, 2)]
            return scratch

        return read

    def _select(self, values: NDArray[np.float32]) -> NDArray[np.int64]:
        """Where the kept elements lie in the tensor, ascending."""
        whole = values.size // RUN * RUN
        found = [
            start
            + _largest(values[start : min(whole, start + _RUNS * RUN)].reshape(-1, RUN), self._k)
            for start in range(0, whole, _RUNS * RUN)
        ]
        if whole < values.size:
            rest = values[whole:].reshape(1, -1)
            found.append(whole + _largest(rest, -(-self._k * rest.size // RUN)))
        return np.concatenate(found)


def _largest(runs: NDArray[np.float32], k: int) -> NDArray[np.int64]:
    """Places of the ``k`` largest magnitudes of each row, counted through all rows, ascending."""
    # As whole numbers, which order magnitudes alike and are told apart in half the time.
    size = np.abs(runs).view(np.int32)
    width = size.shape[1]
    bound = np.partition(size, width - k, axis=1)[:, width - k]
    chosen = size >= bound[:, None]
    if np.count_nonzero(chosen) > k * len(size):  # more are equal than there is room for
        for row in np.flatnonzero(chosen.sum(axis=1) > k):
            above = size[row] > bound[row]
            equal = np.flatnonzero(size[row] == bound[row])
            chosen[row] = above
            chosen[row, equal[: k - int(above.sum())]] = True
    return np.flatnonzero(chosen)


def two_means(sizes: NDArray[np.float32]) -> tuple[NDArray[np.float32], np.float32]:
    """Two magnitudes that stand for all, shape (2,), the smaller first, and the bound between them
    (a value above it takes the larger one). Lloyd's iteration from the mean."""
    means = _means_beside(sizes)
    bound = low = high = means(np.float32(np.inf))[0]
    for _ in range(_SWEEPS):
        below, above = means(bound)
        if above is None:
            break
        low, high = below, above
        middle = np.float32((float(low) + float(high)) / 2)
        if middle == bound:
            break
        bound = middle
    return np.array([low, high], np.float32), bound


def _means_beside(
    sizes: NDArray[np.float32],
) -> Callable[[np.float32], tuple[np.float32, np.float32 | None]]:
    """A function of a bound, at least the least of ``sizes``: the means of those up to it, and of
    those above (None where there is none)."""
    ordered = np.sort(sizes)
    least = ordered[np.searchsorted(ordered, 0, "right") :][:1]
    if not least.size or float(ordered[-1]) * sizes.size > EXACT * float(least[0]):
        return lambda bound: (
            np.float32(_mean(sizes[sizes <= bound])),
            np.float32(_mean(sizes[sizes > bound])) if (sizes > bound).any() else None,
        )
    sums = np.cumsum(ordered, dtype=np.float64)

    def means(bound: np.float32) -> tuple[np.float32, np.float32 | None]:
        count = int(ordered.searchsorted(bound, "right"))
        below = np.float32(sums[count - 1] / count)
        if count == sizes.size:
            return below, None
        return below, np.float32((sums[-1] - sums[count - 1]) / (sizes.size - count))

    return means


def _mean(values: NDArray[np.float32]) -> float:
    """The mean in double precision, added up in a written order: a library's own order differs from
    machine to machine, and the magnitudes are part of canonical updates. The second half is added
    to the first, elementwise, until one number is left; of an odd count the last waits outside.
    """
    line, rest = values.astype(np.float64), 0.0
    while line.size > 1:
        half = line.size // 2
        if line.size % 2:
            rest += float(line[-1])
        line = line[:half] + line[half : 2 * half]
    return (float(line[0]) + rest) / values.size


def _malformed(spec: TensorSpec, what: str) -> Integrity:
    return Integrity("tensor.format", f"{spec.name!r} is no sparse tensor: {what}.")


CODECS = tuple(Sparse(k, name) for name, k in SPARSE_K.items())
