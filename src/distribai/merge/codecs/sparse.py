"""The largest values only: top-k of each run, two bits each (SparseLoCo, arXiv:2508.15706; A3).

A run is 4096 consecutive elements. Of each run the ``k`` elements of largest magnitude are kept
(of equal ones those that come first), of the last, shorter one of n elements ``ceil(k n / 4096)``.
An element's place in its run takes 12 bits, places of a run ascend; its value takes two: sign and
one of two magnitudes that the tensor's kept elements share. The magnitudes are those of a two-means
clustering. Everything else is read as 0: what was not sent is for error feedback to keep.

Tensors below 1,024 elements go as int8: their places would cost more than their values.

Bits per parameter: 14 k / 4096; 0.22 at k = 64.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray

from distribai.core.codecs import LEVELS, PARTS, PLACES, RUN, SMALL, SPARSE_K
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
    """A codec that keeps ``k`` of 4096 elements; ``k`` is a multiple of 4."""

    def __init__(self, k: int, name: str) -> None:
        self.name, self._k = name, k

    def parts(self, spec: TensorSpec) -> tuple[Part, ...]:
        """Two-bit values without suffix, twelve-bit places, and the two magnitudes."""
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
        return {"": pack(codes, 2), PLACES: _pack12(at % RUN), LEVELS: levels}

    def reader(self, spec: TensorSpec, parts: Mapping[str, NDArray[Any]]) -> Reader:
        """Fills with zeros and puts the kept elements in their places."""
        if spec.size < SMALL:
            return INT8.reader(spec, parts)
        codes, places, levels = parts[""], parts[PLACES], parts[LEVELS]
        if not (np.isfinite(levels).all() and 0 <= levels[0] <= levels[1]):
            raise _malformed(spec, "its magnitudes are none")
        table = np.concatenate([levels, -levels]).astype(np.float32)
        by_run = self._by_run(spec.size)

        def read(start: int, stop: int, scratch: NDArray[np.float32], /) -> NDArray[np.float32]:
            first, last = start // RUN, -(-stop // RUN)
            counts = by_run[first:last]
            begin = first * self._k
            end = begin + int(counts.sum())
            place = _unpack12(places, begin, end)
            run = np.repeat(np.arange(last - first), counts)
            at = run * RUN + place
            # Within a run and ascending: no element twice, none beyond the end.
            if at.size and (at[-1] >= stop - start or (np.diff(at) <= 0).any()):
                raise _malformed(spec, "its places do not ascend within their runs")
            scratch[...] = 0
            scratch[at] = table[unpack(codes, begin, end, 2)]
            return scratch

        return read

    def _by_run(self, size: int) -> NDArray[np.int64]:
        """How many elements each run keeps."""
        counts = np.full(-(-size // RUN), self._k)
        if size % RUN:
            counts[-1] = -(-self._k * (size % RUN) // RUN)
        return counts

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


def _pack12(places: NDArray[np.int64]) -> NDArray[np.uint8]:
    """Two places in three bytes, low bits first."""
    if places.size % 2:
        return _pack12(np.append(places, 0))[:-1]
    one, two = places[0::2], places[1::2]
    packed = np.empty((one.size, 3), np.uint8)
    packed[:, 0] = one & 0xFF
    packed[:, 1] = one >> 8 | (two & 0xF) << 4
    packed[:, 2] = two >> 4
    return packed.reshape(-1)


def _unpack12(packed: NDArray[np.uint8], begin: int, end: int) -> NDArray[np.int64]:
    """Places ``begin <= i < end``; ``begin`` is even."""
    line = packed[begin // 2 * 3 : -(-end * 12 // 8)].astype(np.int64)
    line = np.append(line, np.zeros(-line.size % 3, np.int64)).reshape(-1, 3)
    places = np.empty((len(line), 2), np.int64)
    places[:, 0] = line[:, 0] | (line[:, 1] & 0xF) << 8
    places[:, 1] = line[:, 1] >> 4 | line[:, 2] << 4
    return places.reshape(-1)[: end - begin]


def _malformed(spec: TensorSpec, what: str) -> Integrity:
    return Integrity("tensor.format", f"{spec.name!r} is no sparse tensor: {what}.")


CODECS = tuple(Sparse(k, name) for name, k in SPARSE_K.items())
