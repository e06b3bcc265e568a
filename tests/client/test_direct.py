"""Weights that the object store hands out itself, and that the orchestrator gives where it does
not."""

from __future__ import annotations

import asyncio
import os
import socket
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest

from distribai.client import Client, transfer
from distribai.core.spec import BlobRef
from distribai.orchestrator.context import Grid
from distribai.store.blobs import BlobStore
from distribai.store.presigning import Presigner, presigner
from tests.client.test_transfer import Cut, Faulty
from tests.http.stand_in import OPERATOR, Orchestrator, job_record, spec
from tests.store.buckets import CREDENTIALS

DATA = os.urandom(300_000)


@pytest.fixture
async def weights(grid: Grid, rooms: Orchestrator, s3_endpoint: str, tmp_path: Path) -> BlobRef:
    """A version of a job in a bucket that is reached from here."""
    place, s3 = f"s3://grid/{tmp_path.name}", {**CREDENTIALS, "endpoint": s3_endpoint}
    grid.blobs = BlobStore.open(place, tmp_path / "s3", max_bytes=1 << 26, s3=s3)
    grid.presigner = presigner(place, "on", s3=s3)
    ref = await grid.blobs.put_bytes(DATA)
    rooms.jobs["job_a"] = job_record("job_a", spec())
    rooms.weights["job_a"] = [ref]
    return ref


@pytest.fixture
def asked(monkeypatch: pytest.MonkeyPatch) -> list[httpx.Request]:
    """Every request that went to another host than the orchestrator."""
    found: list[httpx.Request] = []
    original = httpx.HTTPTransport.handle_request

    def note(self: httpx.HTTPTransport, request: httpx.Request) -> httpx.Response:
        if "X-Amz-Signature" in str(request.url) or "elsewhere" in str(request.url):
            found.append(request)
        return original(self, request)

    monkeypatch.setattr(httpx.HTTPTransport, "handle_request", note)
    return found


@pytest.fixture
def client(url: str) -> Iterator[tuple[Client, Faulty]]:
    transport = Faulty({})
    made = Client(url, OPERATOR, transport=transport)
    made.blobs = transfer.Transfer(made._http, url, sleep=lambda seconds: None)
    yield made, transport
    made.close()


Of = tuple[Client, Faulty]


async def fetch(client: Client, out: Path) -> tuple[int, BlobRef]:
    return await asyncio.to_thread(client.download_weights, "job_a", None, out)


class SignsFor(Presigner):
    """Sends whoever asks to an address of the test's choice."""

    def __init__(self, url: str) -> None:
        self._url = url

    async def address(self, sha256: str) -> str:
        return self._url


async def test_weights_come_from_the_store_which_gets_no_key(
    client: Of, weights: BlobRef, asked: list[httpx.Request], tmp_path: Path
) -> None:
    assert await fetch(client[0], tmp_path / "out") == (0, weights)
    assert (tmp_path / "out").read_bytes() == DATA
    (request,) = asked
    assert "authorization" not in request.headers
    assert OPERATOR not in repr(request.headers)


async def test_a_download_that_breaks_off_goes_on_at_the_store(
    client: Of,
    weights: BlobRef,
    asked: list[httpx.Request],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    original = transfer._Download.take

    def cut(self: transfer._Download, response: httpx.Response) -> None:
        monkeypatch.setattr(transfer._Download, "take", original)
        stream = response.stream
        assert isinstance(stream, httpx.SyncByteStream)
        response.stream = Cut(stream, 1000)
        original(self, response)

    monkeypatch.setattr(transfer._Download, "take", cut)
    assert await fetch(client[0], tmp_path / "out") == (0, weights)
    assert [r.headers.get("range") for r in asked] == [None, "bytes=1000-"]


async def test_where_the_store_is_out_of_reach_the_orchestrator_gives_the_bytes(
    client: Of, grid: Grid, weights: BlobRef, tmp_path: Path
) -> None:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        grid.presigner = SignsFor(f"http://127.0.0.1:{free.getsockname()[1]}/elsewhere")
    assert await fetch(client[0], tmp_path / "out") == (0, weights)
    assert len(client[1].requests) == 2
    assert await fetch(client[0], tmp_path / "out") == (0, weights)
    assert len(client[1].requests) == 3, "it is remembered"


@pytest.mark.parametrize("path", ["/healthz", "/nothing"])
async def test_what_is_no_store_is_not_believed(
    client: Of, url: str, grid: Grid, weights: BlobRef, tmp_path: Path, path: str
) -> None:
    grid.presigner = SignsFor(f"{url}{path}?elsewhere")
    assert await fetch(client[0], tmp_path / "out") == (0, weights)
    assert (tmp_path / "out").read_bytes() == DATA


async def test_a_new_version_during_a_broken_download_starts_it_again(
    client: Of,
    grid: Grid,
    rooms: Orchestrator,
    weights: BlobRef,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    newer = await grid.blobs.put_bytes(DATA[::-1])
    original = transfer._Download.take

    def cut(self: transfer._Download, response: httpx.Response) -> None:
        monkeypatch.setattr(transfer._Download, "take", original)
        assert isinstance(response.stream, httpx.SyncByteStream)
        response.stream = Cut(response.stream, 1000)
        rooms.weights["job_a"].append(newer)
        original(self, response)

    monkeypatch.setattr(transfer._Download, "take", cut)
    assert await fetch(client[0], tmp_path / "out") == (1, newer)
    assert (tmp_path / "out").read_bytes() == DATA[::-1]
