"""Dense bf16, 16 bits per parameter: the upper half of fp32, rounded to nearest even (A3)."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray

from distribai.core.codecs import PARTS
from distribai.core.tensors import TensorSpec
from distribai.merge.codecs import Part, Reader

_LARGEST = np.uint32(0x7F7F0000)
"""The largest finite bf16 as fp32 bits."""

_PIECE = 1 << 16
"""Elements at a time, so that what is in between stays in the second-level cache."""


class Bf16:
    """The stored array holds bf16 bits as uint16: numpy has no such number."""

    name = "bf16"

    def parts(self, spec: TensorSpec) -> tuple[Part, ...]:
        """One part, without suffix."""
        return PARTS[self.name](spec)

    def encode(self, values: NDArray[np.float32]) -> Mapping[str, NDArray[Any]]:
        """Rounded; what would round to infinity becomes the largest finite value."""
        bits = np.ascontiguousarray(values).view(np.uint32)
        stored = np.empty(values.size, np.uint16)
        scratch = np.empty(min(_PIECE, values.size), np.uint32)
        for start in range(0, values.size, _PIECE):
            piece = bits[start : start + _PIECE]
            size = scratch[: piece.size]
            np.bitwise_and(piece, np.uint32(0x7FFFFFFF), out=size)
            np.minimum(size, _LARGEST, out=size)
            # Adding just below half a unit, and one more for odd results, rounds ties to even.
            size += np.uint32(0x7FFF) + ((size >> np.uint32(16)) & np.uint32(1))
            size |= piece & np.uint32(0x80000000)
            size >>= np.uint32(16)
            np.copyto(stored[start : start + piece.size], size, casting="unsafe")
        return {"": stored}

    def reader(self, spec: TensorSpec, parts: Mapping[str, NDArray[Any]]) -> Reader:
        """Widens piece by piece, exactly."""
        line: NDArray[np.uint16] = parts[""].reshape(-1)

        def read(start: int, stop: int, scratch: NDArray[np.float32], /) -> NDArray[np.float32]:
            bits = scratch.view(np.uint32)
            bits[...] = line[start:stop]
            np.left_shift(bits, np.uint32(16), out=bits)
            return scratch

        return read


CODECS = (Bf16(),)
