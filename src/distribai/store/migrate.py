"""Bring a database's schema to this program's, at every start."""

from __future__ import annotations

from pathlib import Path

from alembic import command
from alembic.config import Config
from alembic.util.exc import CommandError
from sqlalchemy import Connection, func, select, text

from distribai.errors import Conflict
from distribai.store import outbox
from distribai.store.engine import Database, Tx
from distribai.store.tables import nodes
from distribai.store.tables import outbox as events

MIGRATION_LOCK = 0x0D157E1B
"""Key of PostgreSQL's advisory lock, so that replicas that start together migrate in turn."""


def alembic_config(connection: Connection) -> Config:
    """Alembic's settings for the revisions of this package, over ``connection``."""
    config = Config()
    config.set_main_option("script_location", str(Path(__file__).parent / "migrations"))
    config.set_main_option("path_separator", "os")
    config.attributes["connection"] = connection
    return config


async def migrate(db: Database) -> None:
    """Upgrade to the newest revision and open the outbox, all in one transaction; and let database
    time go on behind the latest that is stored.

    Raises:
        Conflict: ``grid.schema``: a newer program has been here.
    """
    async with db.write() as tx:
        if tx.dialect == "postgresql":
            await tx.run(text("SELECT pg_advisory_xact_lock(:key)"), {"key": MIGRATION_LOCK})
        await tx.conn.run_sync(_upgrade)
        await outbox.start(tx)
        latest = await _latest(tx)
    db.not_before(latest)


async def _latest(tx: Tx) -> float:
    """When something was stored last. Events come in the order of time, and what is written
    without one is heartbeats."""
    last_event = select(events.c.at).order_by(events.c.id.desc()).limit(1)
    heard = select(func.max(nodes.c.last_heard_at))
    return max(await tx.scalar(last_event) or 0.0, await tx.scalar(heard) or 0.0)


def _upgrade(connection: Connection) -> None:
    try:
        command.upgrade(alembic_config(connection), "head")
    except CommandError as problem:
        raise Conflict(
            "grid.schema",
            f"The database was made by another version of DistribAI: {problem}.",
            "Run the version that it was last used with, or a newer one.",
        ) from problem
