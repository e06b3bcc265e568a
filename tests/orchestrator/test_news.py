"""News of changes, and what is kept in memory because of them."""

from __future__ import annotations

import asyncio
import random
import tempfile
from collections.abc import Awaitable, Callable
from pathlib import Path

import pytest
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from distribai.errors import Conflict
from distribai.orchestrator.fleet import standing
from distribai.orchestrator.fleet.liveness import sweep
from distribai.orchestrator.jobs import commands
from distribai.orchestrator.news import Box, Changes
from distribai.orchestrator.rounds import ready as ready_module
from distribai.orchestrator.rounds.ready import Ready
from distribai.store import outbox
from distribai.store.outbox import Change
from tests.orchestrator.harness import World
from tests.store.databases import new_postgres, new_sqlite


def everything(_row: object) -> bool:
    return True


async def write(world: World, *changes: Change) -> None:
    async with world.grid.db.write() as tx:
        await outbox.append(tx, changes)


async def test_a_box_names_the_nodes_and_jobs_of_what_it_wants(any_world: World) -> None:
    grid = any_world.grid
    nodes = grid.news.box(lambda row: row.kind.startswith("node."))
    both = grid.news.box(everything)
    await grid.news.catch_up(grid)
    assert both.take().everything
    assert not both.take()
    nodes.take()
    told = [Change("node.online", node_id="n1"), Change("job.queued", "j1")]
    await write(any_world, *told, Change("task.leased", "j2", "t", "n2"))
    await grid.news.catch_up(grid)
    assert nodes.take() == Changes(some=True, nodes={"n1"})
    assert both.take() == Changes(some=True, nodes={"n1", "n2"}, jobs={"j1"})
    await grid.news.catch_up(grid)
    assert not both.take()


async def test_a_late_commit_is_told_and_nothing_is_told_twice(any_world: World) -> None:
    grid = any_world.grid
    if grid.db.dialect == "sqlite":
        pytest.skip("SQLite has one writer: there is no late commit")
    box = grid.news.box(everything)
    await grid.news.catch_up(grid)
    box.take()
    async with grid.db.write() as slow:
        await outbox.append(slow, [Change("a", node_id="slow")])
        await write(any_world, Change("b", node_id="quick"))
        await grid.news.catch_up(grid)
        assert box.take().nodes == {"quick"}, "it is visible, though not settled"
    await grid.news.catch_up(grid)
    assert box.take().nodes == {"slow"}


async def test_what_could_not_be_dealt_with_is_still_there(world: World) -> None:
    box = world.grid.news.box(everything)
    box.put_back(Changes(some=True, nodes={"n"}))
    taken = box.take()
    assert taken.everything
    assert taken.nodes == {"n"}
    box.look_at("m")
    await box.wait(60.0)
    assert box.take() == Changes(some=True, nodes={"m"})


async def test_who_waits_for_a_task_is_told_of_its_end_alone(world: World) -> None:
    grid = world.grid
    await grid.news.catch_up(grid)
    with grid.news.of_task("t1") as box:
        box.take()
        await write(world, Change("task.leased", "j", "t1"), Change("task.accepted", "j", "t2"))
        await grid.news.catch_up(grid)
        assert not box.take()
        await write(world, Change("task.accepted", "j", "t1"))
        waiting = asyncio.create_task(box.wait(60.0))
        await grid.news.catch_up(grid)
        await waiting
        assert box.take()
    await write(world, Change("task.failed", "j", "t1"))
    await grid.news.catch_up(grid)


async def test_hints_travel_between_the_processes_of_a_database(any_world: World) -> None:
    if any_world.grid.db.dialect == "sqlite":
        pytest.skip("an SQLite file has one process")
    heard: asyncio.Queue[str] = asyncio.Queue()
    async with (
        any_world.grid.db.hints(heard.put_nowait),
        any_world.grid.db.hints(lambda _: None) as tell,
    ):
        await tell("somebody")
        assert await asyncio.wait_for(heard.get(), 180) == "somebody"


# ------------------------------------------------------------------ what is kept in memory


async def same_as_read_anew(world: World, ready: Ready, box: Box) -> None:
    """What the news made of ``ready`` is what reading everything makes of another one."""
    grid = world.grid
    await grid.news.catch_up(grid)
    changes, fresh = box.take(), Ready(grid)
    async with grid.db.read() as tx:
        if changes.everything:
            await ready.read_all(tx)
        else:
            await ready.read(tx, changes.nodes)
        await fresh.read_all(tx)
    assert content(ready) == content(fresh)


def content(ready: Ready) -> tuple[object, object]:
    able = {(d.node_id, d.index): d for d in ready}
    free = {(d.node_id, d.index): d for d in ready.free}
    return able, free


def steps(world: World, rng: random.Random) -> list[Callable[[], Awaitable[object]]]:
    """What may happen next."""
    grid = world.grid
    any_node = rng.choice(world.nodes) if world.nodes else None

    async def join() -> None:
        if len(world.nodes) < 8:
            index = len(world.nodes)  # the same walk has the same nodes
            key = Ed25519PrivateKey.from_private_bytes(bytes([index + 1] * 32))
            await world.node(f"n{index}", devices=rng.randint(1, 2), key=key)

    found: list[Callable[[], Awaitable[object]]] = [join, world.settle, world.settle, world.job]
    if any_node is None:
        return found
    node = any_node

    async def order() -> None:
        try:
            await standing.order(grid, node.id, rng.choice(["pause", "resume", "drain"]), "x")
        except Conflict:
            return

    async def judge() -> None:
        try:
            verb = rng.choice(["quarantine", "trust", "pardon"])
            await standing.set_standing(grid, node.id, verb, "", "x")
        except Conflict:
            return

    async def say() -> None:
        intent = rng.choice(["contribute", "contribute", "pause"])
        await node.heartbeat(intent, held_versions={"job_x": rng.randint(0, 2)})
        await world.duties.hear()

    async def grow_silent() -> None:
        world.time.now += rng.choice([5.0, 35.0, 60.0])
        await sweep(grid)

    async def come_back() -> None:
        await node.vanish()
        await node.connect()

    async def fail() -> None:
        for task in list(node.tasks.values()):
            await node.fail(task, "task.oom", "no memory")

    async def cancel() -> None:
        async with grid.db.read() as tx:
            jobs = [r.job_id for r in await outbox.read(tx, outbox.BEGINNING, 1000) if r.job_id]
        if jobs:
            try:
                await commands.cancel_job(grid, rng.choice(jobs), "", "x")
            except Conflict:
                return

    return [*found, order, judge, say, say, grow_silent, come_back, node.work, fail, cancel]


async def walk(url: str, rng: random.Random, count: int) -> None:
    """So many random changes, after each of which memory and database must agree."""
    with tempfile.TemporaryDirectory() as root, pytest.MonkeyPatch.context() as patch:
        patch.setattr(ready_module, "PAGE", 3)
        world = await World(Path(root), url or await new_sqlite(Path(root))).open()
        ready, box = Ready(world.grid), world.grid.news.box(everything, of_nodes=True)
        try:
            for _ in range(count):
                await rng.choice(steps(world, rng))()
                await same_as_read_anew(world, ready, box)
                if rng.random() < 0.2:
                    async with world.grid.db.read() as tx:
                        await ready.read_page(tx)
                    await same_as_read_anew(world, ready, box)
        finally:
            await world.close()


walks = given(rng=st.randoms(use_true_random=False), count=st.integers(1, 40))


@settings(max_examples=8, deadline=None, suppress_health_check=list(HealthCheck))
@walks
def test_news_keep_what_is_in_memory_as_the_database_has_it(rng: random.Random, count: int) -> None:
    asyncio.run(walk("", rng, count))


@settings(max_examples=4, deadline=None, suppress_health_check=list(HealthCheck))
@walks
def test_news_keep_it_on_postgresql_too(postgres: str, rng: random.Random, count: int) -> None:
    async def anew() -> None:
        await walk(await new_postgres(postgres), rng, count)

    asyncio.run(anew())


async def test_pages_mend_what_the_news_have_missed(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    for i in range(7):
        await world.node(f"n{i}")
    ready = Ready(world.grid)
    monkeypatch.setattr(ready_module, "PAGE", 3)
    async with world.grid.db.read() as tx:
        await ready.read_all(tx)
    before = content(ready)
    for node in world.nodes[::2]:
        ready.leased(node.id, 0)
    assert content(ready) != before
    async with world.grid.db.read() as tx:
        for _ in range(3):
            await ready.read_page(tx)
    assert content(ready) == before
