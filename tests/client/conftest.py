"""A served in-memory grid."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import structlog
from fastapi import FastAPI

from distribai.client import Client
from distribai.orchestrator.context import Grid
from distribai.orchestrator.http.app import create_app
from tests.http.serving import serving
from tests.http.stand_in import OPERATOR, Orchestrator, make_grid


@pytest.fixture(scope="package")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[str, FastAPI]]:
    app = create_app(make_grid(tmp_path_factory.mktemp("grid")))
    # stdout is what commands are judged by; the server's thread must not write there.
    structlog.configure(logger_factory=structlog.ReturnLoggerFactory())
    with serving(app) as url:
        yield url, app
    structlog.reset_defaults()


@pytest.fixture
def rooms(monkeypatch: pytest.MonkeyPatch) -> Orchestrator:
    made = Orchestrator()
    made.install(monkeypatch)
    return made


@pytest.fixture
def grid(tmp_path: Path, served: tuple[str, FastAPI]) -> Grid:
    made = make_grid(tmp_path / "grid")
    served[1].state.grid = made
    return made


@pytest.fixture
def url(served: tuple[str, FastAPI], grid: Grid, rooms: Orchestrator) -> str:
    return served[0]


@pytest.fixture
def client(url: str) -> Iterator[Client]:
    with Client(url, OPERATOR) as made:
        yield made
