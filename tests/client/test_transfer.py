"""Files up and down over connections that break."""

from __future__ import annotations

import asyncio
import hashlib
import os
from collections.abc import Callable, Iterator
from pathlib import Path

import httpx
import pytest

from distribai.client import Client, transfer
from distribai.core.spec import BlobRef
from distribai.errors import Integrity, Unavailable, UsageError
from distribai.orchestrator.context import Grid
from tests.http.stand_in import OPERATOR, Orchestrator, job_record, spec


class Cut(httpx.SyncByteStream):
    """A body that breaks off."""

    def __init__(self, stream: httpx.SyncByteStream, after: int) -> None:
        self._stream = stream
        self._after = after

    def __iter__(self) -> Iterator[bytes]:
        left = self._after
        for chunk in self._stream:
            yield chunk[:left]
            left -= len(chunk)
            if left <= 0:
                raise httpx.ReadError("cut")

    def close(self) -> None:
        self._stream.close()


class Faulty(httpx.BaseTransport):
    """The network, with a fault for each request that ``plan`` names (from 0)."""

    def __init__(self, plan: dict[int, str]) -> None:
        self._inner = httpx.HTTPTransport()
        self._plan = plan
        self.requests: list[tuple[str, str]] = []

    def handle_request(self, request: httpx.Request) -> httpx.Response:
        fault = self._plan.get(len(self.requests), "")
        self.requests.append((request.method, request.headers.get("range", "")))
        if fault == "refused":
            raise httpx.ConnectError("refused")
        response = self._inner.handle_request(request)
        if fault == "answer lost":
            response.close()
            raise httpx.ReadError("lost")
        if fault == "cut":
            assert isinstance(response.stream, httpx.SyncByteStream)
            headers, stream = response.headers, Cut(response.stream, 1000)
            return httpx.Response(response.status_code, headers=headers, stream=stream)
        return response

    def close(self) -> None:
        self._inner.close()


@pytest.fixture
def connect(url: str) -> Iterator[Callable[[dict[int, str]], tuple[Client, Faulty]]]:
    made: list[Client] = []

    def with_faults(plan: dict[int, str]) -> tuple[Client, Faulty]:
        transport = Faulty(plan)
        client = Client(url, OPERATOR, transport=transport)
        client.blobs = transfer.Transfer(client._http, url, sleep=lambda seconds: None)
        made.append(client)
        return client, transport

    yield with_faults
    for client in made:
        client.close()


Connect = Callable[[dict[int, str]], tuple[Client, Faulty]]


@pytest.fixture
def file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr(transfer, "PIECE", 4000)
    path = tmp_path / "data.txt"
    path.write_bytes(os.urandom(10_000))
    return path


async def stored(grid: Grid, ref: BlobRef) -> bytes:
    return b"".join([chunk async for chunk in grid.blobs.read(ref.sha256)])


@pytest.mark.parametrize(
    "plan",
    [
        {},
        {0: "refused"},
        {1: "refused", 2: "refused"},
        {1: "answer lost"},
        {2: "answer lost", 3: "refused"},
        {3: "answer lost"},  # of the last piece: the upload is gone, the blob is there
        {3: "answer lost", **dict.fromkeys(range(4, 8), "refused")},  # and then a restart
    ],
)
async def test_an_upload_arrives_whole_whatever_breaks(
    grid: Grid, connect: Connect, file: Path, plan: dict[int, str]
) -> None:
    data = await asyncio.to_thread(file.read_bytes)
    client, _ = connect(plan)
    told: list[int] = []
    ref = client.upload(file, lambda done, total: told.append(done))
    assert ref == BlobRef(hashlib.sha256(data).hexdigest(), 10_000)
    assert await stored(grid, ref) == data
    assert told[-1] == 10_000


async def test_a_file_that_the_grid_has_is_not_sent(
    grid: Grid, connect: Connect, file: Path
) -> None:
    client, transport = connect({})
    client.upload(file)
    sent = len(transport.requests)
    client.upload(file)
    assert len(transport.requests) == sent + 1


def test_an_orchestrator_that_stays_away_ends_the_upload(connect: Connect, file: Path) -> None:
    client, transport = connect(dict.fromkeys(range(100), "refused"))
    with pytest.raises(Unavailable):
        client.upload(file)
    assert len(transport.requests) == transfer.TRIES


def test_a_file_that_changes_while_it_is_sent_is_refused(connect: Connect, file: Path) -> None:
    client, _ = connect({})

    def shorten(done: int, total: int) -> None:
        file.write_bytes(b"short")

    with pytest.raises(Integrity) as caught:
        client.upload(file, shorten)
    assert caught.value.code == "blob.truncated"

    def change(done: int, total: int) -> None:
        file.write_bytes(b"x" * total)

    with pytest.raises(Integrity) as caught:
        client.upload(file_of(file, os.urandom(10_000)), change)
    assert caught.value.code == "blob.hash"


def file_of(path: Path, data: bytes) -> Path:
    path.write_bytes(data)
    return path


def test_a_file_that_is_not_there_is_said(connect: Connect, tmp_path: Path) -> None:
    client, _ = connect({})
    with pytest.raises(UsageError) as caught:
        client.upload(tmp_path / "nothing")
    assert caught.value.code == "io.file"


@pytest.fixture
async def weights(grid: Grid, rooms: Orchestrator) -> bytes:
    data = os.urandom(5000)
    rooms.jobs["job_a"] = job_record("job_a", spec())
    rooms.weights["job_a"] = [await grid.blobs.put_bytes(data)]
    return data


@pytest.mark.parametrize("plan", [{}, {0: "refused"}, {0: "cut"}, {0: "cut", 1: "cut"}])
def test_a_download_is_whole_whatever_breaks(
    connect: Connect, weights: bytes, tmp_path: Path, plan: dict[int, str]
) -> None:
    client, transport = connect(plan)
    version, ref = client.download_weights("job_a", None, tmp_path / "out")
    assert (tmp_path / "out").read_bytes() == weights
    assert (version, ref.sha256) == (0, hashlib.sha256(weights).hexdigest())
    if plan.get(0) == "cut":
        assert transport.requests[1] == ("GET", "bytes=1000-")


async def test_a_new_version_during_a_broken_download_starts_it_again(
    connect: Connect, grid: Grid, rooms: Orchestrator, weights: bytes, tmp_path: Path
) -> None:
    newer = await grid.blobs.put_bytes(os.urandom(3000))
    client, _ = connect({0: "cut"})

    def publish(done: int, total: int) -> None:
        if len(rooms.weights["job_a"]) == 1:
            rooms.weights["job_a"].append(newer)

    version, ref = client.download_weights("job_a", None, tmp_path / "out", publish)
    assert (version, ref) == (1, newer)
    assert hashlib.sha256((tmp_path / "out").read_bytes()).hexdigest() == newer.sha256


def test_damaged_bytes_leave_the_old_file(tmp_path: Path) -> None:
    def damaged(request: httpx.Request) -> httpx.Response:
        headers = {"ETag": f'"{"0" * 64}"', "X-DistribAI-Version": "0", "Content-Length": "7"}
        return httpx.Response(200, stream=httpx.ByteStream(b"damaged"), headers=headers)

    out = tmp_path / "out"
    out.write_text("old")
    client = Client("http://grid", transport=httpx.MockTransport(damaged))
    with client, pytest.raises(Integrity) as caught:
        client.download_weights("job_a", None, out)
    assert caught.value.code == "blob.hash"
    assert out.read_text() == "old"
    assert [p.name for p in tmp_path.iterdir()] == ["out"]


def test_a_place_that_cannot_be_written_is_said(
    connect: Connect, weights: bytes, tmp_path: Path
) -> None:
    client, _ = connect({})
    with pytest.raises(UsageError) as caught:
        client.download_weights("job_a", None, tmp_path / "missing" / "out")
    assert caught.value.code == "io.file"
    assert "missing" in caught.value.message
