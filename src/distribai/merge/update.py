"""Updates: the encoded outer update that leads from version v - 1 to v; the way down (A3).

``theta' = theta - u`` for trainable tensors and float buffers, with the decoded ``u``; an integer
buffer's new value travels itself. Orchestrator and nodes run the same numpy operations on the same
values, so all canonical copies stay equal, bit for bit.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from distribai.core.spec import BlobRef
from distribai.core.tensors import ParameterManifest, TensorSpec
from distribai.merge.codecs import codec
from distribai.merge.headers import Claims, from_metadata, require, to_metadata
from distribai.merge.kernel import CHUNK, check_arithmetic
from distribai.merge.packed import Packed, packed_layout
from distribai.merge.tensorfile import Layout, TensorWriter, open_tensors
from distribai.merge.weights import (
    TensorHash,
    Weights,
    check_weights,
    combined_hash,
    flat,
    manifest_hash,
    open_weights,
    weights_layout,
)

KIND = "distribai.update.v1"


@dataclass(frozen=True, slots=True)
class UpdateHeader:
    """What an update claims to be: the one that leads to ``version``."""

    job_id: str
    version: int
    manifest_hash: str
    codec: str


def update_writer(path: Path, manifest: ParameterManifest, header: UpdateHeader) -> TensorWriter:
    """A writer of an update file; the caller writes every travelling tensor's parts."""
    require(header, {"manifest_hash": manifest_hash(manifest)})
    layout = packed_layout(manifest, codec(header.codec))
    return TensorWriter(path, layout, to_metadata(KIND, header))


def write_update(
    path: Path, manifest: ParameterManifest, update: Weights, header: UpdateHeader
) -> BlobRef:
    """Write an update: ``u`` of float tensors, new values of integer buffers.

    Raises:
        Integrity: ``tensor.manifest``: arrays or header do not belong to the manifest.
        InvalidSpec: ``codec.unknown``.
        OSError: the file cannot be written; nothing is left behind.
    """
    check_weights(manifest.travelling, update)
    how = codec(header.codec)
    with update_writer(path, manifest, header) as writer:
        for spec in manifest.travelling:
            values = flat(update[spec.name])
            parts = {"": values} if spec.role == "int_buffer" else how.encode(values)
            for suffix, part in parts.items():
                writer.write(spec.name + suffix, 0, part)
        return writer.commit().blob


def open_update(path: Path, manifest: ParameterManifest, expect: UpdateHeader | Claims) -> Packed:
    """Map an update after its header was checked.

    Raises:
        Integrity: ``tensor.format`` or ``tensor.manifest``: malformed, for another model or job,
            or not what was expected.
        InvalidSpec: ``codec.unknown``.
        OSError: the file cannot be read.
    """

    def layout(metadata: Mapping[str, str]) -> Layout:
        header = from_metadata(KIND, UpdateHeader, metadata)
        require(header, {"manifest_hash": manifest_hash(manifest)})
        require(header, expect)
        return packed_layout(manifest, codec(header.codec))

    file = open_tensors(path, layout)
    header = from_metadata(KIND, UpdateHeader, file.metadata)
    return Packed(codec(header.codec), file.arrays, file)


def apply_update(
    manifest: ParameterManifest,
    canonical: Weights,
    path: Path,
    *,
    expect: UpdateHeader | Claims | None = None,
    in_place: bool = False,
) -> Weights:
    """The next version's weights.

    Args:
        manifest: the model's.
        canonical: the weights of the version before; unchanged unless ``in_place``.
        path: the update's file.
        expect: the whole header, or the fields that must match, by name.
        in_place: write into ``canonical`` and return it. Nothing is written before the file's
            header was checked. The caller compares the result's hash with the version's.

    Raises:
        Integrity: ``tensor.format`` or ``tensor.manifest``: malformed, for another model or job,
            or not what was expected.
        InvalidSpec: ``codec.unknown``.
        InternalFault: this process's arithmetic is not IEEE.
        OSError: the file cannot be read.
    """
    check_arithmetic()
    check_weights(manifest.tensors, canonical)
    packed = open_update(path, manifest, expect or {})
    out = canonical if in_place else _empty_like(manifest, canonical)
    for spec in manifest.tensors:
        _apply(spec, flat(canonical[spec.name]), flat(out[spec.name]), packed)
    return out


def follow_updates(
    manifest: ParameterManifest,
    start: Path,
    updates: Sequence[Path],
    expect: Sequence[Claims],
    out: Path,
) -> tuple[BlobRef, str]:
    """Write the weights file that some updates lead to, to the byte what the merges wrote; memory
    is that of the largest tensor.

    Args:
        manifest: the model's.
        start: weights file of the version before the first update.
        updates: files, in order.
        expect: the fields that must match in each one's header, by name.
        out: where the file shall lie.

    Returns:
        The file as a blob, and the one hash of its weights, which the caller compares.

    Raises:
        Integrity, InvalidSpec, InternalFault: see :func:`apply_update`; nothing is written then.
        OSError: a file cannot be read or written.
    """
    check_arithmetic()
    files = [open_update(p, manifest, claims) for p, claims in zip(updates, expect, strict=True)]
    weights = open_weights(start, manifest)
    with TensorWriter(out, weights_layout(manifest), {}) as writer:
        for spec in manifest.tensors:
            values = np.array(flat(weights[spec.name]))
            for packed in files:
                _apply(spec, values, values, packed)
            writer.write(spec.name, 0, values)
        written = writer.commit()
    hashes = (
        TensorHash(t.name, t.dtype, t.shape, written.tensors[t.name]) for t in manifest.tensors
    )
    return written.blob, combined_hash(hashes)


def _apply(spec: TensorSpec, old: NDArray[Any], new: NDArray[Any], packed: Packed) -> None:
    """One tensor's step; ``new`` may be ``old``."""
    if spec.role == "frozen":
        new[...] = old
    elif spec.role == "int_buffer":
        new[...] = packed.integers(spec)
    else:
        _subtract(old, new, packed, spec)
    packed.releaser(spec)(0, spec.size)


def _empty_like(manifest: ParameterManifest, weights: Weights) -> Weights:
    return {t.name: np.empty_like(weights[t.name]) for t in manifest.tensors}


def _subtract(
    old: NDArray[np.float32], new: NDArray[np.float32], packed: Packed, spec: TensorSpec
) -> None:
    read, scratch = packed.reader(spec), np.empty(CHUNK, np.float32)
    with np.errstate(all="ignore"):  # the result is judged by its hash
        for start in range(0, spec.size, CHUNK):
            stop = min(start + CHUNK, spec.size)
            update = read(start, stop, scratch[: stop - start])
            np.subtract(old[start:stop], update, new[start:stop])
