from __future__ import annotations

from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from distribai.store.engine import Database
from tests.store.databases import new_postgres, new_sqlite


class Clock:
    """Database time that a test moves."""

    def __init__(self) -> None:
        self.now = 1_000_000.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture(params=["sqlite", "postgresql"])
async def url(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    """A migrated database of either kind."""
    if request.param == "sqlite":
        return await new_sqlite(tmp_path)
    return await new_postgres(request.getfixturevalue("postgres"))


@pytest.fixture
async def db(url: str, clock: Clock) -> AsyncIterator[Database]:
    """The database behind ``url``, on the test's clock."""
    database = Database(url, clock=clock, durable=False)
    yield database
    await database.close()
