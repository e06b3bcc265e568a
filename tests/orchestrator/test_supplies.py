"""What a node may fetch and bring: what its work needs, and nothing of anybody else's."""

from __future__ import annotations

import json
from dataclasses import replace

import httpx
import pytest

from distribai.core.spec import BlobRef, DataSpec
from distribai.orchestrator.fleet import supplies
from distribai.store.statements import jobs, work
from tests.http.interface import caller
from tests.orchestrator.harness import FakeNode, World

BLOBS = "/api/v1/blobs"


async def text(world: World, word: str) -> DataSpec:
    """Data that only one job has."""
    lines = "".join(f"{word} {i} of the text\n" for i in range(200)).encode()
    ref = await world.grid.blobs.put_bytes(lines)
    return DataSpec(source="blobs", files=(ref,), held_out=0.1)


async def needs(world: World, job_id: str) -> dict[str, str]:
    """SHA-256 of what a job's tasks need."""
    async with world.grid.db.read() as tx:
        job = await jobs.get(tx, job_id)
        assert job is not None
        data = await jobs.dataset(tx, job.dataset_key)
        newest = (await jobs.latest_versions(tx, job_id, job.version, 1))[0]
    assert data is not None
    found = {"manifest": data.manifest_sha, "weights": newest.weights_sha}
    if newest.update_sha:
        found["update"] = newest.update_sha
    async with world.grid.blobs.local(BlobRef(data.manifest_sha, data.manifest_size)) as path:
        found["shard"] = json.loads(path.read_text())["shards"][0]["blob"]["sha256"]
    return found


def http(world: World, node: FakeNode, job: str = "") -> httpx.AsyncClient:
    headers = {"X-DistribAI-Job": job} if job else {}
    return caller(world.grid, node.token, **headers)


async def fetched(world: World, node: FakeNode, names: dict[str, str], job: str = "") -> set[str]:
    """Which of the blobs the node gets."""
    async with http(world, node, job) as client:
        answers = {n: (await client.get(f"{BLOBS}/{sha}")).status_code for n, sha in names.items()}
    assert set(answers.values()) <= {200, 404}
    return {name for name, status in answers.items() if status == 200}


async def test_a_node_gets_what_its_task_needs_and_nothing_of_another_job(
    any_world: World,
) -> None:
    world = any_world
    mine = await world.job(data=await text(world, "mine"), workers_max=1, seed=1)
    a = await world.node("a")
    task = await a.next_training()
    assert task.job_id == mine
    b = await world.node("b")
    other = await world.job(data=await text(world, "other"), workers_max=1, seed=2)
    theirs = await b.next_training()
    assert theirs.job_id == other
    own, foreign = await needs(world, mine), await needs(world, other)
    for header in ("", mine):
        assert await fetched(world, a, own, header) == own.keys()
        assert await fetched(world, a, foreign, header) == set()
    # To say that it is for the other's job is no reason, nor is one's own blob for it.
    assert await fetched(world, a, foreign, other) == set()
    assert await fetched(world, a, own, other) == set()
    refused, unknown = [], []
    async with http(world, a) as client:
        for verb in ("GET", "HEAD"):
            refused.append(await client.request(verb, f"{BLOBS}/{foreign['shard']}"))
            unknown.append(await client.request(verb, f"{BLOBS}/{'0' * 64}"))
    for one, two in zip(refused, unknown, strict=True):
        assert one.status_code == two.status_code == 404
        hidden = one.text.replace(foreign["shard"][:12], "*")
        bodies = [json.loads(x) if x else {} for x in (hidden, two.text.replace("0" * 12, "*"))]
        assert len({json.dumps({**x, "request_id": ""}) for x in bodies}) == 1


async def test_it_ends_with_the_work_and_fetching_ahead_goes_on_between_rounds(
    any_world: World,
) -> None:
    world = any_world
    job_id = await world.job(workers_max=1)
    nodes = [await world.node(name) for name in ("a", "b", "c")]
    busy = await next_of(nodes, world)
    idle = [n for n in nodes if not n.tasks]
    assert idle
    assert await fetched(world, idle[0], await needs(world, job_id), job_id) == set()
    await busy.heartbeat("pause")
    await busy.work()
    await world.settle()
    names = await needs(world, job_id)
    assert "update" in names
    assert busy.tasks == {}
    assert await fetched(world, busy, names, job_id) == names.keys()
    assert await fetched(world, busy, names) == set()
    await busy.heartbeat("contribute")
    assert await world.run_job(job_id) == "completed"
    for node in nodes:
        assert await fetched(world, node, await needs(world, job_id), job_id) == set()


async def next_of(nodes: list[FakeNode], world: World) -> FakeNode:
    """The node that has a training task."""
    for _ in range(5):
        await world.settle()
        for node in nodes:
            if any(t.phase == "train" for t in node.tasks.values()):
                return node
        for node in nodes:
            await node.work()
    raise AssertionError("no training task comes")


async def test_a_node_that_fell_silent_goes_on_fetching_what_it_may_come_back_with(
    world: World,
) -> None:
    job_id = await world.job()
    a = await world.node("a")
    task = await a.next_training()
    names = await needs(world, job_id)
    await world.advance(world.grid.settings.liveness.offline_s + 10)
    async with world.grid.db.read() as tx:
        row = await work.get_task(tx, task.task_id)
    assert row is not None
    assert (row.state, row.node_id) == ("queued", a.id)
    for sha in names.values():
        assert await supplies.may_fetch(world.grid, a.id, sha, job_id)
    await supplies.check_upload(world.grid, a.id, BlobRef("ab" * 32, 100))


async def test_only_who_trains_brings_a_blob_and_none_larger_than_a_result(world: World) -> None:
    await world.job(workers_max=1)
    nodes = [await world.node(name) for name in ("a", "b")]
    busy = await next_of(nodes, world)
    (idle,) = [n for n in nodes if n is not busy]
    claim = {"sha256": "ab" * 32, "size": 1000}
    async with http(world, idle) as client:
        refused = await client.post(BLOBS, json=claim)
        assert (refused.status_code, refused.json()["code"]) == (403, "auth.forbidden")
    async with http(world, busy) as client:
        assert (await client.post(BLOBS, json=claim)).status_code == 201
        large = await client.post(BLOBS, json={**claim, "size": supplies.HEADER_BYTES * 2})
        assert (large.status_code, large.json()["code"]) == (422, "blob.size")


async def test_a_task_brings_a_few_blobs_and_not_any_number(world: World) -> None:
    await world.job(workers_max=1)
    a = await world.node("a")
    task = await a.next_training()
    ref = BlobRef("ab" * 32, 10)
    for _ in range(supplies.PER_ATTEMPT):
        await supplies.check_upload(world.grid, a.id, ref)
    with pytest.raises(Exception, match="one each is due") as caught:
        await supplies.check_upload(world.grid, a.id, ref)
    assert caught.value.code == "limit.rate"  # type: ignore[attr-defined]
    await a.report(replace(await a.outcome(task), steps=task.steps))
    await a.next_training()
    await supplies.check_upload(world.grid, a.id, ref)


async def test_bytes_are_counted_to_no_job_that_the_node_does_not_work_for(world: World) -> None:
    mine = await world.job(workers_max=1, seed=1)
    a = await world.node("a")
    await a.next_training()
    other = await world.job(data=await text(world, "other"), workers_max=1, seed=2)
    for claimed, counted in ((mine, mine), (other, "")):
        world.grid.counted.clear()
        async with http(world, a, claimed) as client:
            claim = {"sha256": "ab" * 32, "size": 10}
            begun = (await client.post(BLOBS, json=claim)).json()["upload_id"]
            at = {"Upload-Offset": "0"}
            sent = await client.patch(f"{BLOBS}/uploads/{begun}", content=b"12345", headers=at)
            assert sent.status_code == 204
        assert {key[0] for key in world.grid.counted} == {counted}
