"""Downloads from the object store that the grid sends on to, and what happens where it is away."""

from __future__ import annotations

import socket
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from distribai.core.direct import RELAY_S
from distribai.node.blobs import BlobClient
from distribai.testing.clock import FakeClock
from tests.node.helpers import BlobServer, NoJitter, serving

DATA = bytes(range(256)) * 5000


@pytest.fixture
async def store() -> AsyncIterator[BlobServer]:
    async with serving(BlobServer()) as running:
        yield running


@pytest.fixture
async def server(store: BlobServer) -> AsyncIterator[BlobServer]:
    """The grid, which sends on to the store."""
    async with serving(BlobServer()) as running:
        running.store = store.url
        yield running


@pytest.fixture
def clock() -> FakeClock:
    return FakeClock()


@pytest.fixture
async def client(server: BlobServer, clock: FakeClock) -> AsyncIterator[BlobClient]:
    made = BlobClient(server.url, lambda: "secret", clock, NoJitter(), attempts=4, trust_env=False)
    yield made
    await made.close()


def nowhere() -> str:
    """An address at which nobody listens."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        return f"http://127.0.0.1:{free.getsockname()[1]}"


def ways(server: BlobServer) -> list[str]:
    """How the grid was asked for blobs: 1 is with leave to send on."""
    asked = [h for method, _, h in server.requests if method == "GET"]
    return [h.get("x-distribai-follow", "") for h in asked]


async def test_the_store_gives_the_bytes_and_gets_no_secret_and_the_grid_hears_of_them(
    server: BlobServer, store: BlobServer, client: BlobClient, tmp_path: Path
) -> None:
    ref = store.put(DATA)
    await client.download(ref, tmp_path / "x", "job_a")
    assert (tmp_path / "x").read_bytes() == DATA
    ((_, path, told),) = store.requests
    assert path == f"/api/v1/blobs/{ref.sha256}"
    assert "authorization" not in told
    assert not any(name.startswith("x-distribai") for name in told)
    assert "secret" not in repr(told)
    assert client.traffic.down.total == len(DATA)
    assert server.fetched == [("job_a", ref.sha256, len(DATA))]


async def test_a_download_that_the_store_cuts_goes_on_there_at_the_next_byte(
    server: BlobServer, store: BlobServer, client: BlobClient, tmp_path: Path
) -> None:
    ref = store.put(DATA)
    store.cut_download = [400_000]
    await client.download(ref, tmp_path / "x", "job_a")
    assert (tmp_path / "x").read_bytes() == DATA
    assert [h.get("range") for _, _, h in store.requests] == [None, "bytes=400000-"]
    moved = [400_000, len(DATA) - 400_000]
    assert server.fetched == [("job_a", ref.sha256, n) for n in moved]


async def test_where_the_store_is_out_of_reach_the_grid_gives_the_bytes_and_is_asked_so_for_a_while(
    server: BlobServer,
    store: BlobServer,
    client: BlobClient,
    clock: FakeClock,
    tmp_path: Path,
) -> None:
    ref = server.put(DATA)
    store.put(DATA)
    server.store = nowhere()
    await client.download(ref, tmp_path / "x", "job_a")
    assert (tmp_path / "x").read_bytes() == DATA
    assert ways(server) == ["1", ""]
    server.store = store.url
    await client.download(ref, tmp_path / "y", "job_a")
    assert ways(server) == ["1", "", ""]
    assert server.fetched == [], "the grid has counted these itself"
    await clock.advance(RELAY_S)
    await client.download(ref, tmp_path / "z", "job_a")
    assert ways(server) == ["1", "", "", "1"]
    assert server.fetched == [("job_a", ref.sha256, len(DATA))]


@pytest.mark.parametrize("status", [302, 400, 403, 404, 500, 503])
async def test_a_store_that_refuses_is_not_needed(
    server: BlobServer, store: BlobServer, client: BlobClient, tmp_path: Path, status: int
) -> None:
    ref = server.put(DATA)
    store.statuses = [status]
    await client.download(ref, tmp_path / "x", "job_a")
    assert (tmp_path / "x").read_bytes() == DATA
    assert ways(server) == ["1", ""]


@pytest.mark.parametrize("lie", [b"a hotel's welcome page", DATA[:-1] + b"!", DATA + b"more"])
async def test_a_store_that_gives_other_bytes_is_not_needed(
    server: BlobServer, store: BlobServer, client: BlobClient, tmp_path: Path, lie: bytes
) -> None:
    ref = server.put(DATA)
    store.lie[ref.sha256] = lie
    await client.download(ref, tmp_path / "x", "job_a")
    assert (tmp_path / "x").read_bytes() == DATA
    assert ways(server)[-1] == ""


async def test_what_the_grid_could_not_hear_it_hears_the_next_time(
    server: BlobServer, store: BlobServer, client: BlobClient, tmp_path: Path
) -> None:
    first, second = store.put(DATA), store.put(DATA[1:])

    original = store._download

    async def and_then_away(*request: object) -> None:
        server.statuses = [503]  # to what comes after the download
        await original(*request)  # type: ignore[arg-type]

    store._download = and_then_away  # type: ignore[method-assign,assignment]
    await client.download(first, tmp_path / "x", "job_a")
    assert server.fetched == []
    store._download = original  # type: ignore[method-assign]
    await client.download(second, tmp_path / "y", "job_b")
    assert server.fetched == [
        ("job_a", first.sha256, len(DATA)),
        ("job_b", second.sha256, len(DATA) - 1),
    ]
