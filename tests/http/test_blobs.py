"""Blobs and weights over HTTP."""

from __future__ import annotations

import hashlib
import os
from collections.abc import AsyncIterator, Callable

import httpx
import pytest
from structlog.testing import capture_logs

from distribai.core.spec import BlobRef
from distribai.errors import Unavailable
from distribai.orchestrator.context import Grid
from distribai.orchestrator.http.ranges import Unsatisfiable, parse_range
from tests.http.stand_in import Orchestrator, job_record, spec

BLOBS = "/api/v1/blobs"
JOB = {"X-DistribAI-Job": "job_x"}


def claim(data: bytes) -> dict[str, object]:
    return {"sha256": hashlib.sha256(data).hexdigest(), "size": len(data)}


async def begin(client: httpx.AsyncClient, data: bytes) -> str:
    begun = await client.post(BLOBS, json=claim(data))
    assert begun.status_code == 201
    assert begun.json()["offset"] == 0
    upload: str = begun.headers["location"]
    assert upload == f"{BLOBS}/uploads/{begun.json()['upload_id']}"
    return upload


def at(offset: int) -> dict[str, str]:
    return {"Upload-Offset": str(offset), **JOB}


async def test_a_blob_goes_up_in_parts_and_comes_down(
    node: httpx.AsyncClient, rooms: Orchestrator
) -> None:
    data = os.urandom(10_000)
    upload = await begin(node, data)
    first = await node.patch(upload, content=data[:4000], headers=at(0))
    assert (first.status_code, first.headers["upload-offset"]) == (204, "4000")
    stands = await node.head(upload)
    assert (stands.headers["upload-offset"], stands.headers["upload-length"]) == ("4000", "10000")
    rest = await node.patch(upload, content=data[4000:], headers=at(4000))
    assert (rest.status_code, rest.headers["upload-offset"]) == (201, "10000")
    address = f"{BLOBS}/{claim(data)['sha256']}"
    down = await node.get(address, headers=JOB)
    assert down.content == data
    assert down.headers["etag"] == f'"{claim(data)["sha256"]}"'
    assert [c[2:] for c in rooms.counted] == [(4000, 0), (6000, 0), (0, 10_000)]
    assert {c[:2] for c in rooms.counted} == {("job_x", "node_a")}


async def test_a_store_that_fails_before_the_first_byte_is_a_problem_that_passes(
    operator: httpx.AsyncClient, grid: Grid, monkeypatch: pytest.MonkeyPatch
) -> None:
    ref = await grid.blobs.put_bytes(b"here")
    monkeypatch.setattr(grid.blobs, "read", fails_after())
    answer = await operator.get(f"{BLOBS}/{ref.sha256}")
    assert (answer.status_code, answer.json()["code"]) == (503, "blob.store")


async def test_a_store_that_fails_in_the_middle_cuts_the_connection_and_is_no_defect(
    operator: httpx.AsyncClient, grid: Grid, monkeypatch: pytest.MonkeyPatch
) -> None:
    ref = await grid.blobs.put_bytes(b"here and there")
    monkeypatch.setattr(grid.blobs, "read", fails_after(b"here"))
    with capture_logs() as lines, pytest.raises(AssertionError):
        # What httpx's transport without sockets says of an answer that does not end.
        await operator.get(f"{BLOBS}/{ref.sha256}")
    assert [line["event"] for line in lines if line["log_level"] != "debug"] == ["answer cut off"]


def fails_after(*chunks: bytes) -> Callable[..., AsyncIterator[bytes]]:
    async def read(*_: object) -> AsyncIterator[bytes]:
        for chunk in chunks:
            yield chunk
        raise Unavailable("blob.store", "The blob store failed to read.")

    return read


async def test_a_blob_that_is_there_needs_no_upload(
    operator: httpx.AsyncClient, grid: Grid
) -> None:
    await grid.blobs.put_bytes(b"here")
    known = await operator.post(BLOBS, json=claim(b"here"))
    assert (known.status_code, known.json()["complete"]) == (200, True)
    other_size = await operator.post(BLOBS, json={**claim(b"here"), "size": 5})
    assert (other_size.status_code, other_size.json()["code"]) == (422, "blob.truncated")


async def test_a_node_hears_that_a_blob_is_there_only_if_it_has_brought_it(
    node: httpx.AsyncClient, grid: Grid
) -> None:
    await grid.blobs.put_bytes(b"here")
    for told in (claim(b"here"), {**claim(b"here"), "size": 5}, claim(b"not here")):
        begun = await node.post(BLOBS, json=told)
        assert (begun.status_code, begun.json()["complete"]) == (201, False)
    upload = await begin(node, b"brought")
    assert (await node.patch(upload, content=b"brought", headers=at(0))).status_code == 201
    again = await node.post(BLOBS, json=claim(b"brought"))
    assert (again.status_code, again.json()["complete"]) == (200, True)


async def test_a_blob_that_the_disk_has_torn_is_sent_again_and_heals(
    node: httpx.AsyncClient, grid: Grid
) -> None:
    data = os.urandom(10_000)
    ref = await grid.blobs.put_bytes(data)
    async with grid.blobs.local(ref) as path:
        path.write_bytes(data[:4000])
    upload = await begin(node, data)
    assert (await node.patch(upload, content=data, headers=at(0))).status_code == 201
    assert await grid.blobs.is_whole(ref)


async def test_the_operator_s_bytes_are_counted_to_no_job(
    operator: httpx.AsyncClient, rooms: Orchestrator
) -> None:
    upload = await begin(operator, b"data")
    assert (await operator.patch(upload, content=b"data", headers=at(0))).status_code == 201
    assert rooms.counted == []


@pytest.mark.parametrize(
    "body",
    [
        {"sha256": "AB" * 32, "size": 1},
        {"sha256": "ab", "size": 1},
        {"sha256": "ab" * 32, "size": -1},
        {"sha256": "ab" * 32, "size": "1"},
        {"sha256": "ab" * 32},
        {"sha256": "ab" * 32, "size": 1, "more": 1},
    ],
)
async def test_a_malformed_claim_is_refused(node: httpx.AsyncClient, body: object) -> None:
    refused = await node.post(BLOBS, json=body)
    assert (refused.status_code, refused.json()["code"]) == (422, "usage.invalid")
    assert refused.json()["errors"]


async def test_a_blob_beyond_the_limit_is_refused(node: httpx.AsyncClient) -> None:
    refused = await node.post(BLOBS, json={"sha256": "ab" * 32, "size": 1 << 40})
    assert refused.json()["code"] == "blob.size"


async def test_wrong_bytes_and_wrong_lengths_are_refused(node: httpx.AsyncClient) -> None:
    upload = await begin(node, b"right")
    refused = await node.patch(upload, content=b"wrong", headers=at(0))
    assert (refused.status_code, refused.json()["code"]) == (422, "blob.hash")
    assert (await node.head(upload)).status_code == 404

    upload = await begin(node, b"right")
    refused = await node.patch(upload, content=b"right and more", headers=at(0))
    assert (refused.status_code, refused.json()["code"]) == (422, "blob.size")


async def test_bytes_are_counted_whatever_content_length_says(node: httpx.AsyncClient) -> None:
    upload = await begin(node, b"right")

    async def long_body() -> AsyncIterator[bytes]:
        for _ in range(4):
            yield b"x" * 1000

    lying = await node.patch(upload, content=long_body(), headers={**at(0), "Content-Length": "5"})
    assert lying.json()["code"] == "blob.size"


async def test_another_offset_is_a_conflict_and_a_missing_one_an_error(
    node: httpx.AsyncClient,
) -> None:
    upload = await begin(node, b"0123456789")
    refused = await node.patch(upload, content=b"456", headers=at(4))
    assert (refused.status_code, refused.json()["code"]) == (409, "blob.offset")
    missing = await node.patch(upload, content=b"456")
    assert (missing.status_code, missing.json()["field"]) == (422, "Upload-Offset")


async def test_an_empty_blob_takes_one_empty_request(node: httpx.AsyncClient) -> None:
    upload = await begin(node, b"")
    assert (await node.patch(upload, content=b"", headers=at(0))).status_code == 201
    assert (await node.get(f"{BLOBS}/{claim(b'')['sha256']}")).content == b""


async def test_what_is_not_there_is_unknown(node: httpx.AsyncClient) -> None:
    for name in ("0" * 64, "nonsense", "..%2F..%2Fetc%2Fpasswd"):
        missing = await node.get(f"{BLOBS}/{name}")
        assert missing.status_code == 404
        assert missing.json()["code"] in ("blob.unknown", "http.path")
        assert (await node.head(f"{BLOBS}/{name}")).status_code == 404


@pytest.mark.parametrize(
    ("header", "status", "body", "content_range"),
    [
        ("bytes=2-4", 206, b"234", "bytes 2-4/10"),
        ("bytes=7-", 206, b"789", "bytes 7-9/10"),
        ("bytes=-3", 206, b"789", "bytes 7-9/10"),
        ("bytes=0-99", 206, b"0123456789", "bytes 0-9/10"),
        ("bytes=10-", 416, b"", "bytes */10"),
        ("bytes=-0", 416, b"", "bytes */10"),
        ("bytes=1-2,4-5", 200, b"0123456789", None),
        ("bytes=4-2", 200, b"0123456789", None),
        ("pages=1-2", 200, b"0123456789", None),
    ],
)
async def test_ranges_are_as_rfc_9110_says(
    node: httpx.AsyncClient,
    grid: Grid,
    header: str,
    status: int,
    body: bytes,
    content_range: str | None,
) -> None:
    ref = await grid.blobs.put_bytes(b"0123456789")
    got = await node.get(f"{BLOBS}/{ref.sha256}", headers={"Range": header})
    assert (got.status_code, got.content) == (status, body)
    assert got.headers.get("content-range") == content_range


async def test_entity_tags_are_honoured(node: httpx.AsyncClient, grid: Grid) -> None:
    ref = await grid.blobs.put_bytes(b"0123456789")
    address, tag = f"{BLOBS}/{ref.sha256}", f'"{ref.sha256}"'
    assert (await node.get(address, headers={"If-None-Match": tag})).status_code == 304
    some = {"Range": "bytes=2-"}
    assert (await node.get(address, headers={**some, "If-Range": tag})).content == b"23456789"
    whole = await node.get(address, headers={**some, "If-Range": '"another"'})
    assert whole.content == b"0123456789"


async def test_head_tells_the_size_and_sends_nothing(
    node: httpx.AsyncClient, grid: Grid, rooms: Orchestrator
) -> None:
    ref = await grid.blobs.put_bytes(b"0123456789")
    head = await node.head(f"{BLOBS}/{ref.sha256}")
    assert (head.status_code, head.headers["content-length"], head.content) == (200, "10", b"")
    assert rooms.counted == []


def test_a_suffix_longer_than_the_blob_is_the_blob() -> None:
    assert parse_range("bytes=-99", 10) == (0, 10)
    assert parse_range("bytes=-", 10) is None
    with pytest.raises(Unsatisfiable):
        parse_range("bytes=0-", 0)


async def test_weights_come_with_a_name_and_a_version(
    operator: httpx.AsyncClient, grid: Grid, rooms: Orchestrator
) -> None:
    job = job_record("job_a", spec('we/ird "name"'))
    rooms.jobs[job.id] = job
    rooms.weights[job.id] = [await grid.blobs.put_bytes(b"first"), BlobRef("0" * 64, 1)]
    rooms.weights[job.id][1] = await grid.blobs.put_bytes(b"second")
    latest = await operator.get("/api/v1/jobs/job_a/weights")
    assert latest.content == b"second"
    assert latest.headers["x-distribai-version"] == "1"
    assert latest.headers["content-disposition"] == (
        'attachment; filename="we-ird-name-v1.safetensors"'
    )
    first = await operator.get("/api/v1/jobs/job_a/weights", params={"version": 0})
    assert first.content == b"first"
    missing = await operator.get("/api/v1/jobs/job_a/weights", params={"version": 7})
    assert (missing.status_code, missing.json()["code"]) == (404, "job.no_weights")


async def test_a_sample_is_a_task_on_a_node(
    operator: httpx.AsyncClient, grid: Grid, rooms: Orchestrator
) -> None:
    rooms.jobs["job_a"] = job_record("job_a", spec())
    rooms.weights["job_a"] = [await grid.blobs.put_bytes(b"weights")]
    ask = {"prompt": "def ", "max_tokens": 7, "temperature": 0, "seed": 3}
    sample = (await operator.post("/api/v1/jobs/job_a/generate", json=ask)).json()
    assert (sample["version"], sample["prompt"]) == (0, "def ")
    assert sample["text"] == "def /0/7/0.0/3"


@pytest.mark.parametrize(
    ("state", "status", "code"),
    [("queued", 503, "task.timeout"), ("failed", 409, "task.failed")],
)
async def test_a_sample_that_does_not_come_is_said(
    operator: httpx.AsyncClient,
    grid: Grid,
    rooms: Orchestrator,
    state: str,
    status: int,
    code: str,
) -> None:
    rooms.jobs["job_a"] = job_record("job_a", spec())
    rooms.weights["job_a"] = [await grid.blobs.put_bytes(b"weights")]
    rooms.answer = state
    answer = await operator.post("/api/v1/jobs/job_a/generate", json={})
    assert (answer.status_code, answer.json()["code"]) == (status, code)
    assert answer.json()["hint"]
