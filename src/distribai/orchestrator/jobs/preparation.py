"""What a job needs before its row may exist: data, tokenizer, version 0. All of it in blobs.

Everything here is deterministic and named by hash, so that a request which is repeated after a
crash makes the same blobs again, and the row that refers to them is written last.
"""

from __future__ import annotations

import asyncio
import tempfile
from collections.abc import AsyncIterator, Iterator
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass
from pathlib import Path

from distribai.core.architectures import config_from, manifest_of
from distribai.core.people import Principal
from distribai.core.plain import Plain, canonical_json, fingerprint, to_plain
from distribai.core.plan import plan
from distribai.core.spec import BlobRef, JobSpec
from distribai.core.tensors import ParameterManifest
from distribai.data import builtin
from distribai.data.formats import Piece, read_files
from distribai.data.shards import DatasetManifest, prepare
from distribai.data.tokenizers import Tokenizer, load
from distribai.errors import Integrity, InvalidData, InvalidSpec, NotFound
from distribai.merge.manifests import VersionManifest
from distribai.merge.version0 import make_version0
from distribai.merge.weights import (
    Weights,
    all_finite,
    combined_hash,
    open_weights,
    tensor_hashes,
    write_weights,
)
from distribai.orchestrator.context import Grid
from distribai.store.statements import holdings, records
from distribai.store.statements import jobs as statements


@dataclass(frozen=True, slots=True)
class PreparedData:
    """A data set that tasks can read: its key, its manifest's blob, its figures."""

    key: str
    manifest: BlobRef
    figures: dict[str, Plain]


@dataclass(frozen=True, slots=True)
class FirstVersion:
    """Version 0 as it lies in the blob store."""

    weights: BlobRef
    manifest: VersionManifest


async def check_blobs(grid: Grid, spec: JobSpec, caller: Principal | None = None) -> None:
    """Refuse a spec that refers to blobs which are not here, or which ``caller`` has not sent: who
    knows the hash of another's file does not have the file.

    Raises:
        InvalidData: ``data.missing``.
        InvalidSpec: ``spec.model``: the weights to start from are missing.
    """
    known = await _sent(grid, spec, caller)
    named = [(f"data.files[{i}]", ref) for i, ref in enumerate(spec.data.files)]
    if spec.data.tokenizer is not None:
        named.append(("data.tokenizer", spec.data.tokenizer))
    for field, ref in named:
        if not await _here(grid, ref, known):
            raise InvalidData(
                "data.missing",
                f"The blob {ref.sha256[:12]} ({ref.size} bytes) of {field} is not here.",
                "Upload it first; `distribai submit` does.",
                field=field,
            )
    if spec.model.init is not None and not await _here(grid, spec.model.init, known):
        raise InvalidSpec(
            "spec.model",
            f"The weights to start from, blob {spec.model.init.sha256[:12]}, are not here.",
            "Upload them first; `distribai submit` does.",
            field="model.init",
        )


async def _sent(grid: Grid, spec: JobSpec, caller: Principal | None) -> set[str] | None:
    """Which of the spec's blobs the caller may name; None: any."""
    if caller is None or caller.operator:
        return None
    refs = [*spec.data.files, spec.data.tokenizer, spec.model.init]
    hashes = {ref.sha256 for ref in refs if ref is not None}
    async with grid.db.read() as tx:
        return await holdings.has_uploaded(tx, caller.account_id, hashes)


async def _here(grid: Grid, ref: BlobRef, known: set[str] | None) -> bool:
    if known is not None and ref.sha256 not in known:
        return False
    try:
        return await grid.blobs.size(ref.sha256) == ref.size
    except NotFound:
        return False


def dataset_key(spec: JobSpec) -> str:
    """What decides every byte of a prepared data set."""
    return fingerprint([to_plain(spec.data), spec.seq_len, spec.seed])


async def prepare_data(grid: Grid, spec: JobSpec) -> PreparedData:
    """The job's data set, cut into shards, or the one that is there from an earlier job.

    Raises:
        InvalidData: the data is missing, empty, not UTF-8, malformed or too short.
        InvalidSpec: ``spec.model``: the vocabulary is larger than the model's.
    """
    key = dataset_key(spec)
    async with grid.db.read() as tx:
        row = await statements.dataset(tx, key)
    if row is not None:
        _check_vocabulary(spec, row.figures["vocab_size"])
        return PreparedData(key, BlobRef(row.manifest_sha, row.manifest_size), row.figures)
    async with _files(grid, spec) as (files, tokenizer_path):
        name = f"The tokenizer ({_blob(spec.data.tokenizer)})"
        tokenizer = await asyncio.to_thread(load, tokenizer_path, name)
        _check_vocabulary(spec, tokenizer.vocab_size)
        with tempfile.TemporaryDirectory(prefix="data-", dir=grid.scratch) as scratch:
            manifest, paths = await asyncio.to_thread(_cut, spec, files, tokenizer, Path(scratch))
            for shard, path in zip(manifest.shards, paths, strict=True):
                if path.exists():  # equal shards are one file, named twice
                    await grid.blobs.put_file(path, shard.blob)
    ref = await grid.blobs.put_bytes(canonical_json(manifest).encode())
    figures = _figures(manifest)
    async with grid.db.write() as tx:
        for blob in (ref, *(s.blob for s in manifest.shards)):
            await records.add_blob(tx, blob, "data")
        await statements.add_dataset(
            tx,
            key=key,
            manifest_sha=ref.sha256,
            manifest_size=ref.size,
            figures=figures,
            created_at=tx.now,
        )
    return PreparedData(key, ref, figures)


def _figures(manifest: DatasetManifest) -> dict[str, Plain]:
    return {
        "tokens": manifest.tokens,
        "train_sequences": manifest.train_sequences,
        "held_out_sequences": manifest.held_out_sequences,
        "vocab_size": manifest.vocab_size,
        "tokenizer": manifest.tokenizer,
        "shards": len(manifest.shards),
        "bytes": sum(s.blob.size for s in manifest.shards),
    }


@asynccontextmanager
async def _files(grid: Grid, spec: JobSpec) -> AsyncIterator[tuple[list[Path], Path | None]]:
    """Local paths of the data files and of the tokenizer."""
    async with AsyncExitStack() as stack:
        files = [await stack.enter_async_context(grid.blobs.local(f)) for f in spec.data.files]
        tokenizer = None
        if spec.data.tokenizer is not None:
            tokenizer = await stack.enter_async_context(grid.blobs.local(spec.data.tokenizer))
        yield files, tokenizer


def _cut(
    spec: JobSpec, files: list[Path], tokenizer: Tokenizer, out: Path
) -> tuple[DatasetManifest, list[Path]]:
    documents: Iterator[Piece]
    if spec.data.source == "blobs":
        # Where a blob lies here is nobody's business but the operator's.
        names = [f"Data file {i} ({_blob(f)})" for i, f in enumerate(spec.data.files, start=1)]
        documents = read_files(files, spec.data.format, spec.data.field, names)
    else:
        documents = builtin.documents(spec.data.source)
    return prepare(
        documents,
        tokenizer,
        spec.seq_len,
        spec.data.held_out,
        spec.seed,
        out,
        tokenizer_blob=spec.data.tokenizer,
    )


def _blob(ref: BlobRef | None) -> str:
    return "none" if ref is None else f"blob {ref.sha256[:12]}"


def _check_vocabulary(spec: JobSpec, needed: int) -> None:
    config = config_from(spec.model.family, spec.model.config)
    has = getattr(config, "vocab_size", None)
    if has is not None and needed > has:
        raise InvalidSpec(
            "spec.model",
            f"The tokenizer has {needed} ids, the model's vocabulary only {has}.",
            f"Set vocab_size to at least {needed}.",
            field="model.architecture_config.vocab_size",
        )


async def make_first_version(grid: Grid, job_id: str, spec: JobSpec) -> FirstVersion:
    """Version 0 in the blob store: from the seed, or from the user's weights.

    Raises:
        Integrity: the user's weights are malformed, another model's, or not finite.
    """
    manifest = manifest_of(spec.model.family, spec.model.config)
    with tempfile.TemporaryDirectory(prefix="version0-", dir=grid.scratch) as scratch:
        path = Path(scratch) / "weights.safetensors"
        if spec.model.init is None:
            ref, record = await asyncio.to_thread(
                _write_first, job_id, manifest, None, spec.seed, path
            )
        else:
            async with grid.blobs.local(spec.model.init) as source:
                ref, record = await asyncio.to_thread(
                    _write_first, job_id, manifest, source, spec.seed, path
                )
        await grid.blobs.put_file(path, ref)
    return FirstVersion(ref, record)


def _write_first(
    job_id: str, manifest: ParameterManifest, source: Path | None, seed: int, path: Path
) -> tuple[BlobRef, VersionManifest]:
    weights: Weights
    if source is None:
        weights = make_version0(manifest, seed)
    else:
        weights = open_weights(source, manifest)
        for spec in manifest.tensors:
            if spec.dtype == "F32" and not all_finite(weights[spec.name]):
                raise Integrity(
                    "tensor.nonfinite",
                    f"The weights to start from hold NaN or infinity in {spec.name!r}.",
                    "Give other weights, or none.",
                    field="model.init",
                )
    ref = write_weights(path, manifest, weights)
    tensors = tensor_hashes(manifest, weights)
    record = VersionManifest(
        job_id=job_id,
        version=0,
        manifest_hash=manifest.hash,
        tensors=tensors,
        weights_hash=combined_hash(tensors),
        snapshot=ref,
    )
    return ref, record


def plan_figures(spec: JobSpec, parameters: int, data: PreparedData) -> dict[str, Plain]:
    """The planner's figures for the smallest number of workers."""
    sequences, size = data.figures["train_sequences"], data.figures["bytes"]
    figures: dict[str, Plain] = to_plain(plan(spec, parameters, spec.workers_min, sequences, size))
    return figures
