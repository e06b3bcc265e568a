"""Deleting what nothing needs: snapshots of versions that keep none, blobs that no row names,
uploads that were left alone, idempotency keys of requests that nobody repeats any more.

Whatever a row names stays: every version's encoded update, every accepted delta and data set, the
snapshots and outer states that a job keeps, so that a lineage can be replayed for ever; and what an
open task reports or starts from. The others are deltas of refused and superseded work, what a user
uploaded and never used, files of a merge or a preparation that died before its rows were written.

A blob is there before the row that names it. So one is deleted only when it was put longer than
``orphans_s`` ago and nothing names it; who is told "it is here already" of a blob that nothing
names yet, and that is half that old, sends it again (``http.blobs``), which makes it new.

Snapshots go in two steps (``core.snapshots``, ADR 0012). One transaction takes their names out of
the version's row and dates them; ``let_go_s`` later they are deleted, unless something has named or
sent them meanwhile. That long a look that was begun before, a download or a job that is to start
from such weights may go on: the blob's own row still says whose weights it was, and who might fetch
it still may. Both steps are done again, to the same end, after a crash.
"""

from __future__ import annotations

import tempfile
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path

from sqlalchemy import select

from distribai import points
from distribai.core.snapshots import to_let_go
from distribai.core.states import TASK, TaskState, is_terminal
from distribai.errors import NotFound
from distribai.orchestrator import events
from distribai.orchestrator.backup.existing import existing
from distribai.orchestrator.backup.naming import CLAIMS, Named
from distribai.orchestrator.context import Grid
from distribai.orchestrator.rounds.tasks import spec_of
from distribai.sections import OrchestratorSettings
from distribai.store.blobs import BlobStore, StoredBlob
from distribai.store.engine import Database, Tx
from distribai.store.statements import holdings, idempotency, jobs, records, snapshots
from distribai.store.tables import metadata, tasks

CLEAN_S = 900.0
"""Seconds between two looks for what nothing needs any more."""

ROWS_AT_ONCE = 500


@dataclass
class Orphans:
    """What nothing names and is old enough: ``blobs`` of them with ``bytes`` in all."""

    blobs: int = 0
    bytes: int = 0


async def collect(grid: Grid) -> Orphans:
    """Delete orphans, idle uploads and old idempotency keys, and let go of snapshots, which the
    next looks delete; what was deleted of blobs.

    Raises:
        Unavailable: the database or the blob store is away; what is left is found again.
    """
    found = Orphans()
    gone, missing, before = await _orphans(grid.db, grid.blobs, grid.settings)
    deleted = set()
    if gone:
        # First: what is forgotten and stays is sent again, what goes and is not would count on.
        async with grid.db.write() as tx:
            await holdings.forget_uploads(tx, [b.ref.sha256 for b, _ in gone])
    for blob, older_s in gone:
        if await _put_again(grid.blobs, blob, older_s):
            continue
        points.reach("blob.delete.before")
        await grid.blobs.delete(blob.ref.sha256)
        points.reach("blob.delete.after")
        deleted.add(blob.ref.sha256)
        found.blobs += 1
        found.bytes += blob.ref.size
    if deleted or missing:
        async with grid.db.write() as tx:
            await snapshots.forget(tx, missing | deleted, before)
    await let_go(grid)
    grid.blobs.uploads.drop_idle_now()
    async with grid.db.write() as tx:
        await idempotency.prune(tx, grid.settings.idempotency_s)
    if found.blobs:
        async with grid.db.write() as tx:
            data = {"blobs": found.blobs, "bytes": found.bytes}
            await events.record(tx, "grid.cleaned", data=data)
    return found


async def let_go(grid: Grid) -> int:
    """Let go of the snapshots that no job keeps; of how many versions.

    Raises:
        Unavailable: the database is away.
    """
    if not grid.settings.let_go_s:
        return 0
    async with grid.db.read() as tx:
        found = await snapshots.present(tx)
    count = 0
    for job_id in sorted(job_id for job_id, numbers in found.items() if len(numbers) > 2):
        async with grid.db.read() as tx:
            if not await _dispensable(grid, tx, job_id):
                continue
        async with grid.db.write() as tx:
            await jobs.lock(tx, job_id)
            numbers = await _dispensable(grid, tx, job_id)
            await snapshots.let_go(tx, job_id, numbers)
        count += len(numbers)
    return count


async def _dispensable(grid: Grid, tx: Tx, job_id: str) -> tuple[int, ...]:
    """The versions of a job whose snapshots nothing needs any more."""
    job = await jobs.get(tx, job_id)
    assert job is not None, "versions.job_id refers to it"
    present = (await snapshots.present(tx, job_id))[job_id]
    rule, most = spec_of(job).snapshots, grid.settings.max_snapshots
    return to_let_go(present, job.version, rule, most, await snapshots.bases(tx, job_id))


async def _put_again(blobs: BlobStore, blob: StoredBlob, older_s: float) -> bool:
    """Whether somebody has sent it since it was listed: a row that names it is on its way."""
    try:
        return (await blobs.stat(blob.ref.sha256)).age <= timedelta(seconds=older_s)
    except NotFound:
        return False


async def _orphans(
    db: Database, blobs: BlobStore, settings: OrchestratorSettings
) -> tuple[list[tuple[StoredBlob, float]], frozenset[str], float]:
    """The store's blobs that nothing names and that were put longer ago than the seconds beside
    each: what was let go may go sooner than what nothing has ever named. What was let go and is
    not there any more. And until when it must have been let go to go now."""
    due: frozenset[str] = frozenset()
    async with db.read() as tx:
        before = tx.now - settings.let_go_s
        if settings.let_go_s:
            due = frozenset(await snapshots.let_go_until(tx, before))
    if not settings.orphans_s and not due:
        return [], due, before

    def patience(blob: StoredBlob) -> float:
        return settings.let_go_s if blob.ref.sha256 in due else settings.orphans_s

    # Listed first: what is named afterwards is seen to be named, what is put afterwards is young.
    old, missing = [], set(due)
    async for blob in blobs.stored():
        missing.discard(blob.ref.sha256)
        older_s = patience(blob)
        if older_s and blob.age > timedelta(seconds=older_s):
            old.append((blob, older_s))
    named = await _named(db, settings.let_go_s) if old else set()
    gone = [found for found in old if found[0].ref.sha256 not in named]
    return gone, frozenset(missing), before


async def find_orphans(settings: OrchestratorSettings) -> list[StoredBlob]:
    """What a grid's next look would delete; deletes nothing, and may run beside the grid.

    Raises:
        NotFound: ``grid.missing``: there is no grid where the settings say.
        Unavailable: ``grid.database`` or ``blob.store``.
    """
    async with existing(settings) as db:
        with tempfile.TemporaryDirectory(prefix="distribai-") as staging:
            blobs = BlobStore.open(settings.blob_place, Path(staging), max_bytes=0)
            return [blob for blob, _ in (await _orphans(db, blobs, settings))[0]]


async def is_settled(grid: Grid, blob: StoredBlob) -> bool:
    """Whether a blob that is there will stay, so that nobody need send it again: it is on record
    and was not let go, or so young that the row which is to name it will be there in time."""
    async with grid.db.read() as tx:
        known = await records.blob(tx, blob.ref.sha256)
    if known is not None:
        return known.let_go_at is None
    older_s = grid.settings.orphans_s
    return not older_s or blob.age < timedelta(seconds=older_s / 2)


async def _named(db: Database, let_go_s: float) -> set[str]:
    """SHA-256 of every blob that a row needs, or needed less than ``let_go_s`` seconds ago."""
    named = Named()
    async with db.read() as tx:
        lately = await snapshots.let_go_since(tx, tx.now - let_go_s)
        for table in metadata.sorted_tables:
            if table.name in CLAIMS:
                continue
            rows = await tx.conn.stream(
                select(table), execution_options={"yield_per": ROWS_AT_ONCE}
            )
            async for row in rows:
                named.add(table, tuple(row))
        # What a node claims counts as long as it is not judged.
        open_states = [s.value for s in TaskState if not is_terminal(TASK, s)]
        rows = await tx.conn.stream(
            select(tasks).where(tasks.c.state.in_(open_states)),
            execution_options={"yield_per": ROWS_AT_ONCE},
        )
        async for row in rows:
            named.add(tasks, tuple(row))
    return named.needed.keys() | named.claimed.keys() | set(lately)
