from __future__ import annotations

import asyncio
import random
from collections.abc import AsyncIterator
from pathlib import Path

import httpx
import pytest
import structlog

from distribai.errors import Integrity, NotAllowed, NotFound, Unavailable
from distribai.node import blobs
from distribai.node.blobs import BlobClient
from distribai.node.cache import BlobCache
from distribai.node.fetching import Fetcher
from distribai.node.traffic import Traffic
from distribai.testing.clock import FakeClock
from tests.node.helpers import BlobServer, NoJitter, eventually, ref_of, serving

DATA = bytes(range(256)) * 5000


@pytest.fixture
async def server() -> AsyncIterator[BlobServer]:
    async with serving(BlobServer()) as running:
        yield running


@pytest.fixture
async def client(server: BlobServer) -> AsyncIterator[BlobClient]:
    made = BlobClient(
        server.url, lambda: "secret", FakeClock(), NoJitter(), attempts=4, trust_env=False
    )
    yield made
    await made.close()


async def test_a_blob_is_downloaded_with_token_and_job(
    server: BlobServer, client: BlobClient, tmp_path: Path
) -> None:
    ref = server.put(DATA)
    await client.download(ref, tmp_path / "x", "job_a")
    assert (tmp_path / "x").read_bytes() == DATA
    _, _, headers = server.requests[0]
    assert headers["authorization"] == "Bearer secret"
    assert headers["x-distribai-job"] == "job_a"
    assert client.traffic.down.total == len(DATA)


async def test_a_truncated_download_goes_on_where_it_broke_off(
    server: BlobServer, client: BlobClient, tmp_path: Path
) -> None:
    ref = server.put(DATA)
    server.cut_download = [400_000, 300_000, 0, 0, 100_000]
    await client.download(ref, tmp_path / "x", "job_a")
    assert (tmp_path / "x").read_bytes() == DATA
    ranges = [headers.get("range") for _, _, headers in server.requests]
    assert ranges[:3] == [None, "bytes=400000-", "bytes=700000-"]
    assert client.traffic.down.total == len(DATA)


async def test_of_an_address_that_never_answers_one_failure_is_enough(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def say_nothing(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.read()
        writer.close()

    monkeypatch.setattr(blobs, "_TIMEOUT", httpx.Timeout(0.2))
    monkeypatch.setattr(blobs, "TELL_AFTER_S", 0.0)
    async with await asyncio.start_server(say_nothing, "127.0.0.1", 0) as server:
        url = f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}"
        client = BlobClient(url, lambda: "secret", FakeClock(), NoJitter(), trust_env=False)
        going = asyncio.ensure_future(client.download(ref_of(DATA), tmp_path / "x", "job_a"))
        await eventually(lambda: client.traffic.figures().trouble != "")
        assert "takes connections, but does not answer" in client.traffic.figures().trouble
        going.cancel()
        await asyncio.wait({going})
        await client.close()


async def test_a_failure_that_took_long_while_bytes_moved_is_nothing_yet(
    server: BlobServer, client: BlobClient, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(blobs, "TELL_AFTER_S", 0.0)
    ref = server.put(DATA)
    server.cut_download = [400_000]
    with structlog.testing.capture_logs() as told:
        await client.download(ref, tmp_path / "x", "job_a")
    assert told == []


async def test_the_owner_is_told_of_an_address_that_nothing_comes_from(tmp_path: Path) -> None:
    client = BlobClient(
        "http://127.0.0.1:1", lambda: "secret", FakeClock(), NoJitter(), attempts=9, trust_env=False
    )
    with structlog.testing.capture_logs() as told, pytest.raises(Unavailable):
        await client.download(ref_of(DATA), tmp_path / "x", "job_a")
    assert [(line["failures"], line["address"]) for line in told] == [
        (4, "http://127.0.0.1:1"),
        (8, "http://127.0.0.1:1"),
    ]
    trouble = client.traffic.figures().trouble
    assert trouble.startswith("the download of a blob at http://127.0.0.1:1 fails: ")
    await client.close()


async def test_the_grid_is_told_of_blobs_that_do_not_come_and_that_they_come_again(
    server: BlobServer, tmp_path: Path
) -> None:
    told: list[str] = []
    clock = FakeClock()
    traffic = Traffic(None, clock, changed=lambda: told.append(traffic.figures().trouble))
    client = BlobClient(
        server.url, lambda: "secret", clock, NoJitter(), traffic=traffic, trust_env=False
    )
    server.statuses = [502] * 9
    ref = server.put(DATA)
    await client.download(ref, tmp_path / "x", "job_a")
    first, last = told
    assert (server.url in first, "502" in first, last) == (True, True, "")
    await client.close()


async def test_a_grid_that_wants_a_pause_gets_it(server: BlobServer, tmp_path: Path) -> None:
    ref = server.put(DATA)
    server.statuses = [429]
    server.retry_after = "7"
    clock = FakeClock()
    client = BlobClient(server.url, lambda: "secret", clock, NoJitter(), trust_env=False)
    running = asyncio.ensure_future(client.download(ref, tmp_path / "x", "job_a"))
    await eventually(lambda: len(server.requests) == 1 and clock.sleeping)
    await clock.advance(6.9)
    assert clock.sleeping
    await clock.advance(0.2)
    await running
    assert (tmp_path / "x").read_bytes() == DATA
    await client.close()


async def test_a_server_without_ranges_is_taken_from_the_start(
    server: BlobServer, client: BlobClient, tmp_path: Path
) -> None:
    ref = server.put(DATA)
    server.ignore_range = True
    server.cut_download = [1000]
    await client.download(ref, tmp_path / "x", "job_a")
    assert (tmp_path / "x").read_bytes() == DATA


async def test_an_empty_blob_is_downloaded(
    server: BlobServer, client: BlobClient, tmp_path: Path
) -> None:
    await client.download(server.put(b""), tmp_path / "x", "job_a")
    assert (tmp_path / "x").read_bytes() == b""


async def test_wrong_bytes_that_lay_there_are_fetched_anew(
    server: BlobServer, client: BlobClient, tmp_path: Path
) -> None:
    ref = server.put(DATA)
    (tmp_path / "x").write_bytes(b"rubbish")
    await client.download(ref, tmp_path / "x", "job_a")
    assert (tmp_path / "x").read_bytes() == DATA


async def test_too_many_bytes_that_lay_there_are_fetched_anew(
    server: BlobServer, client: BlobClient, tmp_path: Path
) -> None:
    ref = server.put(b"abc")
    (tmp_path / "x").write_bytes(b"abcdef")
    await client.download(ref, tmp_path / "x", "job_a")
    assert (tmp_path / "x").read_bytes() == b"abc"


@pytest.mark.parametrize(("lie", "code"), [(b"abX", "blob.hash"), (b"abcd", "blob.size")])
async def test_a_server_that_sends_other_bytes_is_refused(
    server: BlobServer, client: BlobClient, tmp_path: Path, lie: bytes, code: str
) -> None:
    ref = server.put(b"abc")
    server.lie[ref.sha256] = lie
    with pytest.raises(Integrity) as caught:
        await client.download(ref, tmp_path / "x", "job_a")
    assert caught.value.code == code
    assert not (tmp_path / "x").exists()


async def test_a_blob_that_the_grid_lacks_is_not_asked_for_again(
    server: BlobServer, client: BlobClient, tmp_path: Path
) -> None:
    with pytest.raises(NotFound) as caught:
        await client.download(ref_of(b"gone"), tmp_path / "x", "job_a")
    assert caught.value.code == "blob.unknown"
    assert len(server.requests) == 1


async def test_passing_refusals_are_tried_again_but_not_for_ever(
    server: BlobServer, client: BlobClient, tmp_path: Path
) -> None:
    ref = server.put(b"abc")
    server.statuses = [503, 401, 429]
    await client.download(ref, tmp_path / "x", "job_a")
    server.statuses = [503] * 9
    with pytest.raises(Unavailable) as caught:
        await client.download(ref, tmp_path / "y", "job_a")
    assert caught.value.code == "grid.unreachable"
    assert "503" in caught.value.message
    assert len(server.statuses) == 5


async def test_retries_wait_with_full_jitter(server: BlobServer, tmp_path: Path) -> None:
    clock = FakeClock()
    client = BlobClient(server.url, lambda: "t", clock, random.Random(1), trust_env=False)
    ref = server.put(b"abc")
    server.statuses = [500, 500]
    work = asyncio.ensure_future(client.download(ref, tmp_path / "x", "job_a"))
    for bound in (0.5, 1.0):
        await eventually(lambda: clock.sleeping)
        await clock.advance(bound)
    await work
    await client.close()


async def test_a_file_is_uploaded_once(
    server: BlobServer, client: BlobClient, tmp_path: Path
) -> None:
    (tmp_path / "x").write_bytes(DATA)
    ref = ref_of(DATA)
    await client.upload(tmp_path / "x", ref, "job_a")
    assert server.blobs[ref.sha256] == DATA
    assert client.traffic.up.total == len(DATA)
    await client.upload(tmp_path / "x", ref, "job_a")
    assert [m for m, _, _ in server.requests] == ["POST", "PATCH", "POST"]


async def test_a_broken_upload_goes_on_where_the_server_stands(
    server: BlobServer, client: BlobClient, tmp_path: Path
) -> None:
    (tmp_path / "x").write_bytes(DATA)
    server.cut_upload = [500_000, 500_000, 600_000]
    await client.upload(tmp_path / "x", ref_of(DATA), "job_a")
    assert server.blobs[ref_of(DATA).sha256] == DATA
    offsets = [h["upload-offset"] for m, _, h in server.requests if m == "PATCH"]
    assert offsets == ["0", "500000", "500000", "600000"]


async def test_an_upload_of_an_earlier_process_goes_on_where_the_server_stands(
    server: BlobServer, client: BlobClient, tmp_path: Path
) -> None:
    (tmp_path / "x").write_bytes(DATA)
    ref = ref_of(DATA)
    server.uploads["up_9"] = ({"sha256": ref.sha256, "size": ref.size}, bytearray(DATA[:700_000]))
    begun: list[str] = []

    async def note(upload_id: str) -> None:
        begun.append(upload_id)

    await client.upload(tmp_path / "x", ref, "job_a", upload_id="up_9", begun=note)
    assert server.blobs[ref.sha256] == DATA
    assert client.traffic.up.total == len(DATA) - 700_000
    assert begun == []
    await client.upload(tmp_path / "x", ref, "job_a", upload_id="up_9", begun=note)
    assert begun == []  # the grid has the bytes
    server.blobs.clear()
    await client.upload(tmp_path / "x", ref, "job_a", upload_id="up_9", begun=note)
    assert begun == ["up_0"]  # it has forgotten both


async def test_an_upload_that_the_server_forgot_begins_again(
    server: BlobServer, client: BlobClient, tmp_path: Path
) -> None:
    (tmp_path / "x").write_bytes(b"abc")
    server.statuses = []
    original = server._upload

    async def forget(method: str, name: str, *rest: object) -> None:
        server._upload = original  # type: ignore[method-assign]
        del server.uploads[name]
        await original(method, name, *rest)  # type: ignore[arg-type]

    server._upload = forget  # type: ignore[assignment, method-assign]
    await client.upload(tmp_path / "x", ref_of(b"abc"), "job_a")
    assert server.blobs[ref_of(b"abc").sha256] == b"abc"


async def test_an_upload_outlasts_any_outage(
    server: BlobServer, client: BlobClient, tmp_path: Path
) -> None:
    (tmp_path / "x").write_bytes(b"abc")
    server.statuses = [503] * 12
    await client.upload(tmp_path / "x", ref_of(b"abc"), "job_a")
    assert ref_of(b"abc").sha256 in server.blobs


async def test_a_file_that_is_not_what_it_claims_is_refused_for_good(
    server: BlobServer, client: BlobClient, tmp_path: Path
) -> None:
    (tmp_path / "x").write_bytes(b"abX")
    with pytest.raises(Integrity) as caught:
        await client.upload(tmp_path / "x", ref_of(b"abc"), "job_a")
    assert (caught.value.code, caught.value.hint) == ("blob.hash", "look")


async def test_a_node_that_may_not_upload_is_told_so(
    server: BlobServer, client: BlobClient, tmp_path: Path
) -> None:
    (tmp_path / "x").write_bytes(b"abc")
    server.statuses = [403]
    with pytest.raises(NotAllowed) as caught:
        await client.upload(tmp_path / "x", ref_of(b"abc"), "job_a")
    assert caught.value.message == "ordered"


async def test_two_who_want_the_same_blob_share_one_download(
    server: BlobServer, client: BlobClient, tmp_path: Path
) -> None:
    ref = server.put(DATA)
    cache = BlobCache(tmp_path, 10 * len(DATA))
    fetcher = Fetcher(cache, client)
    with cache.pinned() as pins:
        paths = await asyncio.gather(*(fetcher.fetch(ref, "job_a", pins) for _ in range(3)))
    assert len(set(paths)) == 1
    assert len(server.requests) == 1


async def test_a_wrong_blob_never_enters_the_cache(
    server: BlobServer, client: BlobClient, tmp_path: Path
) -> None:
    ref = server.put(b"abc")
    server.lie[ref.sha256] = b"abX"
    cache = BlobCache(tmp_path, 1000)
    with pytest.raises(Integrity):
        await Fetcher(cache, client).fetch(ref, "job_a")
    assert cache.newest(10) == []
