"""The stores of a grid that is there, for commands that work beside its orchestrator."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from distribai.errors import NotFound
from distribai.sections import OrchestratorSettings
from distribai.store.engine import Database


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


def no_grid(why: str) -> NotFound:
    """There is no grid where the settings say."""
    return NotFound(
        "grid.missing",
        f"There is no grid: {why}.",
        "Give the --state-dir, --db and --blobs that `orchestrator start` is given.",
    )
