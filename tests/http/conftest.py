"""The interface over an in-memory grid, called without a network."""

from __future__ import annotations

from collections.abc import AsyncIterator
from pathlib import Path

import httpx
import pytest

from distribai.orchestrator.context import Grid
from tests.http.interface import caller
from tests.http.stand_in import NODE, OPERATOR, Orchestrator, make_grid


@pytest.fixture
def rooms(monkeypatch: pytest.MonkeyPatch) -> Orchestrator:
    made = Orchestrator()
    made.install(monkeypatch)
    return made


@pytest.fixture
def grid(tmp_path: Path) -> Grid:
    return make_grid(tmp_path)


@pytest.fixture
async def operator(grid: Grid, rooms: Orchestrator) -> AsyncIterator[httpx.AsyncClient]:
    async with caller(grid, OPERATOR) as client:
        yield client


@pytest.fixture
async def node(grid: Grid, rooms: Orchestrator) -> AsyncIterator[httpx.AsyncClient]:
    async with caller(grid, NODE) as client:
        yield client


@pytest.fixture
async def stranger(grid: Grid, rooms: Orchestrator) -> AsyncIterator[httpx.AsyncClient]:
    async with caller(grid) as client:
        yield client
