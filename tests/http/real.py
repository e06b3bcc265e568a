"""The interface of a real grid, with a database and a job, on a port of the loopback."""

from __future__ import annotations

import asyncio
import hashlib
import os
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import httpx
import pytest
import structlog
from fastapi import FastAPI

from distribai.core.plain import to_plain
from distribai.core.spec import BlobRef, DataSpec, JobSpec, ModelSpec, RoundSpec
from distribai.orchestrator import certificates
from distribai.orchestrator.context import Grid
from distribai.orchestrator.http.app import create_app
from distribai.orchestrator.people import keys
from distribai.sections import OrchestratorSettings, WebhookSettings
from distribai.store.blobs import BlobStore
from distribai.store.engine import Database
from distribai.wire.joinlink import JoinLink
from tests.http.serving import serving
from tests.store.databases import new_sqlite

TEXT = "".join(f"line {i} of the text\n" for i in range(200)).encode()


@dataclass(frozen=True)
class RealGrid:
    """A served grid. ``known`` are path parameters that name something: a job that waits for the
    operator's word (``ref``), its data (``sha256``), a webhook whose receiver is not there."""

    url: str
    token: str
    app: FastAPI
    grid: Grid
    known: dict[str, str]


def micro(blob: str, size: int) -> JobSpec:
    """A job of some hundred parameters on a file that is there."""
    config = {"dim": 8, "layers": 1, "heads": 2, "ffn_dim": 8}
    return JobSpec(
        name="micro",
        model=ModelSpec("decoder_transformer", config),
        data=DataSpec(source="blobs", files=(BlobRef(blob, size),), held_out=0.1),
        steps=6,
        batch=2,
        seq_len=8,
        rounds=RoundSpec(inner_steps=2),
    )


@contextmanager
def real_grid(root: Path) -> Iterator[RealGrid]:
    """A grid on SQLite, with one job, while the block runs. No duty runs."""
    token = asyncio.run(_prepare(root))
    grid = Grid(
        db=Database(f"sqlite:///{root / 'grid.sqlite3'}", durable=False),
        blobs=BlobStore.open(root / "blobs", root / "staging", max_bytes=1 << 20),
        settings=OrchestratorSettings(state_dir=root, webhooks=WebhookSettings(allow_private=True)),
        clock=time.monotonic,
        entropy=os.urandom,
        grid_id="grid_test",
        authority=certificates.ensure_authority(root / "ca", certificates.utc(time.time())),
        join_link=str(JoinLink("here", "here:1", "here:2", "grid_test", "invite")),
    )
    app = create_app(grid)

    with serving(app, grid.db.close) as url:
        headers = {"Authorization": f"Bearer {token}"}
        with httpx.Client(base_url=url, headers=headers, trust_env=False) as http:
            blob = hashlib.sha256(TEXT).hexdigest()
            asked = {"sha256": blob, "size": len(TEXT)}
            where = http.post("/api/v1/blobs", json=asked).headers["location"]
            http.patch(where, content=TEXT, headers={"Upload-Offset": "0"}).raise_for_status()
            body = {"spec": to_plain(micro(blob, len(TEXT)))}
            job = http.post("/api/v1/jobs", json=body).raise_for_status().json()
            hook = http.post("/api/v1/webhooks", json={"url": "http://127.0.0.1:9/"}).json()
        known = {"ref": job["id"], "sha256": blob, "webhook_id": hook["id"]}
        yield RealGrid(url, token, app, grid, known)


async def _prepare(root: Path) -> str:
    url = await new_sqlite(root)
    db = Database(url, durable=False)
    token = await keys.ensure_operator_key(db, root, os.urandom)
    await db.close()
    return token


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RealGrid]:
    """A grid for all tests of a module; its threads write nothing."""
    structlog.configure(logger_factory=structlog.ReturnLoggerFactory())
    with real_grid(tmp_path_factory.mktemp("grid")) as grid:
        yield grid
    structlog.reset_defaults()
