"""What jobs are expected to be like, what became of it, and who may see which machine."""

from __future__ import annotations

from dataclasses import replace

import pytest

from distribai.core.devices import Device, Machine, Speed
from distribai.core.people import Principal
from distribai.core.spec import ResourceSpec
from distribai.orchestrator.fleet.liveness import flush
from distribai.orchestrator.fleet.queries import list_nodes
from distribai.orchestrator.fleet.why import why_node
from distribai.orchestrator.jobs import queries
from distribai.orchestrator.jobs.forecasting import plan_with
from distribai.orchestrator.people import sight
from distribai.wire.machines import machine_to_wire
from tests.orchestrator.harness import FakeNode, World

MACHINE = Machine(
    memory_mb=8000,
    link_mbps=40.0,
    link_up_mbps=8.0,
    speeds=(Speed(0, 100.0, 10.0),),
    month_bytes=10**9,
    month_left=10**6,
)


async def told(world: World, name: str) -> FakeNode:
    node = await world.node(name)
    await node.heartbeat(machine=machine_to_wire(MACHINE))
    await flush(world.grid)
    return node


async def train(world: World, job_id: str) -> None:
    """Every turn takes ten seconds, of which a task computes six, fetches one and sends two."""
    phases = {"seconds": 6.0, "download_seconds": 1.0, "upload_seconds": 2.0}
    for _ in range(60):
        await world.settle()
        if (await queries.show_job(world.grid, job_id)).state == "completed":
            return
        world.time.now += 10.0
        for node in world.nodes:
            for task in list(node.tasks.values()):
                outcome = await node.outcome(task)
                if task.phase == "train":
                    outcome = replace(outcome, metrics={**outcome.metrics, **phases})
                await node.report(outcome)
    raise AssertionError("the job does not end")


async def test_a_plan_uses_what_nodes_have_measured_and_says_what_is_guessed(world: World) -> None:
    node = await told(world, "a")
    outlook = await plan_with(world.grid, await world.spec())
    found, better = outlook.forecast, outlook.proposal
    assert (outlook.here, outlook.resting) == (1, 0)
    (own,) = found.nodes
    assert (own.node_id, own.up_mbps, own.down_mbps) == (node.id, 8.0, 40.0)
    assert (own.step_basis, own.link_basis) == ("benchmark", "measured")
    assert "never trained here" in found.assumed[0]
    assert better.forecast.nodes
    three = (await plan_with(world.grid, await world.spec(), nodes=3)).forecast
    assert [n.node_id for n in three.nodes].count("") == 2


async def test_without_nodes_the_plan_says_that_it_assumes_typical_ones(world: World) -> None:
    found = (await plan_with(world.grid, await world.spec(workers_min=2))).forecast
    assert len(found.nodes) == 2
    assert found.assumed[0].startswith("no node is here yet; typical homes are assumed")


async def test_a_plan_counts_who_could_take_part_and_who_is_online_and_rests(
    any_world: World,
) -> None:
    world = any_world
    await world.node("works")
    paused, small = await world.node("paused"), await world.node("small")
    await paused.heartbeat("pause")
    small.devices = [Device(0, "cpu", "fake", 64, 1)]
    await small.vanish()
    await small.connect()
    await flush(world.grid)
    outlook = await plan_with(
        world.grid, await world.spec(resources=ResourceSpec(memory_mb=256), workers_min=2)
    )
    assert (outlook.here, outlook.resting) == (1, 1)


async def test_a_job_tells_its_forecast_and_then_what_became_of_it(any_world: World) -> None:
    world = any_world
    await told(world, "a")
    spec = await world.spec()
    job_id = await world.job(spec)
    shown = await queries.show_job(world.grid, job_id)
    assert shown.forecast is not None
    assert "forecast" not in shown.plan
    assert shown.measured is None
    await train(world, job_id)
    measured = (await queries.show_job(world.grid, job_id)).measured
    assert measured is not None
    assert measured.rounds == 2, "the first one does not count"
    assert (measured.compute_s, measured.download_s, measured.upload_s) == (6.0, 1.0, 2.0)
    assert measured.compute_share == pytest.approx(6.0 / measured.round_s)
    after = (await plan_with(world.grid, spec)).forecast
    (node,) = after.nodes
    assert node.step_basis == "measured"
    assert node.step_s == pytest.approx(6.0 / spec.rounds.inner_steps)
    assert after.once_bytes == shown.dataset["bytes"], "the data is prepared by now"
    assert after.overhead_s == pytest.approx(measured.overhead_s)
    assert after.assumed == ()


async def test_a_job_with_other_batches_is_not_extrapolated_in_proportion(world: World) -> None:
    await told(world, "a")
    spec = await world.spec()
    await train(world, await world.job(spec))
    wide = replace(spec, batch=spec.batch * 32)
    (before,) = (await plan_with(world.grid, spec)).forecast.nodes
    (after,) = (await plan_with(world.grid, wide)).forecast.nodes
    assert (before.step_basis, after.step_basis) == ("measured", "measured")
    assert before.step_s < after.step_s < 16 * before.step_s, "launching costs no more"


async def test_owners_limits_are_planned_with_before_anything_has_moved(world: World) -> None:
    node = await world.node("a")
    limited = replace(MACHINE, link_mbps=0, link_up_mbps=0, limit_up_mbps=0.5, limit_down_mbps=4.0)
    await node.heartbeat(machine=machine_to_wire(limited))
    await flush(world.grid)
    (own,) = (await plan_with(world.grid, await world.spec())).forecast.nodes
    assert (own.up_mbps, own.down_mbps, own.link_basis) == (0.5, 4.0, "typical")


async def test_others_machines_have_no_name_in_a_plan(world: World) -> None:
    node = await told(world, "a")
    found = (await plan_with(world.grid, await world.spec())).forecast
    stranger = Principal("account", "", "acc_stranger", "stranger", "key_x", {}, frozenset())
    seen = await sight.forecast_for(world.grid, stranger, found)
    assert [n.node_id for n in seen.nodes] == [""]
    owner = replace(stranger, account_id=(await list_nodes(world.grid))[0].account_id)
    seen = await sight.forecast_for(world.grid, owner, found)
    assert [n.node_id for n in seen.nodes] == [node.id]


async def test_a_node_that_rests_is_listed_and_asked_with_its_own_words(any_world: World) -> None:
    world = any_world
    node = await world.node("a")
    await node.heartbeat("pause", intent_reason="its month is used up\x1b[31m")
    await flush(world.grid)
    (record,) = await list_nodes(world.grid)
    assert record.intent == "pause"
    assert record.intent_reason.startswith("its month is used up")
    assert "\x1b" not in record.intent_reason
    (reason,) = (await why_node(world.grid, node.id)).reasons
    assert reason.text.startswith("It is paused: its month is used up")
    await node.heartbeat("contribute")
    await flush(world.grid)
    assert (await list_nodes(world.grid))[0].intent_reason == ""
