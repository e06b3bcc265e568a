"""Blobs that the object store hands out itself, to whoever says that it can be sent there."""

from __future__ import annotations

import os
from pathlib import Path

import httpx
import pytest

from distribai.core.direct import FOLLOW_HEADER, SMALL
from distribai.core.spec import BlobRef
from distribai.orchestrator.context import Grid
from distribai.store.blobs import BlobStore
from distribai.store.presigning import presigner
from tests.http.stand_in import Orchestrator, job_record, spec
from tests.http.test_blobs import BLOBS, JOB
from tests.store.buckets import CREDENTIALS

FOLLOW = {FOLLOW_HEADER: "1", **JOB}
DATA = os.urandom(3 * SMALL)


@pytest.fixture
def on_s3(grid: Grid, s3_endpoint: str, tmp_path: Path) -> Grid:
    place, s3 = f"s3://grid/{tmp_path.name}", {**CREDENTIALS, "endpoint": s3_endpoint}
    grid.blobs = BlobStore.open(place, tmp_path / "s3", max_bytes=1 << 26, s3=s3)
    grid.presigner = presigner(place, "on", s3=s3)
    return grid


@pytest.fixture
async def ref(on_s3: Grid) -> BlobRef:
    return await on_s3.blobs.put_bytes(DATA)


async def there(answer: httpx.Response, **headers: str) -> bytes:
    """What the store gives, asked as an answer says."""
    assert answer.status_code == 307
    assert answer.headers["cache-control"] == "no-store"
    assert answer.content == b""
    async with httpx.AsyncClient(trust_env=False) as http:
        return (await http.get(answer.headers["location"], headers=headers)).content


async def test_who_can_follow_is_sent_to_the_store_and_who_cannot_gets_the_bytes(
    node: httpx.AsyncClient, rooms: Orchestrator, ref: BlobRef
) -> None:
    address = f"{BLOBS}/{ref.sha256}"
    sent_on = await node.get(address, headers=FOLLOW)
    assert sent_on.headers["etag"] == f'"{ref.sha256}"'
    assert await there(sent_on) == DATA
    assert rooms.counted == [], "nothing has moved through here"
    assert (await node.get(address, headers=JOB)).content == DATA
    assert [c[2:] for c in rooms.counted] == [(0, len(DATA))]


async def test_a_range_goes_on_at_the_store(node: httpx.AsyncClient, ref: BlobRef) -> None:
    some = {"Range": f"bytes={SMALL}-"}
    sent_on = await node.get(f"{BLOBS}/{ref.sha256}", headers={**FOLLOW, **some})
    assert await there(sent_on, **some) == DATA[SMALL:]


async def test_what_needs_no_bytes_of_the_store_is_answered_here(
    node: httpx.AsyncClient, on_s3: Grid, ref: BlobRef
) -> None:
    address = f"{BLOBS}/{ref.sha256}"
    few = await node.get(address, headers={**FOLLOW, "Range": f"bytes={2 * SMALL + 1}-"})
    assert (few.status_code, few.content) == (206, DATA[2 * SMALL + 1 :])
    beyond = await node.get(address, headers={**FOLLOW, "Range": f"bytes={len(DATA)}-"})
    assert beyond.status_code == 416
    tag = {"If-None-Match": f'"{ref.sha256}"'}
    assert (await node.get(address, headers={**FOLLOW, **tag})).status_code == 304
    assert (await node.head(address, headers=FOLLOW)).headers["content-length"] == str(len(DATA))
    missing = await node.get(f"{BLOBS}/{'0' * 64}", headers=FOLLOW)
    assert (missing.status_code, missing.json()["code"]) == (404, "blob.unknown")
    small = await on_s3.blobs.put_bytes(b"a manifest")
    assert (await node.get(f"{BLOBS}/{small.sha256}", headers=FOLLOW)).content == b"a manifest"


async def test_a_directory_of_blobs_sends_nobody_on(node: httpx.AsyncClient, grid: Grid) -> None:
    ref = await grid.blobs.put_bytes(DATA)
    assert (await node.get(f"{BLOBS}/{ref.sha256}", headers=FOLLOW)).content == DATA


async def test_a_version_s_weights_come_from_the_store_with_their_version_and_hash(
    operator: httpx.AsyncClient, rooms: Orchestrator, ref: BlobRef
) -> None:
    rooms.jobs["job_a"] = job_record("job_a", spec())
    rooms.weights["job_a"] = [ref]
    sent_on = await operator.get("/api/v1/jobs/job_a/weights", headers={FOLLOW_HEADER: "1"})
    assert sent_on.headers["x-distribai-version"] == "0"
    assert sent_on.headers["etag"] == f'"{ref.sha256}"'
    assert await there(sent_on) == DATA


async def test_what_came_from_the_store_counts_as_the_node_says_up_to_the_blob_s_size(
    node: httpx.AsyncClient, operator: httpx.AsyncClient, rooms: Orchestrator, ref: BlobRef
) -> None:
    address = f"{BLOBS}/{ref.sha256}/fetched"
    assert (await node.post(address, json={"bytes": 70_000}, headers=JOB)).status_code == 204
    assert rooms.counted == [("job_x", "node_a", 0, 70_000)]
    more = await node.post(address, json={"bytes": len(DATA) + 1}, headers=JOB)
    assert (more.status_code, more.json()["field"]) == (400, "bytes")
    for body in ({"bytes": -1}, {"bytes": "1"}, {}, {"bytes": 1, "more": 1}):
        assert (await node.post(address, json=body, headers=JOB)).status_code == 422
    unknown = await node.post(f"{BLOBS}/{'0' * 64}/fetched", json={"bytes": 1}, headers=JOB)
    assert unknown.status_code == 404
    assert (await operator.post(address, json={"bytes": 5}, headers=JOB)).status_code == 204
    assert len(rooms.counted) == 1, "an account's bytes count to no job"


async def test_another_word_than_1_is_refused(node: httpx.AsyncClient, ref: BlobRef) -> None:
    refused = await node.get(f"{BLOBS}/{ref.sha256}", headers={FOLLOW_HEADER: "maybe"})
    assert (refused.status_code, refused.json()["field"]) == (422, FOLLOW_HEADER)
