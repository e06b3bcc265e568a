"""Deleting what nothing needs: blobs that no row names, uploads that were left alone, idempotency
keys of requests that nobody repeats any more.

Such blobs are deltas of refused and superseded work, what a user uploaded and never used, files of
a merge or a preparation that died before its rows were written. Whatever a row names stays: every
version's snapshot and update, every accepted delta, momentum and data set, so that a lineage can be
replayed for ever; and what an open task reports.

A blob is there before the row that names it. So one is deleted only when it was put longer than
``orphans_s`` ago and nothing names it; who is told "it is here already" of a blob that nothing
names yet, and that is half that old, sends it again (``http.blobs``), which makes it new.
"""

from __future__ import annotations

import tempfile
from collections.abc import AsyncIterator
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path

from sqlalchemy import select

from distribai.core.states import TASK, TaskState, is_terminal
from distribai.errors import NotFound
from distribai.orchestrator import events
from distribai.orchestrator.backup.existing import existing
from distribai.orchestrator.backup.naming import CLAIMS, Named
from distribai.orchestrator.context import Grid
from distribai.sections import OrchestratorSettings
from distribai.store.blobs import BlobStore, StoredBlob
from distribai.store.engine import Database
from distribai.store.statements import holdings, idempotency, records
from distribai.store.tables import metadata, tasks

ROWS_AT_ONCE = 500


@dataclass
class Orphans:
    """What nothing names and is old enough: ``blobs`` of them with ``bytes`` in all."""

    blobs: int = 0
    bytes: int = 0


async def collect(grid: Grid) -> Orphans:
    """Delete orphans, idle uploads and old idempotency keys; what was deleted of blobs.

    Raises:
        Unavailable: the database or the blob store is away; what is left is found again.
    """
    found = Orphans()
    older_s = grid.settings.orphans_s
    gone = [b async for b in orphans(grid.db, grid.blobs, older_s)]
    if gone:
        # First: what is forgotten and stays is sent again, what goes and is not would count on.
        async with grid.db.write() as tx:
            await holdings.forget_uploads(tx, [b.ref.sha256 for b in gone])
    for blob in gone:
        if await _put_again(grid.blobs, blob, older_s):
            continue
        await grid.blobs.delete(blob.ref.sha256)
        found.blobs += 1
        found.bytes += blob.ref.size
    grid.blobs.uploads.drop_idle_now()
    async with grid.db.write() as tx:
        await idempotency.prune(tx, grid.settings.idempotency_s)
    if found.blobs:
        async with grid.db.write() as tx:
            data = {"blobs": found.blobs, "bytes": found.bytes}
            await events.record(tx, "grid.cleaned", data=data)
    return found


async def _put_again(blobs: BlobStore, blob: StoredBlob, older_s: float) -> bool:
    """Whether somebody has sent it since it was listed: a row that names it is on its way."""
    try:
        return (await blobs.stat(blob.ref.sha256)).age <= timedelta(seconds=older_s)
    except NotFound:
        return False


async def orphans(db: Database, blobs: BlobStore, older_s: float) -> AsyncIterator[StoredBlob]:
    """The store's blobs that were put more than ``older_s`` seconds ago and that nothing names;
    none when that is 0."""
    if not older_s:
        return
    # Listed first: what is named afterwards is seen to be named, what is put afterwards is young.
    old = [b async for b in blobs.stored() if b.age > timedelta(seconds=older_s)]
    if not old:
        return
    named = await _named(db)
    for blob in old:
        if blob.ref.sha256 not in named:
            yield blob


async def find_orphans(settings: OrchestratorSettings) -> list[StoredBlob]:
    """What a grid's next look would delete; deletes nothing, and may run beside the grid.

    Raises:
        NotFound: ``grid.missing``: there is no grid where the settings say.
        Unavailable: ``grid.database`` or ``blob.store``.
    """
    async with existing(settings) as db:
        with tempfile.TemporaryDirectory(prefix="distribai-") as staging:
            blobs = BlobStore.open(settings.blob_place, Path(staging), max_bytes=0)
            return [b async for b in orphans(db, blobs, settings.orphans_s)]


async def is_settled(grid: Grid, blob: StoredBlob) -> bool:
    """Whether a blob that is there will stay, so that nobody need send it again: it is on record,
    or so young that the row which is to name it will be there in time."""
    if not grid.settings.orphans_s or blob.age < timedelta(seconds=grid.settings.orphans_s / 2):
        return True
    async with grid.db.read() as tx:
        return await records.blob(tx, blob.ref.sha256) is not None


async def _named(db: Database) -> set[str]:
    """SHA-256 of every blob that a row needs."""
    named = Named()
    async with db.read() as tx:
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
    return named.needed.keys() | named.claimed.keys()
