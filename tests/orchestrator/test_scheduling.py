"""Turns, needs and deadlines over real rows."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from typing import Any

import pytest

from distribai.core.devices import Machine, Speed
from distribai.core.pace import LEAST_SHARE, SLACK
from distribai.core.spec import ResourceSpec
from distribai.core.turns import AGEING_S
from distribai.orchestrator.fleet.liveness import after_start, flush
from distribai.orchestrator.fleet.queries import list_nodes
from distribai.orchestrator.jobs import commands, queries
from distribai.orchestrator.jobs.why import why_job
from distribai.store.statements import jobs, turns, work
from distribai.wire.machines import machine_to_wire
from tests.orchestrator.harness import LIVENESS, FakeNode, World

USUAL = LIVENESS.task_deadline_s
FAST = Machine(64_000, 900_000, 500.0, 80.0, "L0", "fast", (Speed(0, 800.0, 300.0),))
SLOW = replace(FAST, fingerprint="slow", speeds=(Speed(0, 1e-6, 1.0),))


async def measured(world: World, name: str, machine: Machine | None, **how: Any) -> FakeNode:
    """A node that registers with what was measured of it."""
    node = await world.node(name, **how)
    if machine is not None:
        await node.vanish()
        await node.connect(machine=machine_to_wire(machine))
    return node


async def leased_for(world: World, node: FakeNode) -> float:
    """Seconds from its assignment to the hard deadline of the node's training task."""
    async with world.grid.db.read() as tx:
        row = await work.get_task(tx, node.only_task().task_id)
    assert row is not None
    return float(row.deadline_at - row.leased_at)


async def of_organization(world: World, job_id: str, organization: str) -> str:
    """Let a job belong to an organization."""
    async with world.grid.db.write() as tx:
        await jobs.change(tx, job_id, organization_id=organization)
    return job_id


async def test_a_device_gets_only_what_it_was_measured_to_be_able_to_do(any_world: World) -> None:
    world = any_world
    slow, fast = await measured(world, "slow", SLOW), await measured(world, "fast", FAST)
    unknown = await measured(world, "unknown", None)
    spec = await world.spec(resources=ResourceSpec(gflops=100.0, disk_mb=1000))
    job_id = await world.job(spec)
    await fast.next_training()
    assert not slow.tasks
    assert not unknown.tasks
    (row,) = await queries.list_rounds(world.grid, job_id)
    assert [m.node_id for m in row.members] == [fast.id]


async def test_job_why_says_what_every_device_lacks(world: World) -> None:
    node = await measured(world, "slow", SLOW)
    await world.job(await world.spec(resources=ResourceSpec(gflops=100.0)))
    job_id = await world.job(
        await world.spec(name="jailed", resources=ResourceSpec(isolation="L2"))
    )
    await world.settle()
    texts = [r.text for r in (await why_job(world.grid, job_id)).reasons]
    assert any("isolation L2, and the machine offers L0" in t for t in texts), texts
    assert not node.tasks


async def test_a_heartbeat_tells_of_a_machine_measured_later(any_world: World) -> None:
    world = any_world
    node = await world.node("late")
    job_id = await world.job(await world.spec(resources=ResourceSpec(gflops=100.0)))
    await world.settle()
    assert not node.tasks
    await node.heartbeat(machine=machine_to_wire(FAST))
    await flush(world.grid)
    (record,) = await list_nodes(world.grid)
    assert record.machine == FAST
    await node.heartbeat()
    assert await node.next_training()
    assert (await queries.show_job(world.grid, job_id)).state == "running"


async def test_a_slow_node_gets_a_longer_deadline_than_a_fast_one(world: World) -> None:
    slow, fast = await measured(world, "slow", SLOW), await measured(world, "fast", FAST)
    await world.job(workers_min=2, rounds=replace((await world.spec()).rounds, quorum=1.0))
    await slow.next_training()
    await fast.next_training()
    by_benchmark = await leased_for(world, slow)
    assert by_benchmark > 2 * USUAL
    assert await leased_for(world, fast) == USUAL, "a claim makes no deadline shorter"
    # Now the grid measures: the slow one takes 300 s for its two steps, the fast one a second.
    world.time.now += 1.0
    await fast.work("train")
    for _ in range(7):
        world.time.now += 42.0
        await slow.heartbeat()
        await fast.heartbeat()
        await flush(world.grid)
    world.time.now += 5.0
    await slow.work("train")
    share = (await slow.next_training()).steps / 2
    await fast.next_training()
    assert await leased_for(world, slow) == pytest.approx(SLACK * 300.0 * share)
    assert await leased_for(world, fast) == LEAST_SHARE * USUAL


async def test_a_restart_gives_a_slow_node_its_whole_deadline_again(any_world: World) -> None:
    slow = await measured(any_world, "slow", SLOW)
    await any_world.job()
    await slow.next_training()
    given = await leased_for(any_world, slow)
    any_world.time.now += 50.0
    await after_start(any_world.grid)
    assert await leased_for(any_world, slow) == pytest.approx(given + 50.0)


async def test_organizations_get_rounds_in_turn_however_many_jobs_they_queue(
    any_world: World,
) -> None:
    """One node, four jobs of one organization and one of another."""
    world = any_world
    node = await world.node("one")
    spec = await world.spec(steps=100)
    owners: dict[str, str] = {}
    for i in range(5):
        name = "many" if i < 4 else "few"
        job_id = await world.job(replace(spec, name=f"{name}{i}"))
        owners[await of_organization(world, job_id, f"org_{name}")] = name
    got: Counter[str] = Counter()
    while got.total() < 12:
        await world.settle()
        for task in list(node.tasks.values()):
            got[owners[task.job_id]] += task.phase == "train"
        world.time.now += 1.0
        assert await node.work()
    assert abs(got["many"] - got["few"]) <= 2, got
    async with world.grid.db.read() as tx:
        accounts = await turns.tags(tx)
    assert {organization for organization, _ in accounts} == {"org_many", "org_few"}


async def test_a_job_of_the_last_tier_gets_its_rounds_behind_a_busy_first_one(world: World) -> None:
    node = await world.node("one")
    spec = await world.spec(steps=10_000)
    await world.job(replace(spec, name="urgent", priority="P0"))
    patient = await world.job(replace(spec, name="patient", priority="P3"))
    opened: list[float] = []
    began = world.time.now
    for _ in range(200):
        await world.settle()
        if any(t.job_id == patient and t.phase == "train" for t in node.tasks.values()):
            opened.append(world.time.now - began)
        if len(opened) == 2:
            break
        world.time.now += 30.0
        await node.work()
    assert len(opened) == 2
    assert opened[0] <= 3 * AGEING_S + 300


async def test_the_heavier_job_of_an_organization_goes_first(any_world: World) -> None:
    world = any_world
    node = await world.node("one")
    spec = await world.spec()
    first = await world.job(replace(spec, name="first"))
    second = await world.job(replace(spec, name="second"))
    await commands.set_weight(world.grid, second, 4.0, "tester")
    assert (await queries.show_job(world.grid, second)).weight == 4.0
    task = await node.next_training()
    assert task.job_id == second
    assert task.job_id != first
