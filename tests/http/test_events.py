"""Streams of events: what is sent, when they end, and readers that come again or do not read."""

from __future__ import annotations

import asyncio
import json
import os
import time
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any

import httpx
import pytest

from distribai.client.following import Reader
from distribai.orchestrator.http import events
from distribai.orchestrator.people import keys
from distribai.store import outbox
from tests.http.interface import Interface
from tests.orchestrator.conftest import any_world, world
from tests.orchestrator.harness import World

__all__ = ["any_world", "world"]


class Listener:
    """One request of a stream, driven by hand: ``reads`` is whether it takes what is sent."""

    def __init__(self, app: Interface, token: str, path: str, **headers: str) -> None:
        where, _, query = path.partition("?")
        given = {"authorization": f"Bearer {token}", "accept": "text/event-stream", **headers}
        self.reads = asyncio.Event()
        self.reads.set()
        self.gone = asyncio.Event()
        self.status = 0
        self.headers: dict[str, str] = {}
        self.text = ""
        self.comments = 0
        self.ended = False
        self.events: list[tuple[str, Any]] = []
        self._more = asyncio.Event()
        self._reader = Reader()
        scope = {
            "type": "http",
            "method": "GET",
            "path": where,
            "raw_path": where.encode(),
            "query_string": query.encode(),
            "headers": [(k.encode(), v.encode()) for k, v in given.items()],
            "http_version": "1.1",
            "scheme": "http",
            "server": ("grid", 80),
            "client": ("127.0.0.1", 1),
            "root_path": "",
        }
        self.task = asyncio.create_task(app(scope, self._receive, self._send))  # type: ignore[arg-type]

    async def _receive(self) -> dict[str, Any]:
        if not self.status:
            await asyncio.sleep(0)
        await self.gone.wait()
        return {"type": "http.disconnect"}

    async def _send(self, message: Any) -> None:
        if message["type"] == "http.response.start":
            self.status = message["status"]
            self.headers = {k.decode(): v.decode() for k, v in message["headers"]}
        else:
            await self.reads.wait()
            self.text += message["body"].decode()
            self.comments += message["body"].count(b"\n: ") + message["body"].startswith(b": ")
            self.events += [(k, json.loads(d)) for k, d in self._reader.feed(message["body"])]
            self.ended = not message.get("more_body", False)
        self._more.set()

    async def until(self, count: int) -> list[tuple[str, Any]]:
        """The events, as soon as there are so many."""
        await self.when(lambda: len(self.events) >= count)
        return self.events

    async def when(self, done: Callable[[], bool]) -> None:
        """Wait until what was sent makes ``done`` true."""
        async with asyncio.timeout(20):
            while not done():
                self._more.clear()
                await self._more.wait()

    async def leave(self) -> None:
        self.gone.set()
        await asyncio.wait_for(self.task, 20)

    @property
    def last_id(self) -> str:
        return self._reader.last_id


class Serving:
    """A world's interface."""

    def __init__(self, world: World, token: str) -> None:
        self.world, self.token = world, token
        world.grid.clock = time.monotonic
        self.app = Interface(world.grid)

    def listen(self, path: str = "/api/v1/events", **headers: str) -> Listener:
        return Listener(self.app, self.token, path, **headers)

    async def happens(self, *kinds: str, job: str = "", node: str = "") -> None:
        async with self.world.grid.db.write() as tx:
            for kind in kinds:
                told = outbox.Change(kind, job, node_id=node, data={"text": "a\nb\u2028"})
                await outbox.append(tx, [told])
        self.world.grid.wake.set()


async def serving_of(world: World) -> Serving:
    token = await keys.ensure_operator_key(world.grid.db, world.root, os.urandom)
    return Serving(world, token)


@pytest.fixture
async def serving(world: World) -> Serving:
    return await serving_of(world)


async def test_a_stream_sends_what_was_and_what_comes(any_world: World) -> None:
    serving = await serving_of(any_world)
    await serving.happens("job.queued", job="job_1")
    listener = serving.listen()
    first = await listener.until(1)
    await serving.happens("task.leased", "node.online", node="node_1")
    found = await listener.until(3)
    assert [kind for kind, _ in found] == ["job.queued", "task.leased", "node.online"]
    assert first[0][1]["data"] == {"text": "a\nb\u2028"}
    assert listener.last_id == found[-1][1]["cursor"]
    assert listener.status == 200
    assert listener.headers["content-type"].startswith("text/event-stream")
    assert listener.headers["cache-control"] == "no-store"
    assert "content-length" not in listener.headers
    await listener.leave()
    assert serving.world.grid.tail.readers == 0


async def test_who_comes_again_goes_on_behind_the_last_event(serving: Serving) -> None:
    await serving.happens("job.queued", "job.running", "job.completed")
    listener = serving.listen()
    first = (await listener.until(3))[0][1]["cursor"]
    await listener.leave()
    again = serving.listen("/api/v1/events?after=latest", **{"last-event-id": first})
    assert [k for k, _ in await again.until(2)] == ["job.running", "job.completed"]
    await again.leave()


async def test_latest_begins_now(serving: Serving) -> None:
    await serving.happens("job.queued")
    listener = serving.listen("/api/v1/events?after=latest")
    # It is told where now is before anything happens.
    await listener.when(lambda: bool(listener.last_id))
    await serving.happens("job.running")
    assert [k for k, _ in await listener.until(1)] == ["job.running"]
    await listener.leave()


async def test_streams_are_filtered_and_pages_alike(serving: Serving) -> None:
    job = await serving.world.job()
    await serving.happens("task.leased", "round.open", job=job)
    await serving.happens("task.leased", job="job_other")
    await serving.happens("node.online", node="node_1")
    for path, kinds in {
        f"/api/v1/jobs/{job}/events?kind=task.*&kind=round.open": ["task.leased", "round.open"],
        f"/api/v1/events?job={job}&kind=task": ["task.leased"],
        "/api/v1/events?kind=node.*": ["node.online"],
    }.items():
        listener = serving.listen(path)
        assert [k for k, _ in await listener.until(len(kinds))][-len(kinds) :] == kinds
        await listener.leave()
        async with asker(serving) as http:
            page = (await http.get(path)).json()
        assert [e["kind"] for e in page["items"]][-len(kinds) :] == kinds
        assert page["cursor"]


async def test_wrong_requests_are_refused_before_a_stream_begins(serving: Serving) -> None:
    for path, status in {
        "/api/v1/events?after=nonsense": 400,
        "/api/v1/events?kind=a%20b": 400,
        "/api/v1/events?job=nobody": 404,
        "/api/v1/nodes/nobody/events": 404,
    }.items():
        listener = serving.listen(path)
        await asyncio.wait_for(listener.task, 20)
        assert listener.status == status, path
        assert "problem+json" in listener.headers["content-type"]
    serving.world.grid.tail.readers = events.MAX_STREAMS
    listener = serving.listen()
    await asyncio.wait_for(listener.task, 20)
    assert listener.status == 503


async def test_a_quiet_stream_says_so(serving: Serving, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(events, "HEARTBEAT_S", 0.05)
    listener = serving.listen("/api/v1/events?kind=job.*")
    await serving.happens("node.online")
    await listener.when(lambda: listener.comments >= 2)
    assert listener.events == []
    assert listener.last_id, "where to go on is told past what the filter leaves out"
    await listener.leave()


async def test_a_stopping_process_ends_its_streams_with_a_reason(serving: Serving) -> None:
    await serving.happens("job.queued")
    listener = serving.listen()
    await listener.until(1)
    serving.world.grid.tail.close()
    await asyncio.wait_for(listener.task, 20)
    kind, said = listener.events[-1]
    assert (kind, said["code"], listener.ended) == ("end", "grid.unreachable", True)


@pytest.mark.parametrize("wakes_up", [True, False])
async def test_a_reader_that_reads_nothing_is_ended_and_nothing_is_gathered_for_it(
    serving: Serving, monkeypatch: pytest.MonkeyPatch, wakes_up: bool
) -> None:
    monkeypatch.setattr(events, "SLOW_S", 0.2)
    await serving.happens("job.queued")
    listener = serving.listen()
    await listener.until(1)
    listener.reads.clear()
    before = len(listener.text)
    await serving.happens(*["job.running"] * 300)
    if wakes_up:
        await asyncio.sleep(0.3)
        listener.reads.set()
    await asyncio.wait_for(listener.task, 20)
    assert len(listener.events) <= 1 + events.PAGE + 1
    if wakes_up:
        assert listener.events[-1][1]["code"] == "events.slow"
    else:
        assert (len(listener.text), listener.ended) == (before, False)
    assert serving.world.grid.tail.readers == 0
    counted = serving.world.grid.metrics.registry.get_sample_value
    assert counted("distribai_event_streams_slow_total") == 1


async def test_many_readers_look_at_the_outbox_together(serving: Serving) -> None:
    looked = 0
    end = outbox.end

    async def counted(tx: Any) -> str:
        nonlocal looked
        looked += 1
        return await end(tx)

    tail, grid = serving.world.grid.tail, serving.world.grid
    waiting = [asyncio.create_task(tail.beyond(grid, "", 20)) for _ in range(50)]
    await asyncio.sleep(0.1)
    outbox.end = counted
    try:
        await serving.happens("job.queued")
        assert all(await asyncio.gather(*waiting))
    finally:
        outbox.end = end
    assert 1 <= looked < 10
    assert tail._looking is None


async def test_a_page_that_waits_gets_the_first_event(serving: Serving) -> None:
    async with asker(serving) as http:
        asking = asyncio.create_task(http.get("/api/v1/events?wait=20"))
        await asyncio.sleep(0.05)
        await serving.happens("job.queued")
        page = (await asyncio.wait_for(asking, 20)).json()
    assert [e["kind"] for e in page["items"]] == ["job.queued"]


class asker:  # noqa: N801  # reads as a function
    """A client of a serving."""

    def __init__(self, serving: Serving) -> None:
        self._http = httpx.AsyncClient(
            transport=httpx.ASGITransport(serving.app),
            base_url="http://grid",
            headers={"Authorization": f"Bearer {serving.token}"},
        )

    async def __aenter__(self) -> httpx.AsyncClient:
        return self._http

    async def __aexit__(self, *_: object) -> None:
        await self._http.aclose()


@pytest.fixture
async def http(serving: Serving) -> AsyncIterator[httpx.AsyncClient]:
    async with asker(serving) as client:
        yield client


async def test_lists_are_read_in_pages_of_any_size(
    serving: Serving, http: httpx.AsyncClient, tmp_path: Path
) -> None:
    world = serving.world
    for name in "abc":
        await world.node(name)
    job = await world.job(workers_min=3)
    assert await world.run_job(job) == "completed"
    for path, count in {
        "/api/v1/nodes": 3,
        f"/api/v1/jobs/{job}/rounds": 3,
        f"/api/v1/jobs/{job}/versions": 4,
    }.items():
        whole = (await http.get(path)).json()
        assert (len(whole["items"]), whole["next_cursor"]) == (count, "")
        found: list[Any] = []
        cursor = ""
        while True:
            params: dict[str, Any] = {"limit": 2, "cursor": cursor}
            page = (await http.get(path, params=params)).json()
            assert len(page["items"]) <= 2
            found += page["items"]
            cursor = page["next_cursor"]
            if not cursor:
                break
        assert found == whole["items"]
        for limit in (0, 1001):
            assert (await http.get(path, params={"limit": limit})).status_code == 422
    for path in (f"/api/v1/jobs/{job}/rounds", f"/api/v1/jobs/{job}/versions"):
        assert (await http.get(path, params={"cursor": "x"})).status_code == 400


async def test_uploads_and_samples_with_a_key_are_made_once(
    serving: Serving, http: httpx.AsyncClient
) -> None:
    key = {"Idempotency-Key": "k"}
    asked = {"sha256": "ab" * 32, "size": 10}
    first = await http.post("/api/v1/blobs", json=asked, headers=key)
    again = await http.post("/api/v1/blobs", json=asked, headers=key)
    assert first.json() == again.json()
    assert (await http.post("/api/v1/blobs", json=asked)).json() != first.json()
    other = await http.post("/api/v1/blobs", json={**asked, "size": 11}, headers=key)
    assert (other.status_code, other.json()["code"]) == (409, "http.idempotency")
    serving.world.grid.blobs.uploads.drop(first.json()["upload_id"])
    fresh = await http.post("/api/v1/blobs", json=asked, headers=key)
    assert fresh.status_code == 201
    assert fresh.json() != first.json()
    job = await serving.world.job()
    sample = {"prompt": "a", "timeout": 0.01}
    path = f"/api/v1/jobs/{job}/generate"
    for _ in range(2):
        late = await http.post(path, json=sample, headers=key)
        assert late.json()["code"] == "task.timeout"
    wrong = await http.post(path, json={**sample, "seed": 9}, headers=key)
    assert wrong.json()["code"] == "http.idempotency"
    tasks = (await http.get(f"/api/v1/jobs/{job}/tasks")).json()["items"]
    assert [t["state"] for t in tasks if t["phase"] == "generate"] == ["queued"]
    await http.post(path, json=sample)
    tasks = (await http.get(f"/api/v1/jobs/{job}/tasks")).json()["items"]
    states = [t["state"] for t in tasks if t["phase"] == "generate"]
    assert states == ["queued", "cancelled"], "without a key nobody comes again"
