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
