"""Whatever nodes do and in whatever order, every sample position is accounted for exactly once, and
a newcomer can have every version, whenever old snapshots are let go and deleted."""

from __future__ import annotations

import asyncio
import tempfile
from dataclasses import replace
from pathlib import Path

from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from distribai.core.tasks import Outcome
from distribai.orchestrator.jobs import queries
from distribai.orchestrator.retention import collect
from distribai.store.statements import jobs
from tests.orchestrator.harness import FakeNode, World
from tests.orchestrator.test_exactly_once import assert_every_position_is_somewhere
from tests.orchestrator.test_retention import age
from tests.orchestrator.test_snapshots import RULE, fetcher, present, reach_all
from tests.orchestrator.test_whole_job import assert_every_position_once
from tests.store.databases import new_sqlite

EVENTS = st.lists(
    st.tuples(
        st.sampled_from(
            [
                "work",
                "half",
                "spoil",
                "fail",
                "vanish",
                "forget",
                "repeat",
                "stale",
                "time",
                "clean",
            ]
        ),
        st.integers(0, 2),
    ),
    min_size=4,
    max_size=10,
)


async def happen(world: World, node: FakeNode, event: str, past: list[Outcome]) -> None:
    """One event at one node."""
    training = [t for t in node.tasks.values() if t.phase == "train"]
    if event == "work":
        for task in training:
            past.append(await node.outcome(task))
            await node.report(past[-1])
        await node.work("evaluate")
    elif event == "half" and training:
        past.append(await node.outcome(training[0], steps=1))
        await node.report(past[-1])
    elif event == "spoil" and training:
        await node.report(Outcome(training[0].task_id, training[0].attempt, "done"))
    elif event == "fail" and training:
        await node.fail(training[0], "node.child", "bad luck")
    elif event in ("vanish", "forget"):
        await node.vanish()
        if event == "forget":
            node.tasks.clear()
            node.session = ""
            node.channel.renumber()
        else:
            await world.advance(70)
        await node.connect()
    elif event == "repeat" and past:
        await node.report(past[-1])
    elif event == "stale" and past:
        await node.report(past[0])
    elif event == "time":
        await world.advance(40, *world.nodes)
    elif event == "clean":
        await clean(world)


async def clean(world: World) -> None:
    """Let go of snapshots, and delete them; what a node that lost everything is told is there."""
    await collect(world.grid)
    world.time.now += 2
    age(world, seconds=2)
    await collect(world.grid)
    for node in world.nodes:
        for task in node.tasks.values():
            fetcher(world)(task.base.blobs)


async def run(root: Path, events: list[tuple[str, int]]) -> None:
    world = await World(root, await new_sqlite(root)).open()
    try:
        nodes = [await world.node(n) for n in "abc"]
        world.grid.settings = replace(world.grid.settings, let_go_s=1.0)
        job_id = await world.job(max_attempts=20, snapshots=RULE)
        past: list[Outcome] = []
        for event, number in events:
            await world.settle()
            await happen(world, nodes[number], event, past)
            await assert_every_position_is_somewhere(world, job_id)
        assert await world.run_job(job_id) == "completed"
        await assert_every_position_once(world, job_id)
        await clean(world)
        assert await present(world, job_id) == [0, 3]
        await reach_all(world, job_id)
        async with world.grid.db.read() as tx:
            job = await jobs.get(tx, job_id)
        assert job is not None
        rounds = await queries.list_rounds(world.grid, job_id)
        assert job.tokens == sum(r.tokens for r in rounds)
    finally:
        await world.close()


@settings(max_examples=3, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(EVENTS)
def test_no_sample_is_lost_or_counted_twice_whatever_happens(
    events: list[tuple[str, int]],
) -> None:
    with tempfile.TemporaryDirectory() as root:
        asyncio.run(run(Path(root), events))
