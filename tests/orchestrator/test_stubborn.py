"""What must not make the duties, a node or a task go round in circles."""

from __future__ import annotations

from distribai.orchestrator.fleet.registry import MAX_REFUSAL_S, REFUSAL_S
from distribai.orchestrator.jobs import commands, queries
from distribai.store.blobs import blob_key
from distribai.store.statements import work
from distribai.wire.v1 import distribai_pb2 as pb
from tests.orchestrator.harness import FakeNode, World
from tests.orchestrator.test_whole_job import assert_every_position_once


async def test_a_job_that_a_person_paused_does_not_try_a_damaged_merge_without_end(
    world: World,
) -> None:
    a = await world.node("a")
    job_id = await world.job()
    await world.settle()
    outcome = await a.outcome(a.only_task())
    assert outcome.delta is not None
    await a.report(outcome)
    assert await world.duties.verify()
    await commands.pause_job(world.grid, job_id, "tester")
    path = world.root / "blobs" / blob_key(outcome.delta.sha256)
    whole = path.read_bytes()
    path.write_bytes(whole[:-1])
    await world.settle()
    job = await queries.show_job(world.grid, job_id)
    assert job.state == "paused"
    assert outcome.delta.sha256[:12] in job.reason
    path.write_bytes(whole)
    await commands.resume_job(world.grid, job_id, "tester")
    assert await world.run_job(job_id) == "completed"
    await assert_every_position_once(world, job_id)


async def test_a_node_whose_earlier_attempt_failed_is_told_that_its_task_is_cancelled(
    world: World,
) -> None:
    a = await world.node("a")
    job_id = await world.job()
    await world.settle()
    await a.fail(a.only_task(), "node.child", "it crashed")
    await world.advance(6.0, a)  # the task rests
    again = a.only_task()
    assert again.attempt == 2
    acks = len(a.acks)
    await commands.cancel_job(world.grid, job_id, "enough", "tester")
    await world.settle()
    assert a.acks[acks:] == [], "nothing was reported"
    assert again.task_id in a.stopped


async def test_the_report_of_a_failed_attempt_that_comes_again_gets_its_answer_again(
    world: World,
) -> None:
    a, _ = await world.node("a"), await world.node("b")
    await world.job()
    await world.settle()
    task = a.only_task()
    for _ in range(2):
        await a.fail(task, "node.child", "it crashed")
        await world.settle()
        assert (a.acks[-1].task_id, a.acks[-1].code) == (task.task_id, "task.failed")


async def _decline_all(node: FakeNode) -> int:
    count = 0
    for task in list(node.tasks.values()):
        del node.tasks[task.task_id]
        count += 1
        refusal = pb.TaskAccept(
            task_id=task.task_id, attempt=task.attempt, accepted=False, reason="the disk is full"
        )
        await node.send(pb.NodeMessage(task_accept=refusal))
    return count


async def test_a_node_that_takes_nothing_for_a_while_does_not_use_up_its_tasks_attempts(
    world: World,
) -> None:
    a = await world.node("a")
    job_id = await world.job()
    declined = 0
    for _ in range(10):
        await world.settle()
        declined += await _decline_all(a)
    assert declined <= 2, "it is not asked again at once"
    for _ in range(15):
        session = world.grid.fleet.of(a.id)
        assert session is not None
        world.time.now = max(world.time.now, session.refused_until)
        await a.heartbeat()
        await world.settle()
        declined += await _decline_all(a)
    assert declined > 12, "as often as a task may be lost with its node"
    assert (await queries.show_job(world.grid, job_id)).state == "running"
    await world.advance(REFUSAL_S, a)
    assert a.tasks == {}, "the pauses have grown"
    await world.advance(MAX_REFUSAL_S, a)
    assert await world.run_job(job_id) == "completed"
    await assert_every_position_once(world, job_id)


async def test_a_task_that_a_node_declined_goes_to_another_at_once(world: World) -> None:
    a, b = await world.node("a"), await world.node("b")
    await world.job()
    await world.settle()
    declined = a.only_task()
    await _decline_all(a)
    await b.work()
    await world.settle()
    await b.work("evaluate")
    await world.settle()
    async with world.grid.db.read() as tx:
        task = await work.get_task(tx, declined.task_id)
    assert task is not None
    assert task.node_id == b.id
