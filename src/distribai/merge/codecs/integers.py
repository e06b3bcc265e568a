"""Whole numbers times a step per block: int8 and int4 (A3).

A block is 256 consecutive elements (the last may be shorter). With L = 127 or 7 its step is
``max |v| / L`` in fp32, 1 where that is 0 or subnormal, and an element is stored as ``q``, the
whole number nearest to ``v * (1 / step)`` (the odd one of two equally near), which lies in -L..L;
it is read as ``q * step``. The error of an element is at most half a step. Several q share a byte,
the first one in the lowest bits, as ``q + L``.

Bits per parameter: 8 or 4, and 32 / 256 for the steps.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray

from distribai.core.codecs import BLOCK, PARTS, STEP
from distribai.core.tensors import TensorSpec
from distribai.errors import Integrity
from distribai.merge.bits import pack, unpack
from distribai.merge.codecs import Part, Reader

_PIECE = 256 * BLOCK
"""Elements at a time, so that what is in between stays in the second-level cache."""

_MAGIC = np.float32(3 << 22)
"""Added to a small number it leaves the nearest whole number in the low bits of the sum: the sum's
unit in the last place is 1. Ties go to even sums; with L added, which is odd, that is to odd q."""


class Integers:
    """A codec of ``bits`` per element."""

    def __init__(self, bits: int) -> None:
        self.name = f"int{bits}"
        self._bits = bits
        self._largest = (1 << (bits - 1)) - 1

    def parts(self, spec: TensorSpec) -> tuple[Part, ...]:
        """The numbers, without suffix, and the blocks' steps."""
        return PARTS[self.name](spec)

    def encode(self, values: NDArray[np.float32]) -> Mapping[str, NDArray[Any]]:
        """Piece by piece; the tensor's own memory apart nothing grows with it but the result."""
        size = values.size
        steps = np.empty(-(-size // BLOCK), np.float32)
        stored = np.empty(-(-size * self._bits // 8), np.uint8)
        scratch = np.empty((min(_PIECE // BLOCK, steps.size), BLOCK), np.float32)
        for start in range(0, size, _PIECE):
            piece = np.ascontiguousarray(values[start : start + _PIECE])
            step = _steps(piece, self._largest)
            steps[start // BLOCK : start // BLOCK + step.size] = step
            # Spread first: numpy multiplies whole arrays faster than rows by a number each.
            np.copyto(scratch[: step.size], (1 / step)[:, None])
            ratio = scratch.reshape(-1)[: piece.size]
            ratio *= piece
            ratio += _MAGIC + np.float32(self._largest)
            first = start * self._bits // 8
            room = stored[first : first + -(-piece.size * self._bits // 8)]
            codes = room if self._bits == 8 else np.empty(piece.size, np.uint8)
            # Only the low bits are wanted.
            np.copyto(codes, ratio.view(np.int32), casting="unsafe")
            if codes is not room:
                room[...] = pack(codes, self._bits)
        return {"": stored, STEP: steps}

    def reader(self, spec: TensorSpec, parts: Mapping[str, NDArray[Any]]) -> Reader:
        """Multiplies numbers by steps; refuses steps that no encoder writes."""
        return stepped(spec, parts[""], parts[STEP], self._bits, self._largest, zeros=False)


def stepped(
    spec: TensorSpec,
    stored: NDArray[np.uint8],
    steps: NDArray[np.float32],
    bits: int,
    middle: float,
    *,
    zeros: bool,
) -> Reader:
    """A decoder of codes of ``bits`` bits: ``(code - middle)`` times the step of its block.

    ``zeros``: whether a step may be 0. Its reader raises :class:`Integrity` (``tensor.format``)
    for steps that are none.
    """

    def read(start: int, stop: int, scratch: NDArray[np.float32], /) -> NDArray[np.float32]:
        step = steps[start // BLOCK : -(-stop // BLOCK)]
        if not (np.isfinite(step).all() and (step >= 0 if zeros else step > 0).all()):
            raise Integrity("tensor.format", f"{spec.name!r} has steps that are no step.")
        scratch[...] = unpack(stored, start, stop, bits)
        scratch -= np.float32(middle)
        whole = scratch.size // BLOCK * BLOCK
        blocks = scratch[:whole].reshape(-1, BLOCK)
        np.multiply(blocks, step[: len(blocks), None], out=blocks)
        if whole < scratch.size:
            scratch[whole:] *= step[-1]
        return scratch

    return read


def _steps(piece: NDArray[np.float32], largest: int) -> NDArray[np.float32]:
    """Steps of the blocks of a piece, shape (blocks,)."""
    starts = np.arange(0, piece.size, BLOCK)
    # Compared as whole numbers, which order magnitudes alike and have no NaN to look out for, and
    # block by block with ``reduceat``, which reads in a line: a fifth of the time of magnitudes in
    # fp32. With sign the largest one is that of the positive values, without it of the negative.
    above = np.maximum.reduceat(piece.view(np.int32), starts).view(np.uint32)
    below = np.maximum.reduceat(piece.view(np.uint32), starts)
    magnitude = np.uint32(0x7FFFFFFF)
    highest = np.maximum(above & magnitude, below & magnitude).view(np.float32)
    step: NDArray[np.float32] = highest / np.float32(largest)
    step[step < np.finfo(np.float32).tiny] = 1
    return step


INT8 = Integers(8)

CODECS = (INT8, Integers(4))
