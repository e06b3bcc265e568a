from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import replace

import pytest

from distribai.core.spec import BlobRef
from distribai.core.tasks import Assignment, Outcome
from distribai.errors import Unavailable
from distribai.merge import weights
from distribai.orchestrator import traffic
from distribai.orchestrator.fleet.liveness import flush
from distribai.orchestrator.fleet.queries import list_nodes
from distribai.orchestrator.fleet.why import why_node
from distribai.orchestrator.jobs import queries
from distribai.orchestrator.jobs.why import why_job
from distribai.store.statements import records
from distribai.wire.v1 import distribai_pb2 as pb
from tests.orchestrator.harness import FakeNode, World
from tests.orchestrator.test_exactly_once import finish_everything
from tests.orchestrator.test_whole_job import assert_every_position_once


async def test_a_failed_attempt_goes_to_another_node(world: World) -> None:
    a, b = await world.node("a"), await world.node("b")
    job_id = await world.job(steps=2)
    await world.settle()
    failed = a.only_task()
    await a.fail(failed, "node.memory", "out of memory")
    await world.settle()
    assert failed.task_id not in a.tasks, "never straight back while another could take it"
    await finish_everything(world, b)
    tasks = {t.id: t for t in (await queries.list_tasks(world.grid, job_id)).items}
    assert (tasks[failed.task_id].state, tasks[failed.task_id].node_id) == ("accepted", b.id)
    (cause,) = tasks[failed.task_id].causes
    assert (cause.node_id, cause.code, cause.reason) == (a.id, "node.memory", "out of memory")
    assert await world.run_job(job_id) == "completed"
    await assert_every_position_once(world, job_id)


async def test_the_only_node_gets_a_failed_task_back(world: World) -> None:
    a = await world.node("a")
    job_id = await world.job(steps=2)
    await world.settle()
    task = a.only_task()
    await a.fail(task, "node.child", "it died")
    await a.fail(task, "node.child", "it died")
    await world.settle()
    await a.work("evaluate")
    await world.settle()
    assert a.tasks == {}, "it rests first, although the node is free"
    (rests,) = [r for r in (await why_job(world.grid, job_id)).reasons if r.task_id == task.task_id]
    assert rests.until == world.time.now + 5.0
    assert "rests" in rests.text
    (told,) = [r for r in (await why_node(world.grid, a.id)).reasons if r.job_id == job_id]
    assert (told.code, told.task_id, told.until) == ("resting", task.task_id, rests.until)
    assert "failed here (node.child: it died)" in told.text
    await world.advance(5, a)
    assert (a.only_task().task_id, a.only_task().attempt) == (task.task_id, 2)
    assert [(k.counted, k.code) for k in a.acks[:2]] == [(False, "task.failed")] * 2
    assert await world.run_job(job_id) == "completed"


async def test_a_job_fails_with_all_causes_when_the_attempts_are_used_up(world: World) -> None:
    a = await world.node("a")
    job_id = await world.job(max_attempts=3)
    began = world.time.now
    for i in range(3):
        await a.fail(await a.next_training(), "node.child", f"cause {i}")
        a.tasks.clear()
        await world.advance(5 * 2**i, a)
    assert world.time.now - began == 35, "each rest is twice as long"
    record = await queries.show_job(world.grid, job_id)
    assert record.state == "failed"
    assert a.id in record.reason
    assert "cause 2 [node.child]" in record.reason
    assert record.round is not None
    assert record.round.state == "abandoned"
    (task,) = [
        t for t in (await queries.list_tasks(world.grid, job_id)).items if t.phase == "train"
    ]
    assert [c.reason for c in task.causes] == ["cause 0", "cause 1", "cause 2"]


async def test_submissions_that_are_always_rejected_fail_the_job(world: World) -> None:
    a = await world.node("a")
    job_id = await world.job(max_attempts=2)
    for _ in range(2):
        task = await a.next_training()
        await a.report(Outcome(task.task_id, task.attempt, "done"))
        await world.settle()
        await world.advance(5, a)
    record = await queries.show_job(world.grid, job_id)
    assert record.state == "failed"
    assert "tensor.manifest" in record.reason


async def test_a_rejected_range_goes_to_another_node_at_once_and_rests_where_there_is_none(
    any_world: World,
) -> None:
    world = any_world
    a, b = await world.node("a"), await world.node("b")
    job_id = await world.job(steps=2, workers_max=1)
    for _ in range(3):
        await world.settle()
        await a.work("evaluate")
        await b.work("evaluate")
    (bad,) = [n for n in (a, b) if n.tasks]
    (good,) = [n for n in (a, b) if n is not bad]
    task = bad.only_task()
    await bad.report(Outcome(task.task_id, task.attempt, "done"))
    await world.settle()
    assert bad.acks[-1].code == "task.rejected"
    assert (bad.tasks, good.only_task().samples) == ({}, task.samples)

    again = good.only_task()
    await bad.heartbeat("pause")
    await good.report(Outcome(again.task_id, again.attempt, "done"))
    await world.settle()
    assert good.tasks == {}, "it does not come straight back"
    (rests,) = [r for r in (await why_job(world.grid, job_id)).reasons if "rests" in r.text]
    assert rests.until == world.time.now + 10.0, "the second failure: twice as long"
    await world.advance(10, good)
    assert good.only_task().samples == task.samples
    assert await world.run_job(job_id) == "completed"
    await assert_every_position_once(world, job_id)


async def test_a_rejected_evaluation_rests_before_it_comes_back(world: World) -> None:
    a = await world.node("a", devices=2)
    job_id = await world.job(workers_max=1)
    await world.settle()
    task = a.only_task("evaluate")
    await a.report(Outcome(task.task_id, task.attempt, "done", base_hash=task.base.weights_hash))
    await world.settle()
    assert {t.phase for t in a.tasks.values()} == {"train"}
    (rests,) = [r for r in (await why_job(world.grid, job_id)).reasons if "rests" in r.text]
    assert rests.until == world.time.now + 5.0
    await world.advance(5, a)
    assert a.only_task("evaluate").round == task.round


async def test_a_job_whose_last_loss_cannot_be_measured_completes_and_says_so(
    world: World,
) -> None:
    a = await world.node("a")
    job_id = await world.job(max_attempts=1, steps=2)
    await world.settle()
    await a.work("train")
    for _ in range(2):
        await world.settle()
        await a.fail(a.only_task("evaluate"), "node.child", "no luck")
    await world.settle()
    record = await queries.show_job(world.grid, job_id)
    assert record.state == "completed"
    assert "could not be measured" in record.reason
    assert "no luck" in record.reason


async def test_a_merge_that_would_hold_infinities_fails_the_job(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(weights, "LARGEST", 3.3e38)  # what is let in could not do it by itself
    a = await world.node("a")
    job_id = await world.job()
    for _ in range(2):  # the first such step is still finite, the second is not
        task = await a.next_training()
        honest = await a.outcome(task)
        huge = await a.upload(task, honest.steps, honest.tokens, value=3e38)
        await a.report(replace(honest, delta=huge))
        await world.settle()
    record = await queries.show_job(world.grid, job_id)
    assert record.state == "failed"
    assert "cannot be merged" in record.reason


async def test_absurd_values_are_the_node_s_failure_and_not_the_job_s(world: World) -> None:
    a, b = await world.node("a"), await world.node("b")
    job_id = await world.job()
    task = await a.next_training()
    honest = await a.outcome(task)
    monstrous = await absurd(world, a, task, honest)
    await a.report(replace(honest, delta=monstrous))
    await world.settle()
    (refused,) = [ack for ack in a.acks if ack.task_id == task.task_id]
    assert (refused.counted, refused.code) == (False, "task.rejected")
    assert "values beyond 1e+18" in refused.reason
    assert await world.run_job(job_id) == "completed"
    assert b.acks


async def absurd(world: World, node: FakeNode, task: Assignment, honest: Outcome) -> BlobRef:
    """A delta that only a node with a program of its own would send."""
    with pytest.MonkeyPatch.context() as own:
        own.setattr(weights, "LARGEST", 3.3e38)
        return await node.upload(task, honest.steps, honest.tokens, value=3e38)


async def test_bytes_are_counted_by_job_and_kind(any_world: World) -> None:
    world = any_world
    job_id = await world.job()
    (version,) = await queries.list_versions(world.grid, job_id)
    for _ in range(2):
        traffic.count(world.grid, job_id, "node_a", "other", 0, 100, version.weights.sha256)
        traffic.count(world.grid, job_id, "node_a", "delta", 50, 0)
        traffic.count(world.grid, job_id, "node_a", "other", 1, 7, "0" * 64)
        before = (await queries.show_job(world.grid, job_id)).bytes
        await world.settle()
        assert (await queries.show_job(world.grid, job_id)).bytes == before
    assert before.weights_down == 200
    assert before.weights_up == 100
    assert (before.data_up, before.data_down) == (2, 14)
    async with world.grid.db.read() as tx:
        assert await records.traffic_of(tx, job_id) == {
            "weights": (0, 200),
            "delta": (100, 0),
            "other": (2, 14),
        }


async def test_what_was_heard_is_kept_while_the_database_is_away(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    a = await world.node("a")
    job_id = await world.job()
    await world.settle()
    traffic.count(world.grid, job_id, a.id, "delta", 50, 0)
    line = pb.LogMessage(level="info", message="hello", task_id=a.only_task().task_id)
    await a.send(pb.NodeMessage(log=line))
    await a.heartbeat(bytes_up=70)

    @asynccontextmanager
    async def away() -> AsyncIterator[None]:
        raise Unavailable("grid.database", "It is away.")
        yield

    with monkeypatch.context() as patch:
        patch.setattr(world.grid.db, "write", away)
        with pytest.raises(Unavailable):
            await flush(world.grid)
    await flush(world.grid)
    told = [entry.message for entry in await queries.list_logs(world.grid, job_id)]
    assert told.count("hello") == 1
    assert (await queries.show_job(world.grid, job_id)).bytes.weights_up == 50
    (node,) = await list_nodes(world.grid)
    assert node.bytes_up == 70
