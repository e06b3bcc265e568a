"""What a merge reads, and the outer step over it: a pure function of rows and blobs."""

from __future__ import annotations

import asyncio
import hashlib
import os
from collections.abc import Sequence
from contextlib import AsyncExitStack
from dataclasses import dataclass
from pathlib import Path

from distribai.core.architectures import manifest_of
from distribai.core.codecs import feeds_back
from distribai.core.plain import from_plain
from distribai.core.spec import BlobRef, JobSpec
from distribai.core.tensors import ParameterManifest
from distribai.merge.choices import outer_coefficients
from distribai.merge.delta import Delta, open_delta
from distribai.merge.feedback import Feedback
from distribai.merge.manifests import AcceptedSubmission, VersionManifest
from distribai.merge.outer import MergedFiles, UpdateHeader, merge_files
from distribai.orchestrator.context import Grid
from distribai.orchestrator.rounds import tasks
from distribai.store.engine import AnyRow
from distribai.store.statements import fleet, jobs, submissions
from distribai.store.values import blob_or_none, ranges_from_json


@dataclass(frozen=True, slots=True)
class Inputs:
    """What a merge reads: all rows of one closing round. ``submissions`` in the order of adding."""

    spec: JobSpec
    manifest: ParameterManifest
    base: AnyRow
    base_manifest: VersionManifest
    submissions: tuple[AcceptedSubmission, ...]

    @property
    def momentum(self) -> BlobRef | None:
        """The outer momentum at the base version; nothing at version 0."""
        return blob_or_none(self.base.outer_sha, self.base.outer_size)

    @property
    def residual(self) -> BlobRef | None:
        """What the way down keeps at the base version."""
        return blob_or_none(self.base.residual_sha, self.base.residual_size)


async def read_inputs(grid: Grid, row: AnyRow) -> Inputs:
    """All that the merge of a closing round reads."""
    async with grid.db.read() as tx:
        job = await jobs.get(tx, row.job_id)
        base = await jobs.version(tx, row.job_id, row.number)
        accepted = await submissions.submissions_of_round(tx, row.job_id, row.number, row.take)
        nodes = await fleet.nodes_by_id(tx, {s.node_id for s in accepted})
    assert job is not None
    assert base is not None
    spec = tasks.spec_of(job)
    keys = {n.id: hashlib.sha256(n.public_key).digest() for n in nodes}
    ordered = sorted(accepted, key=lambda s: (keys[s.node_id], s.slot, s.task_id))
    return Inputs(
        spec=spec,
        manifest=manifest_of(spec.model.family, spec.model.config),
        base=base,
        base_manifest=from_plain(VersionManifest, base.manifest),
        submissions=tuple(
            AcceptedSubmission(
                task_id=s.task_id,
                attempt=s.attempt,
                node_id=s.node_id,
                delta=BlobRef(s.delta_sha, s.delta_size),
                tokens=s.tokens,
                steps=s.steps,
                samples=ranges_from_json(s.samples),
                staleness=row.number - s.base_version,
            )
            for s in ordered
        ),
    )


async def compute(grid: Grid, row: AnyRow, inputs: Inputs, scratch: Path) -> MergedFiles:
    """The outer step, in a thread.

    Raises:
        DistribAIError: the inputs cannot be merged.
    """
    async with AsyncExitStack() as stack:
        base = BlobRef(inputs.base.weights_sha, inputs.base.weights_size)
        theta = await stack.enter_async_context(grid.blobs.local(base))
        momentum = None
        if inputs.momentum is not None:
            momentum = await stack.enter_async_context(grid.blobs.local(inputs.momentum))
        residual = None
        if inputs.residual is not None:
            residual = await stack.enter_async_context(grid.blobs.local(inputs.residual))
        paths = [
            await stack.enter_async_context(grid.blobs.local(s.delta)) for s in inputs.submissions
        ]
        return await asyncio.to_thread(
            _outer_step,
            row.job_id,
            row.number,
            inputs,
            theta,
            momentum,
            residual,
            paths,
            scratch,
            grid.settings.merge_threads or os.cpu_count() or 1,
        )


def _outer_step(
    job_id: str,
    number: int,
    inputs: Inputs,
    theta: Path,
    momentum: Path | None,
    residual: Path | None,
    paths: Sequence[Path],
    scratch: Path,
    threads: int,
) -> MergedFiles:
    deltas: list[Delta] = [
        # Scanned for NaN when it was verified; its hash says that it is the same file.
        open_delta(
            path,
            inputs.manifest,
            {
                "task_id": s.task_id,
                "attempt": s.attempt,
                "base_version": number - s.staleness,
            },
            scan=False,
        )
        for path, s in zip(paths, inputs.submissions, strict=True)
    ]
    from_trained = inputs.spec.model.init is not None
    eta, mu = outer_coefficients(
        inputs.spec.outer, number, from_trained, inputs.spec.round_count - 1 - number
    )
    feedback = None
    if feeds_back(inputs.spec.rounds.codec_down):
        feedback = Feedback(residual, scratch / "residual")
    return merge_files(
        inputs.manifest,
        theta,
        momentum,
        deltas,
        [s.tokens for s in inputs.submissions],
        eta,
        mu,
        out_theta=scratch / "theta",
        out_momentum=scratch / "momentum",
        out_update=scratch / "update",
        header=UpdateHeader(
            job_id=job_id,
            version=number + 1,
            manifest_hash=inputs.manifest.hash,
            codec=inputs.spec.codec_down_of(number),
        ),
        threads=threads,
        staleness=[s.staleness for s in inputs.submissions],
        feedback=feedback,
    )
