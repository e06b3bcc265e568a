"""What deltas and updates have in common: all travelling tensors, floats through a codec."""

from __future__ import annotations

from collections.abc import Mapping
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

    def release(self, spec: TensorSpec, start: int, stop: int) -> None:
        """Let the pages that hold elements ``start <= i < stop``, and their neighbours, leave this
        process's memory (:meth:`distribai.merge.tensorfile.TensorFile.release`)."""
        if self.file is None or spec.role == "frozen" or not spec.size:
            return
        for part in codecs.stored_parts(spec, self.codec.name):
            size = self.arrays[spec.name + part.suffix].size
            self.file.release(
                spec.name + part.suffix, start * size // spec.size, stop * size // spec.size
            )
