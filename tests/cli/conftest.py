"""The command line in this process, against the served in-memory grid."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from distribai.cli.main import main
from tests.client.conftest import grid, rooms, served
from tests.http.stand_in import OPERATOR, Orchestrator

__all__ = ["grid", "rooms", "served"]


@dataclass
class Done:
    """What a command left."""

    status: int
    out: str
    err: str

    @property
    def json(self) -> Any:
        return json.loads(self.out)


Run = Callable[..., Done]


@pytest.fixture
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    for name in ("DISTRIBAI_URL", "DISTRIBAI_TOKEN", "DISTRIBAI_DEBUG"):
        monkeypatch.setenv(name, "")  # so that what the command line sets is taken back
        monkeypatch.delenv(name)
    monkeypatch.setenv("DISTRIBAI_HOME", str(tmp_path / "home"))
    monkeypatch.chdir(tmp_path)
    return tmp_path / "home"


@pytest.fixture
def offline(home: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> Run:
    # It would lead this process's log into one test's output, for all tests after it.
    monkeypatch.setattr("distribai.cli.logs.configure", lambda *_, **__: None)

    def run(*words: str) -> Done:
        capsys.readouterr()
        status = main(list(words))
        caught = capsys.readouterr()
        return Done(status, caught.out, caught.err)

    return run


@pytest.fixture
def run(
    offline: Run,
    served: tuple[str, object],
    grid: object,
    rooms: Orchestrator,
    monkeypatch: pytest.MonkeyPatch,
) -> Run:
    monkeypatch.setenv("DISTRIBAI_URL", served[0])
    monkeypatch.setenv("DISTRIBAI_TOKEN", OPERATOR)
    return offline
