"""The stores of a grid that is there, for commands that work beside its orchestrator, or instead of
it."""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager

from distribai.errors import Conflict, NotFound
from distribai.sections import OrchestratorSettings
from distribai.store import leases
from distribai.store.engine import Database, Tx
from distribai.store.lock import FileLock


@asynccontextmanager
async def existing(settings: OrchestratorSettings) -> AsyncIterator[Database]:
    """The database of the grid that ``settings`` name. One that is not there is not made.

    Raises:
        NotFound: ``grid.missing``.
    """
    if not settings.db and not settings.database_file.exists():
        raise no_grid(f"there is no file {settings.database_file}")
    db = Database(settings.database_url)
    try:
        if db.dialect == "sqlite" and not db.path.exists():
            raise no_grid(f"there is no file {db.path}")
        yield db
    finally:
        await db.close()


@contextmanager
def closed(db: Database) -> Iterator[None]:
    """Keep orchestrators away from an SQLite file as long as the block runs.

    Raises:
        Conflict: ``grid.locked``: one runs on it.
    """
    if db.dialect != "sqlite":
        yield
        return
    lock = FileLock(db.path)
    try:
        yield
    finally:
        lock.release()


async def check_resting(db: Database) -> None:
    """Refuse a PostgreSQL on which a replica works: it holds leases of duties. (On an SQLite file
    :func:`closed` tells, and old leases are those of a dead process.)

    Raises:
        Conflict: ``grid.locked``.
    """
    if db.dialect == "sqlite":
        return
    async with db.read() as tx:
        _refuse_lease(await leases.held_until(tx), tx.now)


async def lock_resting(tx: Tx, since: float) -> None:
    """Keep replicas from every lease until this transaction ends, and refuse if one holds a lease
    or has held one after ``since`` (database time): it may have changed what was read then.

    Who writes for a lease meanwhile waits, and sees then what this transaction has written.

    Raises:
        Conflict: ``grid.locked``.
    """
    if tx.dialect == "sqlite":
        return
    await leases.lock_duties(tx)
    until = await leases.held_until(tx)
    _refuse_lease(until, tx.now)
    if until > since:
        raise Conflict(
            "grid.locked",
            "An orchestrator has been at work on this grid meanwhile: what it did would be "
            "missing in the new place.",
            "Leave every replica stopped, and run the same command again.",
        )


def _refuse_lease(until: float, now: float) -> None:
    if until > now:
        raise Conflict(
            "grid.locked",
            "An orchestrator is at work on this grid: it holds the lease of a duty for another "
            f"{until - now:.0f} s.",
            "Stop every replica first. After one that was killed, wait until its leases have run "
            "out, half a minute at most.",
        )


def no_grid(why: str) -> NotFound:
    """There is no grid where the settings say."""
    return NotFound(
        "grid.missing",
        f"There is no grid: {why}.",
        "Give the --state-dir, --db and --blobs that `orchestrator start` is given.",
    )
