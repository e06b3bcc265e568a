"""A node's download from the bucket that the orchestrator sends it to, with both halves real."""

from __future__ import annotations

from pathlib import Path

import pytest

from distribai.node.blobs import BlobClient
from distribai.orchestrator.fleet.liveness import flush
from distribai.orchestrator.http import ranges
from distribai.orchestrator.jobs import queries
from distribai.store.blobs import BlobStore
from distribai.store.presigning import presigner
from distribai.store.statements import records
from distribai.testing.clock import FakeClock
from tests.http.interface import Interface
from tests.node.helpers import NoJitter, serving
from tests.node.test_direct import nowhere
from tests.orchestrator.harness import World


@pytest.mark.parametrize("reachable", [True, False])
async def test_every_byte_is_counted_once_whichever_way_it_came(
    world: World,
    s3_environment: str,
    tmp_path: Path,
    reachable: bool,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(ranges, "SMALL", 1)  # the model of this test is a tiny one
    grid, place = world.grid, f"s3://grid/{tmp_path.name}"
    grid.blobs = BlobStore.open(place, tmp_path / "s3", max_bytes=1 << 24)
    grid.presigner = presigner(place, "on", "" if reachable else nowhere())
    job_id = await world.job()
    node = await world.node("a")
    await node.next_training()
    _, ref = await queries.weights_blob(grid, job_id, 0)
    async with serving(Interface(grid)) as app:  # type: ignore[arg-type]  # any application
        client = BlobClient(app.url, lambda: node.token, FakeClock(), NoJitter(), trust_env=False)
        await client.download(ref, tmp_path / "out", job_id)
        await client.close()
    assert client.traffic.down.total == ref.size
    await flush(grid)
    async with grid.db.read() as tx:
        assert await records.traffic_of(tx, job_id) == {"weights": (0, ref.size)}
