"""Codecs: how a float tensor's values travel. One file each, found by scanning this package (A3).

A codec's module offers ``CODECS``, objects that keep the :class:`Codec` protocol. A tensor
becomes one or more *parts*: arrays that lie in the file as ``name + suffix``. Which parts, with
which dtypes and shapes, follows from the tensor's shape alone (``core.codecs``), so that a file is
checked before it is decoded.
Error feedback stays with the caller (``merge.feedback``): it encodes ``e = beta e + values``,
decodes what was really sent, and keeps the difference. Integer buffers pass no codec.

The same values encode to the same bytes on any machine: elementwise IEEE operations, maxima,
comparisons, and sums in a written order.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import cache
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from distribai.core.codecs import RUN, Part, check_codec
from distribai.core.scan import modules
from distribai.core.tensors import TensorSpec

__all__ = ["GRAIN", "Codec", "Part", "Reader", "codec", "codecs"]

GRAIN = RUN
"""Decoding starts at multiples of this many elements: the longest run any codec packs."""


class Reader(Protocol):
    """Decodes a tensor piece by piece; may be called from several threads at once."""

    def __call__(
        self, start: int, stop: int, scratch: NDArray[np.float32], /
    ) -> NDArray[np.float32]:
        """Elements ``start <= i < stop`` (C order) in fp32.

        ``start`` is a multiple of :data:`GRAIN`, ``stop`` one too or the tensor's end. Either the
        stored values themselves, read-only, or ``scratch`` (of exactly that size) filled with them.

        Raises:
            Integrity: ``tensor.format``: no encoder writes what is stored.
        """
        ...


class Codec(Protocol):
    """One way to carry float tensors."""

    name: str

    def parts(self, spec: TensorSpec) -> tuple[Part, ...]:
        """The stored arrays of a tensor."""
        ...

    def encode(self, values: NDArray[np.float32]) -> Mapping[str, NDArray[Any]]:
        """Flat stored arrays by suffix, of finite values of shape (size,); may be views."""
        ...

    def reader(self, spec: TensorSpec, parts: Mapping[str, NDArray[Any]]) -> Reader:
        """A decoder over the stored arrays by suffix."""
        ...


@cache
def codecs() -> Mapping[str, Codec]:
    """Every codec by name."""
    return {how.name: how for module in modules(__name__) for how in module.CODECS}


def codec(name: str) -> Codec:
    """The codec of that name.

    Raises:
        InvalidSpec: ``codec.unknown``.
    """
    check_codec(name, "rounds.codec_up")
    return codecs()[name]
