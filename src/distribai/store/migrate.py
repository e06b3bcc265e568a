"""Bring a database's schema to this program's: at every start, or when the operator says so."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from alembic import command
from alembic.config import Config
from alembic.migration import MigrationContext
from alembic.script import ScriptDirectory
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


@dataclass(frozen=True, slots=True)
class Step:
    """One revision that a database has not yet: its number and what it is about."""

    revision: str
    title: str


@dataclass(frozen=True, slots=True)
class Schema:
    """Where a database stands: its ``revision`` (empty: it holds no grid), this program's newest
    one, and the steps between, in their order."""

    revision: str
    newest: str
    steps: tuple[Step, ...]


async def schema_of(tx: Tx) -> Schema:
    """Where a database stands; changes nothing.

    Raises:
        Conflict: ``grid.schema``: a newer program has been here.
    """
    return await tx.conn.run_sync(_schema)


def _schema(connection: Connection) -> Schema:
    scripts = ScriptDirectory.from_config(alembic_config(connection))
    revision = MigrationContext.configure(connection).get_current_revision() or ""
    newest = scripts.get_current_head() or ""
    try:
        path = list(scripts.iterate_revisions(newest, revision or "base"))
    except CommandError as problem:
        raise _newer(problem) from problem
    return Schema(revision, newest, tuple(Step(s.revision, s.doc) for s in reversed(path)))


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
        raise _newer(problem) from problem


def _newer(problem: CommandError) -> Conflict:
    return Conflict(
        "grid.schema",
        f"The database was made by another version of DistribAI: {problem}.",
        "Run the version that it was last used with, or a newer one.",
    )
