"""Deltas: what a node learned in one task, as a file (A1, A3).

``Delta = base - local`` in fp32 for trainable tensors and float buffers; an integer buffer travels
as the local value itself; frozen tensors do not travel. The header lies in the safetensors
metadata. A model that trains in bf16 hands its local weights over widened to fp32.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from distribai.core.spec import BlobRef
from distribai.core.tensors import ParameterManifest, TensorSpec
from distribai.errors import Integrity
from distribai.merge.codecs import GRAIN, codec
from distribai.merge.feedback import (
    Feedback,
    Owed,
    beta_of,
    open_residual,
    residual_writer,
    take_off,
)
from distribai.merge.headers import Claims, from_metadata, require, to_metadata
from distribai.merge.packed import Packed, packed_layout
from distribai.merge.tensorfile import Layout, TensorWriter, open_tensors
from distribai.merge.weights import LARGEST, Weights, all_finite, check_weights, flat, manifest_hash

KIND = "distribai.delta.v1"
_SCAN = 64 * GRAIN


@dataclass(frozen=True, slots=True)
class DeltaHeader:
    """What a delta claims to be. ``tokens`` target tokens trained on in ``steps`` inner steps."""

    job_id: str
    task_id: str
    attempt: int
    base_version: int
    manifest_hash: str
    codec: str
    tokens: int
    steps: int


@dataclass(frozen=True, slots=True)
class Delta:
    """An open delta; values stay in the file until a reader decodes them."""

    header: DeltaHeader
    packed: Packed

    def check_finite(self, manifest: ParameterManifest) -> None:
        """Scan all float values, piece by piece, with memory independent of their number.

        Raises:
            Integrity: ``tensor.nonfinite``, with the first tensor's name.
        """
        scratch = np.empty(_SCAN, np.float32)
        for spec in manifest.travelling:
            if spec.role == "int_buffer":
                continue
            read, release = self.packed.reader(spec), self.packed.releaser(spec)
            for start in range(0, spec.size, _SCAN):
                stop = min(start + _SCAN, spec.size)
                if not all_finite(read(start, stop, scratch[: stop - start])):
                    raise _nonfinite(spec)
                release(start, stop)


def write_delta(
    path: Path,
    manifest: ParameterManifest,
    base: Weights,
    local: Weights,
    header: DeltaHeader,
) -> BlobRef:
    """Write ``base - local``; memory beyond the arguments is one tensor's.

    Args:
        path: where the file shall lie.
        manifest: the model's.
        base: the canonical copy that the work started from.
        local: the trained tensors, fp32 (integer buffers I64); frozen ones may be left out. Shares
            no storage with ``base``.
        header: ``codec`` says how the difference is stored.

    Raises:
        Integrity: ``tensor.manifest``: arrays or header do not belong to the manifest;
            ``tensor.nonfinite``: the training diverged. Nothing is left behind.
        InvalidSpec: ``codec.unknown``.
        ValueError: ``base`` and ``local`` share storage; the difference would be nothing.
        OSError: the file cannot be written.
    """
    with _writer(path, manifest, base, local, header) as writer:
        _write(writer, None, manifest, base, local, header, Owed(None, (), 1.0))
        return writer.commit().blob


def write_delta_with_feedback(
    path: Path,
    manifest: ParameterManifest,
    base: Weights,
    local: Weights,
    header: DeltaHeader,
    feedback: Feedback,
    lost: Sequence[Path] = (),
) -> tuple[BlobRef, BlobRef]:
    """Write ``base - local`` and what earlier deltas owe, and keep what the codec does not send.

    Args:
        path: see :func:`write_delta`, as the other arguments.
        feedback: what was kept before; the new residual is at ``feedback.out`` afterwards.
        lost: earlier deltas that were sent and not merged.

    Returns:
        The delta, and the residual, which lies there first.

    Raises:
        Integrity: see :func:`write_delta`; or what is owed is malformed or not finite.
        InvalidSpec: ``codec.unknown``.
        ValueError: see :func:`write_delta`.
        OSError: a file cannot be read or written.
    """
    before = {"job_id": header.job_id}
    owed = Owed(
        None if feedback.kept is None else open_residual(feedback.kept, manifest),
        tuple(open_delta(file, manifest, before, scan=False).packed for file in lost),
        beta_of(header.codec),
    )
    with (
        _writer(path, manifest, base, local, header) as writer,
        residual_writer(feedback.out, manifest) as rest,
    ):
        _write(writer, rest, manifest, base, local, header, owed)
        residual = rest.commit().blob
        return writer.commit().blob, residual


def _writer(
    path: Path, manifest: ParameterManifest, base: Weights, local: Weights, header: DeltaHeader
) -> TensorWriter:
    require(header, {"manifest_hash": manifest_hash(manifest)})
    check_weights(manifest.travelling, base)
    check_weights(manifest.travelling, local)
    unknown = sorted(local.keys() - {t.name for t in manifest.tensors})
    if unknown:
        raise Integrity("tensor.manifest", f"The model has no tensor {unknown[0]!r}.")
    return TensorWriter(
        path, packed_layout(manifest, codec(header.codec)), to_metadata(KIND, header)
    )


def _write(
    writer: TensorWriter,
    rest: TensorWriter | None,
    manifest: ParameterManifest,
    base: Weights,
    local: Weights,
    header: DeltaHeader,
    owed: Owed,
) -> None:
    how = codec(header.codec)
    for spec in manifest.travelling:
        if spec.role == "int_buffer":
            writer.write(spec.name, 0, flat(local[spec.name]))
            continue
        if np.may_share_memory(base[spec.name], local[spec.name]):
            raise ValueError(f"base and local {spec.name!r} share storage")
        with np.errstate(all="ignore"):  # infinities are found by the scan just below
            values = np.subtract(flat(base[spec.name]), local[spec.name].reshape(-1))
        if not all_finite(values):
            raise _nonfinite(spec)
        owed.add_to(spec, values)
        stored = how.encode(values)
        for suffix, part in stored.items():
            writer.write(spec.name + suffix, 0, part)
        if rest is not None:
            take_off(spec, how, stored, values)
            rest.write(spec.name, 0, values)


def open_delta(
    path: Path,
    manifest: ParameterManifest,
    expect: DeltaHeader | Claims,
    *,
    scan: bool = True,
) -> Delta:
    """Open a delta that came from outside.

    Args:
        path: the blob's file; it must not change while the delta is in use.
        manifest: the job's.
        expect: the whole header, or the fields that must match, by name.
        scan: look for NaN and infinity in all values; leave out only what was scanned before.

    Raises:
        Integrity: ``tensor.format``: not a well-formed delta file; ``tensor.manifest``: made for
            another job, task, base, manifest or codec than expected; ``tensor.nonfinite``.
        InvalidSpec: ``codec.unknown``.
        OSError: the file cannot be read.
    """

    def layout(metadata: Mapping[str, str]) -> Layout:
        header = from_metadata(KIND, DeltaHeader, metadata)
        require(header, expect)
        require(header, {"manifest_hash": manifest_hash(manifest)})
        return packed_layout(manifest, codec(header.codec))

    file = open_tensors(path, layout)
    header = from_metadata(KIND, DeltaHeader, file.metadata)
    delta = Delta(header, Packed(codec(header.codec), file.arrays, file))
    if scan:
        delta.check_finite(manifest)
    return delta


def _nonfinite(spec: TensorSpec) -> Integrity:
    return Integrity(
        "tensor.nonfinite",
        f"The delta of {spec.name!r} holds NaN or infinity, or values beyond {LARGEST:.0e}: the "
        "training diverged.",
        "Lower the learning rate, or raise the warm-up.",
    )
