"""The whole weights of a version that keeps no snapshot: made again from the last one before it and
the encoded updates since, the same file to the byte (ADR 0012)."""

from __future__ import annotations

import asyncio
import tempfile
from collections.abc import Sequence
from contextlib import AsyncExitStack
from datetime import timedelta
from pathlib import Path

from distribai.core.architectures import manifest_of
from distribai.core.snapshots import CHAIN
from distribai.core.spec import BlobRef, JobSpec
from distribai.errors import Integrity, NotFound
from distribai.merge.update import follow_updates
from distribai.orchestrator.context import Grid
from distribai.orchestrator.rounds.tasks import spec_of
from distribai.store.engine import AnyRow
from distribai.store.statements import jobs, snapshots
from distribai.store.values import blob_or_none


async def whole_weights(grid: Grid, job: AnyRow, number: int) -> BlobRef:
    """The weights file of a version that exists. One that has to be made again stays for
    ``let_go_s`` seconds; one at a time is made.

    Raises:
        NotFound, Integrity: a file that leads there is gone or damaged.
        Unavailable: the database or the blob store is away.
    """
    async with grid.db.read() as tx:
        rows = await jobs.latest_versions(tx, job.id, number, CHAIN + 1)
    kept = blob_or_none(rows[0].weights_sha, rows[0].weights_size)
    if kept is not None:
        return kept
    async with grid.stock.rebuilding:
        known = grid.stock.rebuilt.get((job.id, number))
        if known is not None and await _is_fresh(grid, known):
            return known
        ref = await _rebuild(grid, spec_of(job), rows)
        async with grid.db.write() as tx:
            await snapshots.lend(tx, ref, job.id)
        grid.stock.remember(job.id, number, ref)
        return ref


async def _is_fresh(grid: Grid, ref: BlobRef) -> bool:
    """Whether a file is there, and will be for a while."""
    try:
        age = (await grid.blobs.stat(ref.sha256)).age
    except NotFound:
        return False
    return age < timedelta(seconds=grid.settings.let_go_s / 2)


async def _rebuild(grid: Grid, spec: JobSpec, rows: Sequence[AnyRow]) -> BlobRef:
    """``rows``: the version and those before it, newest first."""
    base = next(i for i, row in enumerate(rows) if row.weights_sha)
    since = rows[:base][::-1]
    async with AsyncExitStack() as stack:
        local = grid.blobs.local
        start = await stack.enter_async_context(
            local(BlobRef(rows[base].weights_sha, rows[base].weights_size))
        )
        updates = [
            await stack.enter_async_context(local(BlobRef(row.update_sha, row.update_size)))
            for row in since
        ]
        scratch = stack.enter_context(
            tempfile.TemporaryDirectory(prefix="weights-", dir=grid.scratch)
        )
        path = Path(scratch) / "weights"
        ref, found = await asyncio.to_thread(
            follow_updates,
            manifest_of(spec.model.family, spec.model.config),
            start,
            updates,
            [{"job_id": row.job_id, "version": row.version} for row in since],
            path,
        )
        if found != rows[0].weights_hash:
            raise Integrity(
                "grid.damaged",
                f"Version {rows[0].version} of job {rows[0].job_id} came out as {found[:12]}, "
                f"not {rows[0].weights_hash[:12]}.",
                "A file that leads there is another one than it was; restore it from a backup.",
            )
        await grid.blobs.put_file(path, ref)
    return ref
