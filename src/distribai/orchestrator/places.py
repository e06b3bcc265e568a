"""Whether database and blob store belong together."""

from __future__ import annotations

from pathlib import Path

import structlog

from distribai.errors import Conflict, Unavailable
from distribai.store.blobs import BlobStore
from distribai.store.engine import Database
from distribai.store.statements import records

log = structlog.get_logger(__name__)

LOOKED_AT = 20
"""Latest blobs of which one must be there. A single one may be lost: its job says so."""


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
