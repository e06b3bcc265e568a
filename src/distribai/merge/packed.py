"""What deltas and updates have in common: all travelling tensors, floats through a codec."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from distribai.core import codecs
from distribai.core.tensors import ParameterManifest, TensorSpec
from distribai.merge.codecs import Codec, Reader
from distribai.merge.tensorfile import Layout, TensorFile
from distribai.merge.weights import check_manifest, flat


def packed_layout(manifest: ParameterManifest, codec: Codec) -> Layout:
    """The tensors of a delta or update file."""
    check_manifest(manifest)
    return codecs.packed_layout(manifest, codec.name)


@dataclass(frozen=True, slots=True)
class Packed:
    """Stored arrays by file name, decoded where and when they are needed.

    ``file`` is the mapping to release pages of, if the arrays lie in one.
    """

    codec: Codec
    arrays: Mapping[str, NDArray[Any]]
    file: TensorFile | None = None

    def reader(self, spec: TensorSpec) -> Reader:
        """A decoder of a trainable tensor or float buffer."""
        parts = self.codec.parts(spec)
        return self.codec.reader(spec, {p.suffix: self.arrays[spec.name + p.suffix] for p in parts})

    def integers(self, spec: TensorSpec) -> NDArray[np.int64]:
        """The value of an integer buffer, flat."""
        return flat(self.arrays[spec.name])

    def releaser(self, spec: TensorSpec) -> Callable[[int, int], None]:
        """What lets the pages that hold elements ``start <= i < stop`` of a tensor leave this
        process's memory (:meth:`distribai.merge.tensorfile.TensorFile.release`)."""
        file = self.file
        if file is None or spec.role == "frozen" or not spec.size:
            return lambda start, stop: None
        whole, parts = spec.size, codecs.stored_parts(spec, self.codec.name)
        sizes = [(spec.name + p.suffix, math.prod(p.shape)) for p in parts]

        def release(start: int, stop: int) -> None:
            for name, size in sizes:
                file.release(name, start * size // whole, stop * size // whole)

        return release
