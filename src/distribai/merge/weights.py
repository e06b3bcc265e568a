"""Canonical weights: arrays by name, their one hash, their files.

Arrays are C-contiguous in the manifest's canonical dtypes (BF16 as uint16); no two share storage.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from distribai.core.plain import fingerprint
from distribai.core.spec import BlobRef
from distribai.core.tensors import ParameterManifest, TensorSpec
from distribai.errors import Integrity
from distribai.merge.tensorfile import NUMPY_DTYPES, Layout, TensorWriter, open_tensors

Weights = dict[str, NDArray[Any]]

LARGEST = 1e18
"""The largest magnitude of a value that is taken from outside. Nothing that trains comes near it,
and sums over every node's tokens and rounds' momentum stay far below fp32's 3.4e38."""

_SCAN = 1 << 17
"""Elements at a time when values are looked over."""

_ROLE_DTYPES = {"trainable": "F32", "float_buffer": "F32", "int_buffer": "I64"}


@dataclass(frozen=True, slots=True)
class TensorHash:
    """One canonical tensor: name, dtype, shape and SHA-256 (hex) of its little-endian bytes."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    sha256: str


def check_manifest(manifest: ParameterManifest) -> None:
    """Refuse a manifest whose merged tensors have no exact canonical arithmetic here.

    Raises:
        ValueError: a trainable tensor or float buffer is not F32, or an integer buffer not I64.
    """
    for spec in manifest.tensors:
        wanted = _ROLE_DTYPES.get(spec.role, spec.dtype)
        if spec.dtype != wanted:
            raise ValueError(f"{spec.role} {spec.name!r} is {spec.dtype}; it must be {wanted}")


def weights_layout(manifest: ParameterManifest) -> Layout:
    """The tensors of a weights file."""
    check_manifest(manifest)
    return {t.name: (t.dtype, t.shape) for t in manifest.tensors}


def check_weights(specs: Iterable[TensorSpec], weights: Mapping[str, NDArray[Any]]) -> None:
    """Refuse arrays that are not the tensors ``specs``, or miss one.

    Raises:
        Integrity: ``tensor.manifest``.
    """
    for spec in specs:
        array = weights.get(spec.name)
        if array is None:
            raise Integrity("tensor.manifest", f"The tensor {spec.name!r} is missing.")
        if array.dtype != NUMPY_DTYPES[spec.dtype] or array.shape != spec.shape:
            raise Integrity(
                "tensor.manifest",
                f"{spec.name!r} is {array.dtype}{list(array.shape)}, "
                f"not {spec.dtype}{list(spec.shape)}.",
            )


@lru_cache(maxsize=64)
def manifest_hash(manifest: ParameterManifest) -> str:
    """``manifest.hash``, remembered: it is compared with every file that comes in."""
    return manifest.hash


def trainable(manifest: ParameterManifest) -> ParameterManifest:
    """The manifest of the trainable tensors alone: what momentum looks like."""
    return ParameterManifest(tuple(t for t in manifest.tensors if t.role == "trainable"))


def flat(array: NDArray[Any]) -> NDArray[Any]:
    """The same storage with shape (size,).

    Raises:
        ValueError: the array is not C-contiguous.
    """
    if not array.flags.c_contiguous:
        raise ValueError("canonical tensors are C-contiguous")
    return array.reshape(-1)


def all_finite(values: NDArray[Any]) -> bool:
    """Whether a float array holds neither NaN nor infinity, nor a value beyond :data:`LARGEST`,
    with which sums would soon be infinite; scans in pieces that a second-level cache holds."""
    line = flat(values)
    with np.errstate(invalid="ignore"):  # a NaN that signals is still a NaN
        # A NaN is the largest and the smallest of whatever it is among, and within no bounds.
        return all(
            bool(piece.min() >= -LARGEST and piece.max() <= LARGEST)
            for piece in (line[i : i + _SCAN] for i in range(0, line.size, _SCAN))
        )


def tensor_hashes(manifest: ParameterManifest, weights: Weights) -> tuple[TensorHash, ...]:
    """The hash of each tensor, in manifest order.

    Raises:
        Integrity: ``tensor.manifest``: not the manifest's tensors.
    """
    check_weights(manifest.tensors, weights)
    return tuple(
        TensorHash(t.name, t.dtype, t.shape, _sha256(weights[t.name])) for t in manifest.tensors
    )


def combined_hash(tensors: Iterable[TensorHash]) -> str:
    """SHA-256 (hex) of the canonical JSON list of [name, dtype, shape, sha256]."""
    return fingerprint([[t.name, t.dtype, t.shape, t.sha256] for t in tensors])


def weights_hash(manifest: ParameterManifest, weights: Weights) -> str:
    """The one hash of canonical weights, over name, dtype, shape and bytes in manifest order.

    Raises:
        Integrity: ``tensor.manifest``: not the manifest's tensors.
    """
    return combined_hash(tensor_hashes(manifest, weights))


def write_weights(
    path: Path,
    manifest: ParameterManifest,
    weights: Weights,
    metadata: Mapping[str, str] | None = None,
) -> BlobRef:
    """Write a safetensors file: the same bytes for the same weights and metadata.

    Raises:
        Integrity: ``tensor.manifest``: not the manifest's tensors.
        OSError: it cannot be written; nothing is left behind.
    """
    check_weights(manifest.tensors, weights)
    with TensorWriter(path, weights_layout(manifest), metadata or {}) as writer:
        for spec in manifest.tensors:
            writer.write(spec.name, 0, flat(weights[spec.name]))
        return writer.commit().blob


def open_weights(path: Path, manifest: ParameterManifest) -> Weights:
    """Memory-mapped, read-only views of a weights file, after its header was checked.

    Raises:
        Integrity: ``tensor.format`` or ``tensor.manifest``.
        OSError: the file cannot be read.
    """
    arrays = open_tensors(path, weights_layout(manifest)).arrays
    return {t.name: arrays[t.name] for t in manifest.tensors}


def _sha256(array: NDArray[Any]) -> str:
    return hashlib.sha256(flat(array).view(np.uint8).data).hexdigest()
