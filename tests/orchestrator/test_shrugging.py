"""Rounds that wait for nobody and lose nothing: hand-ins, abandoned takes, starts, torn files."""

from __future__ import annotations

from dataclasses import replace

import pytest

from distribai.core.spec import RoundSpec
from distribai.orchestrator.jobs import commands, queries
from distribai.store.blobs import blob_key
from distribai.store.statements import submissions, work
from tests.orchestrator.harness import World
from tests.orchestrator.test_whole_job import assert_every_position_once

PAIRS = RoundSpec(inner_steps=2, grace_min=2.0, grace_max=5.0)


async def test_who_is_behind_is_told_until_when_its_round_waits_and_hands_in_what_it_has(
    world: World,
) -> None:
    a, b = await world.node("a"), await world.node("b")
    job_id = await world.job(rounds=PAIRS)
    await world.settle()
    slow = b.only_task()
    assert b.hurried == []
    await a.work("train")
    await world.settle()
    assert b.hurried == [(slow.task_id, pytest.approx(0.5))]
    assert a.hurried == []
    await world.settle()
    assert len(b.hurried) == 1, "once is enough"
    await b.report(await b.outcome(slow, steps=1))
    await world.settle()
    (first, *_) = await queries.list_rounds(world.grid, job_id)
    assert (first.state, first.accepted) == ("merged", 2)
    assert await world.run_job(job_id) == "completed"
    await assert_every_position_once(world, job_id)


async def test_a_node_that_comes_back_is_told_again(world: World) -> None:
    a, b = await world.node("a"), await world.node("b")
    await world.job(rounds=PAIRS)
    await world.settle()
    slow = b.only_task()
    await a.work("train")
    await world.settle()
    await b.vanish()
    world.time.now += 2
    b.session = ""
    await b.connect()
    await world.settle()
    assert [task for task, _ in b.hurried] == [slow.task_id] * 2


async def test_a_task_that_nobody_took_meanwhile_goes_on_under_the_same_attempt(
    any_world: World,
) -> None:
    world = any_world
    a, b = await world.node("a"), await world.node("b")
    job_id = await world.job(rounds=PAIRS)
    await world.settle()
    mine = a.only_task()
    await a.vanish()
    await world.advance(120, b)
    states = {t.id: t.state for t in (await queries.list_tasks(world.grid, job_id)).items}
    assert states[mine.task_id] == "queued"
    a.session = ""
    await a.connect()
    await world.settle()
    assert a.register_ack is not None
    assert [t.task_id for t in a.register_ack.keep] == [mine.task_id]
    assert a.only_task().attempt == mine.attempt == 1
    await a.work("train")
    await b.work("train")
    await world.settle()
    assert (await queries.show_job(world.grid, job_id)).version == 1
    assert await world.run_job(job_id) == "completed"
    await assert_every_position_once(world, job_id)


async def test_a_node_that_has_let_go_of_a_closed_rounds_task_gets_the_next_one_at_once(
    world: World,
) -> None:
    a, b = await world.node("a"), await world.node("b")
    await world.job(rounds=replace(PAIRS, staleness=0))
    await world.settle()
    slow = b.only_task()
    await a.work("train")
    await world.advance(6, a, b)
    assert slow.task_id in b.stopped
    assert [t for t in b.tasks.values() if t.round == 1] == []
    del b.tasks[slow.task_id]
    await b.heartbeat()
    await world.settle()
    assert (await b.next_training()).round == 1


async def test_a_round_below_its_minimum_is_opened_again_and_keeps_what_was_accepted(
    any_world: World,
) -> None:
    world = any_world
    a, b = await world.node("a"), await world.node("b")
    job_id = await world.job(rounds=PAIRS, workers_min=2)
    await world.settle()
    kept, lost = a.only_task(), b.only_task()
    await a.work("train")
    b.tasks.clear()
    await b.heartbeat(intent="drain")
    await b.leave()
    await world.advance(20, a)
    rounds = await queries.list_rounds(world.grid, job_id)
    assert [(r.number, r.take, r.state) for r in rounds] == [(0, 0, "abandoned"), (0, 1, "open")]
    assert (await queries.show_job(world.grid, job_id)).version == 0
    async with world.grid.db.read() as tx:
        (again,) = await submissions.submissions_of_round(tx, job_id, 0, 1)
    assert again.task_id == kept.task_id
    fresh = await a.next_training()
    assert set(fresh.samples) == set(lost.samples), "they are trained again first"
    await a.work("train")
    await world.settle()
    merged = (await queries.list_rounds(world.grid, job_id))[1]
    assert (merged.state, merged.accepted) == ("merged", 2)
    assert merged.reason.endswith("besides, 1 that the try before had accepted")
    async with world.grid.db.read() as tx:
        row = await work.get_round(tx, job_id, 0, 1)
    assert row is not None
    manifest = row.manifest
    assert {s["task_id"] for s in manifest["submissions"]} == {kept.task_id, fresh.task_id}
    assert manifest["base_momentum_hash"] == ""
    b.intent = "contribute"
    await b.connect()
    assert await world.run_job(job_id) == "completed"
    await assert_every_position_once(world, job_id)


async def test_a_round_below_its_minimum_waits_for_who_is_still_at_work_in_it(world: World) -> None:
    a, b = await world.node("a"), await world.node("b")
    job_id = await world.job(rounds=PAIRS, workers_min=2)
    await world.settle()
    slow = b.only_task()
    await a.work("train")
    await world.advance(100, a, b)  # twenty times the longest grace
    rounds = await queries.list_rounds(world.grid, job_id)
    assert [(r.number, r.take, r.state) for r in rounds] == [(0, 0, "open")]
    assert b.only_task().task_id == slow.task_id
    await b.work("train")
    await world.settle()
    (merged, *_) = await queries.list_rounds(world.grid, job_id)
    assert (merged.take, merged.state, merged.accepted) == (0, "merged", 2)


async def test_a_restarted_orchestrator_merges_no_round_before_its_nodes_could_come_back(
    world: World,
) -> None:
    a, b = await world.node("a"), await world.node("b")
    job_id = await world.job(rounds=PAIRS)
    await world.settle()
    late = b.only_task()
    await a.work("train")
    await world.settle()
    finished = await b.outcome(late)
    again = await world.restart()
    again.time.now += 30  # longer than any grace
    await again.settle()
    assert (await queries.list_rounds(again.grid, job_id))[0].state == "open"
    b.world = again
    await b.connect()
    await b.report(finished)
    await again.settle()
    (first, *_) = await queries.list_rounds(again.grid, job_id)
    assert (first.state, first.accepted) == ("merged", 2)
    await b.vanish()
    await again.close()


async def test_after_a_start_a_round_waits_for_the_nodes_that_were_here_before(
    world: World,
) -> None:
    a, b = await world.node("a"), await world.node("b")
    again = await world.restart()
    job_id = await again.job()
    for node in (a, b):
        node.world, node.session = again, ""
    await a.connect()
    await again.settle()
    assert await queries.list_rounds(again.grid, job_id) == ()
    await b.connect()
    await again.settle()
    (first,) = await queries.list_rounds(again.grid, job_id)
    assert len(first.members) == 2
    await a.vanish()
    await b.vanish()
    await again.close()


async def test_after_a_start_a_round_does_not_wait_for_long(world: World) -> None:
    a, b = await world.node("a"), await world.node("b")
    again = await world.restart()
    job_id = await again.job()
    a.world, a.session = again, ""
    await a.connect()
    await again.advance(30, a)
    (first,) = await queries.list_rounds(again.grid, job_id)
    assert len(first.members) == 1
    assert b.tasks == {}
    await a.vanish()
    await again.close()


@pytest.mark.parametrize("how", ["flipped", "torn", "gone"])
async def test_a_damaged_delta_is_named_and_the_round_merges_once_it_is_back(
    world: World, how: str
) -> None:
    a = await world.node("a")
    job_id = await world.job()
    await world.settle()
    outcome = await a.outcome(a.only_task())
    assert outcome.delta is not None
    await a.report(outcome)
    assert await world.duties.verify()
    path = world.root / "blobs" / blob_key(outcome.delta.sha256)
    whole = path.read_bytes()
    if how == "gone":
        path.unlink()
    else:
        path.write_bytes(whole[:-1] if how == "torn" else b"\0" + whole[1:])
    await world.settle()
    job = await queries.show_job(world.grid, job_id)
    assert job.state == "paused"
    assert outcome.delta.sha256[:12] in job.reason
    assert "backup" in job.reason
    await world.advance(60, a)
    assert (await queries.show_job(world.grid, job_id)).version == 0
    path.write_bytes(whole)
    await commands.resume_job(world.grid, job_id, "tester")
    await world.settle()
    assert (await queries.show_job(world.grid, job_id)).version == 1
    assert (await queries.show_job(world.grid, job_id)).reason == ""
    assert await world.run_job(job_id) == "completed"
    await assert_every_position_once(world, job_id)
