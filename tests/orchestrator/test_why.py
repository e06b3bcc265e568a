"""Why nothing starts, told of a grid with real stores."""

from __future__ import annotations

from dataclasses import replace
from itertools import product

import pytest

from distribai.core.devices import Device, Machine
from distribai.core.spec import ResourceSpec
from distribai.core.states import Intent, Liveness, Standing
from distribai.core.why import CODES, JobWhy, NodeWhy
from distribai.errors import Ambiguous, NotFound
from distribai.orchestrator.fleet.liveness import flush
from distribai.orchestrator.fleet.queries import summary
from distribai.orchestrator.fleet.why import node_events, obstacles_of, resolve_node, why_node
from distribai.orchestrator.jobs import commands, generation
from distribai.orchestrator.jobs.why import why_job
from distribai.store.statements import fleet, sessions, watching
from distribai.wire.machines import machine_to_wire
from tests.orchestrator.harness import World


def codes(why: JobWhy | NodeWhy) -> list[str]:
    found = [r.code for r in why.reasons]
    assert set(found) <= set(CODES)
    return found


async def test_a_job_tells_of_every_wait_from_its_submission_to_its_end(any_world: World) -> None:
    world = any_world
    job_id = await commands.create_job(world.grid, await world.spec(workers_min=2), None, "tester")
    why = await why_job(world.grid, job_id)
    assert (codes(why), why.waiting) == (["decision"], True)
    assert job_id in why.reasons[0].hint

    await commands.accept_job(world.grid, job_id, "tester")
    why = await why_job(world.grid, job_id)
    assert codes(why) == ["workers", "task"]  # the task is the held-out loss of version 0
    assert "0 of at least 2 workers are here" in why.reasons[0].text

    one, two = await world.node("one"), await world.node("two")
    why = await why_job(world.grid, job_id)
    assert codes(why)[0] == "turn"
    await world.settle()
    why = await why_job(world.grid, job_id)
    assert "quorum" in codes(why)
    (quorum,) = [r for r in why.reasons if r.code == "quorum"]
    assert set(quorum.nodes) == {one.id, two.id}

    assert await world.run_job(job_id) == "completed"
    why = await why_job(world.grid, job_id)
    assert (codes(why), why.waiting) == (["ended"], False)


async def test_a_round_in_its_grace_says_until_when_and_for_whom(world: World) -> None:
    spec = await world.spec(workers_min=1)
    spec = replace(spec, rounds=replace(spec.rounds, quorum=0.5))
    one, two = await world.node("one"), await world.node("two")
    job_id = await world.job(spec)
    await one.next_training()
    await two.next_training()
    await one.work("train")
    await world.settle()
    why = await why_job(world.grid, job_id)
    (grace,) = [r for r in why.reasons if r.code == "grace"]
    assert grace.nodes == (two.id,)
    assert grace.until is not None
    assert grace.until == pytest.approx(why.now + 20.0)


async def test_a_paused_job_says_who_can_let_it_go_on(world: World) -> None:
    await world.node("one")
    job_id = await world.job()
    await world.settle()
    await commands.pause_job(world.grid, job_id, "tester")
    why = await why_job(world.grid, job_id)
    assert codes(why)[0] == "paused"
    assert f"distribai job resume {job_id}" in why.reasons[0].hint


async def test_too_small_devices_are_named_with_what_is_asked_of_them(world: World) -> None:
    small = await world.node("small")
    small.devices = [Device(0, "cpu", "fake", 64, 1)]
    await small.vanish()
    await small.connect()
    spec = await world.spec(resources=ResourceSpec(memory_mb=4096))
    job_id = await world.job(spec)
    await world.settle()
    why = await why_job(world.grid, job_id)
    assert codes(why) == ["workers", "device", "task"]
    assert "4096 MB" in why.reasons[1].text
    assert why.reasons[1].nodes == (small.id,)
    node = await why_node(world.grid, small.id)
    assert codes(node) == ["task"]
    assert "4096 MB" in node.reasons[0].text


async def test_a_node_tells_what_it_holds_and_why_it_gets_no_more(world: World) -> None:
    node = await world.node("one", devices=2)
    why = await why_node(world.grid, node.id)
    assert (why.able, codes(why)) == (True, ["idle"])

    job_id = await world.job(workers_max=1)
    await node.next_training()
    why = await why_node(world.grid, node.id)
    held = [d for d in why.devices if d.task_id]
    assert (job_id, "train") in [(d.job_id, d.phase) for d in held]
    assert len(why.devices) == 2
    late = await world.node("late")
    assert codes(await why_node(world.grid, late.id)) == ["late"]

    await late.heartbeat("drain")
    await world.settle()
    why = await why_node(world.grid, late.id)
    assert (why.able, codes(why)) == (False, ["drain"])


async def test_a_silent_node_is_degraded_then_gone(world: World) -> None:
    node = await world.node("one")
    await world.settle()
    await node.vanish()
    await world.advance(31)
    assert codes(await why_node(world.grid, node.id)) == ["degraded"]
    await world.advance(30)
    assert codes(await why_node(world.grid, node.id)) == ["offline"]


async def test_a_node_whose_blobs_do_not_come_through_is_named_in_health_and_why(
    any_world: World,
) -> None:
    world = any_world
    node = await world.node("one")
    why = "the download of a blob at http://h:1 fails: refused"
    await node.heartbeat(machine=machine_to_wire(Machine(trouble=f"{why}\x1b")))
    await flush(world.grid)
    (problem,) = (await summary(world.grid)).problems
    assert f"one ({node.id[:13]})" in problem
    assert why in problem
    assert "\x1b" not in problem
    (others,) = (await summary(world.grid, frozenset())).problems
    assert node.id[:13] not in others, "whose node it is, is not everybody's to know"
    found = await why_node(world.grid, node.id)
    assert codes(found) == ["http", "idle"]
    assert why in found.reasons[0].text
    assert found.able
    await node.heartbeat(machine=machine_to_wire(Machine()))
    await flush(world.grid)
    assert (await summary(world.grid)).problems == ()
    assert codes(await why_node(world.grid, node.id)) == ["idle"]


async def test_a_queued_task_says_why_it_has_no_device(world: World) -> None:
    node = await world.node("one")
    job_id = await world.job()
    await node.next_training()
    await generation.request_generation(world.grid, job_id, 0, "x", 4, 0.0, 0)
    why = await why_job(world.grid, job_id)
    (task,) = [r for r in why.reasons if r.code == "task" and "(generate)" in r.text]
    assert "no device is free" in task.text


async def test_who_has_no_obstacle_is_whom_the_scheduler_reads(any_world: World) -> None:
    """``core.why.obstacles`` says the same as the statement that the scheduler uses."""
    node = await any_world.node("one")
    for liveness, standing, intent in product(Liveness, Standing, Intent):
        for ended in (False, True):
            async with any_world.grid.db.write() as tx:
                await fleet.change_node(
                    tx,
                    node.id,
                    liveness=liveness.value,
                    standing=standing.value,
                    intent=intent.value,
                )
                if ended:
                    await sessions.end_sessions(tx, node.id)
                able = {row.id for row in await fleet.able_nodes(tx)}
                row = await watching.node(tx, node.id)
                assert row is not None
                clear = not obstacles_of(row, tx.now)
            assert clear is (node.id in able), (liveness, standing, intent, ended)
        async with any_world.grid.db.write() as tx:
            session = f"ses_{liveness}{standing}{intent}"
            await sessions.open_session(tx, session, node.id, session, "holder")


async def test_a_node_has_an_event_feed_of_its_own(any_world: World) -> None:
    node, other = await any_world.node("one"), await any_world.node("two")
    job_id = await any_world.job(workers_min=2)
    await node.next_training()
    await other.next_training()
    found = await node_events(any_world.grid, node.id)
    assert [e.kind for e in found][:1] == ["node.joined"]
    assert "task.leased" in {e.kind for e in found}
    assert {e.node_id for e in found} == {node.id}
    (leased,) = [e for e in found if e.kind == "task.leased"][:1]
    assert leased.job_id == job_id
    behind = await node_events(any_world.grid, node.id, found[0].cursor)
    assert [e.cursor for e in behind] == [e.cursor for e in found[1:]]
    assert await node_events(any_world.grid, node.id, found[-1].cursor) == ()


async def test_a_node_goes_by_its_id_a_beginning_of_it_and_its_name(world: World) -> None:
    one, two = await world.node("one"), await world.node("two")
    twin = await world.node("two")
    for ref in (one.id, "one", one.id[:14], one.id.removeprefix("node_")[:12]):
        assert await resolve_node(world.grid, ref) == one.id
    for ref in ("", "zz", "node_", "nobody", "\0"):
        with pytest.raises(NotFound) as unknown:
            await resolve_node(world.grid, ref)
        assert unknown.value.code == "node.unknown"
    with pytest.raises(Ambiguous) as caught:
        await resolve_node(world.grid, "two")
    assert two.id[:13] in caught.value.message
    assert twin.id[:13] in caught.value.message


async def test_what_is_not_there_is_unknown(world: World) -> None:
    with pytest.raises(NotFound):
        await why_job(world.grid, "job_nothing")
    with pytest.raises(NotFound):
        await why_node(world.grid, "node_nothing")
