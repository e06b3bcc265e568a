"""Version 0: the same first weights everywhere, from the manifest and a seed (A0).

Tensor ``i`` of the manifest takes the raw 64-bit words of Philox4x64-10 (Salmon et al., SC 2011)
with key ``(seed, i)`` and numpy's counter, which starts at 1. Raw words of numpy's bit generators
are stable across releases; ``Generator`` methods are not. The top 24 bits ``k`` of word ``j`` make
element ``j``: ``(k * 2**-23 - 1) * a`` with ``a = float32(std * sqrt(3))``, uniform over [-a, a).
``k * 2**-23 - 1`` is exact in fp32, so each element has exactly one rounding.
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np
from numpy.typing import NDArray

from distribai.core.tensors import ParameterManifest, TensorSpec
from distribai.merge.tensorfile import NUMPY_DTYPES
from distribai.merge.weights import Weights, check_manifest

_CHUNK = 1 << 16


def make_version0(manifest: ParameterManifest, seed: int) -> Weights:
    """First weights: new C-contiguous arrays by name, in manifest order.

    Args:
        manifest: names, shapes, dtypes and first values.
        seed: ``0 <= seed < 2**64``.

    Raises:
        ValueError: the seed is out of range, or an integer tensor is to start uniform.
    """
    if not 0 <= seed < 1 << 64:
        raise ValueError(f"the seed {seed} is not an unsigned 64-bit number")
    check_manifest(manifest)
    return {spec.name: _first(spec, seed, i) for i, spec in enumerate(manifest.tensors)}


def to_bf16(values: NDArray[np.float32]) -> NDArray[np.uint16]:
    """The bits of bf16, rounded to nearest even; finite input."""
    bits = values.view(np.uint32)
    rounded = (bits + (0x7FFF + ((bits >> 16) & 1))) >> 16
    return rounded.astype(np.uint16)


def _first(spec: TensorSpec, seed: int, index: int) -> NDArray[Any]:
    out: NDArray[Any] = np.empty(spec.shape, NUMPY_DTYPES[spec.dtype])
    if spec.init.kind == "constant":
        out[...] = _cast(np.full(1, spec.init.value, np.float64), spec.dtype)[0]
        return out
    if spec.dtype == "I64":
        raise ValueError(f"integer tensor {spec.name!r} cannot start uniform")
    words = np.random.Philox(key=np.array([seed, index], np.uint64))
    amplitude = np.float32(spec.init.std * math.sqrt(3))
    line = out.reshape(-1)
    for start in range(0, line.size, _CHUNK):
        piece = line[start : start + _CHUNK]
        unit = (words.random_raw(piece.size) >> np.uint64(40)).astype(np.float32)
        unit *= np.float32(2**-23)
        unit -= np.float32(1)
        unit *= amplitude
        piece[...] = _cast(unit, spec.dtype)
    return out


def _cast(values: NDArray[Any], dtype: str) -> NDArray[Any]:
    if dtype == "BF16":
        return to_bf16(values.astype(np.float32))
    return values.astype(NUMPY_DTYPES[dtype])
