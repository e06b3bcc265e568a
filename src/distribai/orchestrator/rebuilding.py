"""The whole weights of a version that keeps no snapshot: made again from the last one before it and
the encoded updates since, the same file to the byte (ADR 0012)."""

from __future__ import annotations

import asyncio
import tempfile
from collections.abc import Sequence
from contextlib import AsyncExitStack
from pathlib import Path

from distribai.core.architectures import manifest_of
from distribai.core.snapshots import CHAIN
from distribai.core.spec import BlobRef, JobSpec
from distribai.errors import Integrity, NotFound
from distribai.merge.update import follow_updates
from distribai.orchestrator.context import Grid
from distribai.orchestrator.fleet.loans import Loan
from distribai.orchestrator.retention import CLEAN_S
from distribai.orchestrator.rounds.tasks import spec_of
from distribai.store.engine import AnyRow
from distribai.store.statements import jobs, records, snapshots
from distribai.store.values import blob_or_none


async def whole_weights(grid: Grid, job: AnyRow, number: int, account: str) -> BlobRef:
    """The weights file of a version that exists. One that has to be made again, for ``account``,
    stays for ``let_go_s`` seconds; one at a time is made, and one waits of each account.

    Raises:
        NotFound, Integrity: a file that leads there is gone or damaged.
        TooMany: ``limit.rate``: the account's last one is not made yet, or there is no room.
        Unavailable: the database or the blob store is away.
    """
    (row,) = await _rows(grid, job, number, 1)
    found = blob_or_none(row.weights_sha, row.weights_size) or await _lent(grid, job.id, number)
    if found is not None:
        return found
    loans = grid.stock.loans
    with loans.turn(account):
        async with loans.making:
            found = await _lent(grid, job.id, number)
            if found is not None:
                return found
            try:
                return await _make(grid, job, number, account)
            except NotFound:
                # The snapshot before it was let go and deleted since its row was read.
                return await _make(grid, job, number, account)


async def _rows(grid: Grid, job: AnyRow, number: int, count: int) -> Sequence[AnyRow]:
    async with grid.db.read() as tx:
        return await jobs.latest_versions(tx, job.id, number, count)


async def _lent(grid: Grid, job_id: str, number: int) -> BlobRef | None:
    """A version's file, if it was made again lately and will be there for a while."""
    loan = grid.stock.loans.files.get((job_id, number))
    if loan is None or not await grid.blobs.exists(loan.ref.sha256):
        return None
    async with grid.db.read() as tx:
        row, now = await records.blob(tx, loan.ref.sha256), tx.now
    if row is None:
        return None
    let_go_s = grid.settings.let_go_s
    lasts = row.let_go_at is None or not let_go_s or now - row.let_go_at < let_go_s / 2
    return loan.ref if lasts else None


async def _make(grid: Grid, job: AnyRow, number: int, account: str) -> BlobRef:
    """Make a version's weights again, and lend them."""
    loans, settings = grid.stock.loans, grid.settings
    rows = await _rows(grid, job, number, CHAIN + 1)
    if settings.let_go_s:
        size = next(row.weights_size for row in rows if row.weights_sha)
        loans.check_room((job.id, number), account, size, grid.clock())
    ref = await _rebuild(grid, spec_of(job), rows)
    async with grid.db.write() as tx:
        await snapshots.lend(tx, ref, job.id)
    loans.files[job.id, number] = Loan(ref, account, grid.clock() + settings.let_go_s + CLEAN_S)
    return ref


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
