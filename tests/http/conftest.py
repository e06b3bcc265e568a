"""The interface over an in-memory grid, called without a network."""

from __future__ import annotations

from collections.abc import AsyncIterator
from pathlib import Path

import httpx
import pytest
from fastapi import FastAPI

from distribai.orchestrator.context import Grid
from distribai.orchestrator.http.app import create_app
from tests.http.stand_in import NODE, OPERATOR, Orchestrator, make_grid


@pytest.fixture
def rooms(monkeypatch: pytest.MonkeyPatch) -> Orchestrator:
    made = Orchestrator()
    made.install(monkeypatch)
    return made


@pytest.fixture
def grid(tmp_path: Path) -> Grid:
    return make_grid(tmp_path)


_made: list[FastAPI] = []
"""One application for all tests: making it takes longer than most of them."""


def caller(grid: Grid, token: str) -> httpx.AsyncClient:
    if not _made:
        _made.append(create_app(grid))
    _made[0].state.grid = grid
    transport = httpx.ASGITransport(_made[0], raise_app_exceptions=False)
    headers = {"Authorization": f"Bearer {token}"} if token else {}
    return httpx.AsyncClient(transport=transport, base_url="http://grid", headers=headers)


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
    async with caller(grid, "") as client:
        yield client
