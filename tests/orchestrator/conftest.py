from __future__ import annotations

from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from tests.orchestrator.harness import World
from tests.store.databases import new_postgres, new_sqlite


@pytest.fixture
async def world(tmp_path: Path) -> AsyncIterator[World]:
    """A grid on SQLite."""
    made = await World(tmp_path, await new_sqlite(tmp_path)).open()
    yield made
    await made.close()


@pytest.fixture(params=["sqlite", "postgresql"])
async def any_world(request: pytest.FixtureRequest, tmp_path: Path) -> AsyncIterator[World]:
    """A grid on either database."""
    if request.param == "sqlite":
        url = await new_sqlite(tmp_path)
    else:
        url = await new_postgres(request.getfixturevalue("postgres"))
    made = await World(tmp_path, url).open()
    yield made
    await made.close()


@pytest.fixture
async def replicas(tmp_path: Path, postgres: str) -> AsyncIterator[tuple[World, World]]:
    """Two replicas of one grid on PostgreSQL, the first of which holds all duties."""
    url = await new_postgres(postgres)
    first = await World(tmp_path / "first", url).open()
    second = await World(tmp_path / "second", url, first.time, seed=1).open()
    await first.settle()
    yield first, second
    for world in (first, second):
        await world.close()
