"""What a model's weights look like, without any tensor library: names, shapes, roles, first values.

A :class:`ParameterManifest` lists each *storage* once (tied weights appear under one name), in the
order in which everything else walks them. From it come the parameter count, version 0
(``merge.version0``), the layout of deltas and updates, and the check of every submission.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal

from distribai.core.plain import fingerprint

Role = Literal["trainable", "frozen", "float_buffer", "int_buffer"]
"""``trainable`` takes part in outer steps; ``frozen`` never travels after version 0;
``float_buffer`` is averaged without momentum; ``int_buffer`` takes the maximum."""

DType = Literal["F32", "BF16", "I64"]
"""Canonical dtypes, in safetensors' spelling. Trainable tensors are canonical in F32."""

ITEM_SIZE = {"F32": 4, "BF16": 2, "I64": 8}


@dataclass(frozen=True, slots=True)
class Init:
    """First values of a tensor: ``uniform`` with standard deviation ``std``, or all ``value``."""

    kind: Literal["uniform", "constant"]
    std: float = 0.0
    value: float = 0.0


@dataclass(frozen=True, slots=True)
class TensorSpec:
    """One storage: name, shape (C order), dtype, role and first values."""

    name: str
    shape: tuple[int, ...]
    dtype: DType = "F32"
    role: Role = "trainable"
    init: Init = Init("constant")

    @property
    def size(self) -> int:
        """Number of elements; 1 for shape ()."""
        return math.prod(self.shape)

    @property
    def nbytes(self) -> int:
        """Bytes of the canonical copy."""
        return self.size * ITEM_SIZE[self.dtype]


@dataclass(frozen=True, slots=True)
class ParameterManifest:
    """All storages of a model, in walking order; names are unique."""

    tensors: tuple[TensorSpec, ...]

    def __post_init__(self) -> None:
        names = [t.name for t in self.tensors]
        if len(names) != len(set(names)):
            raise ValueError("a parameter manifest names a tensor twice")

    @property
    def parameters(self) -> int:
        """Trainable elements."""
        return sum(t.size for t in self.tensors if t.role == "trainable")

    @property
    def travelling(self) -> tuple[TensorSpec, ...]:
        """What deltas and updates carry: everything that is not frozen."""
        return tuple(t for t in self.tensors if t.role != "frozen")

    @property
    def hash(self) -> str:
        """SHA-256 (hex) of the canonical JSON: what deltas and version manifests refer to."""
        return fingerprint(self)
