"""Whether database and blob store belong together, and whether the grid is still here."""

from __future__ import annotations

from pathlib import Path

import structlog

from distribai.errors import Conflict, Unavailable
from distribai.store.blobs import BlobStore
from distribai.store.engine import Database, Tx
from distribai.store.statements import facts, records

log = structlog.get_logger(__name__)

LOOKED_AT = 20
"""Latest blobs of which one must be there. A single one may be lost: its job says so."""


MOVED = "moved_to"
"""The fact that says where a grid went (``store.drivers.shown``): this database is its past."""


async def moved_to(db: Database) -> str | None:
    """Where the grid of this database went; None: it is here."""
    async with db.read() as tx:
        return await facts.get(tx, MOVED)


async def check_here(tx: Tx) -> None:
    """Refuse a database from which the grid was moved away: two grids would go on from one past,
    and every node belongs to both.

    Raises:
        Conflict: ``grid.moved``.
    """
    if there := await facts.get(tx, MOVED):
        raise gone(there)


def gone(there: str) -> Conflict:
    """The grid was moved to ``there``."""
    return Conflict(
        "grid.moved",
        f"This grid was moved to {there}; what is here is its past.",
        "Give that place as --db (and its --blobs and --state-dir). If the move was interrupted, "
        "run the same `grid migrate` again. To go on from here all the same, and lose what was "
        "done there since: make sure that no orchestrator starts there, then `distribai grid "
        "migrate --undo`.",
        field="db",
    )


def arrived(there: str) -> Conflict:
    """The grid was moved to ``there`` and has all that it needs."""
    return Conflict(
        "grid.moved",
        f"This grid was moved to {there} already, and the move is complete.",
        "Start there: give that place as --db (and its --blobs and --state-dir). If the move was "
        "killed right after its end, delete the directory `restoring` in that state directory. To "
        "give the new place up and go on from here: `distribai grid migrate --undo`.",
        field="db",
    )


async def check_blobs(db: Database, blobs: BlobStore, place: str | Path) -> None:
    """Refuse a blob store that has nothing of what the database speaks of: a replica on it would
    reject everybody's work. One that cannot be reached now is taken as it is.

    Raises:
        Conflict: ``grid.blobs``.
        Unavailable: ``grid.database``.
    """
    async with db.read() as tx:
        wanted = await records.latest_blobs(tx, LOOKED_AT)
    try:
        for sha256 in wanted:
            if await blobs.exists(sha256):
                return
    except Unavailable as problem:
        log.warning("the blob store cannot be looked at yet", why=problem.message)
        return
    if wanted:
        raise Conflict(
            "grid.blobs",
            f"Of the {len(wanted)} latest blobs of this grid none is in {place}.",
            "All replicas need the same --blobs, a bucket or a directory that they share. After a "
            "restore, bring the blobs back first: `distribai grid restore`.",
            field="blobs",
        )
