"""A node cannot act for another: it names another's task, attempt, session and key in every message
that there is, and nothing of the other's changes."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from sqlalchemy import select

from distribai.core.spec import BlobRef, DataSpec
from distribai.core.tasks import Assignment
from distribai.orchestrator.jobs import queries
from distribai.store.statements import work
from distribai.store.tables import jobs, logs, rounds, submissions, tasks
from distribai.wire import convert, signing
from distribai.wire.v1 import distribai_pb2 as pb
from tests.orchestrator.harness import FakeNode, World

ITS_OWN = ("lease_until", "progress")
"""What the victim's own heartbeats move."""


async def state(world: World) -> dict[str, Any]:
    """Everything about jobs, rounds and tasks, but how far a task is."""
    found: dict[str, Any] = {}
    async with world.grid.db.read() as tx:
        for table in (jobs, rounds, tasks, submissions, logs):
            rows = await tx.all(select(table).order_by(*table.primary_key.columns))
            found[table.name] = [
                {k: v for k, v in r._mapping.items() if k not in ITS_OWN} for r in rows
            ]
    return found


def in_hand(task: Assignment) -> list[pb.TaskInHand]:
    return [pb.TaskInHand(task_id=task.task_id, attempt=task.attempt)]


async def result(thief: FakeNode, victim: FakeNode, task: Assignment, key: FakeNode) -> Any:
    outcome = await victim.outcome(task)
    signature = signing.sign_outcome(key.key, outcome)
    return pb.NodeMessage(task_result=convert.outcome_to_wire(outcome, signature))


async def failure(thief: FakeNode, task: Assignment) -> Any:
    outcome = replace(
        await thief.outcome(task), status="failed", delta=None, samples=(), error_code="task.failed"
    )
    signature = signing.sign_outcome(thief.key, outcome)
    return pb.NodeMessage(task_result=convert.outcome_to_wire(outcome, signature))


async def messages(
    thief: FakeNode, victim: FakeNode, task: Assignment
) -> dict[str, list[pb.NodeMessage]]:
    """By the name of the message: all ways to name the victim's task in it."""
    name = {"task_id": task.task_id, "attempt": task.attempt}
    return {
        "register": [],  # a stream of its own: below
        "heartbeat": [
            pb.NodeMessage(heartbeat=pb.Heartbeat(tasks=in_hand(task))),
            pb.NodeMessage(heartbeat=pb.Heartbeat(held_versions={task.job_id: 99})),
        ],
        "task_accept": [
            pb.NodeMessage(task_accept=pb.TaskAccept(**name, accepted=True)),
            pb.NodeMessage(task_accept=pb.TaskAccept(**name, accepted=False, reason="x")),
        ],
        "task_progress": [
            pb.NodeMessage(task_progress=pb.TaskProgress(**name, step=1, steps=2, loss=0.1))
        ],
        "task_result": [
            await result(thief, victim, task, thief),
            await result(thief, victim, task, victim),
            await failure(thief, task),
        ],
        "log": [
            pb.NodeMessage(log=pb.LogMessage(level="error", message="forged", task_id=task.task_id))
        ],
    }


async def test_no_message_about_another_s_task_changes_anything(any_world: World) -> None:
    world = any_world
    job_id = await world.job(workers_max=1)
    victim = await world.node("victim")
    task = await victim.next_training()
    await world.node("evaluates")
    await world.settle()
    thief = await world.node("thief")
    await world.settle()
    told = await messages(thief, victim, task)
    assert told.keys() == {f.name for f in pb.NodeMessage.DESCRIPTOR.oneofs[0].fields}
    before = await state(world)
    for kind, all_of_them in told.items():
        for message in all_of_them:
            await thief.send(message, reliable=kind == "task_result")
            await world.settle()
            assert await state(world) == before, (kind, message)
            if thief.end is not None:
                await thief.connect()
    assert not [a for a in thief.acks if a.counted]
    assert thief.tasks == {}
    async with world.grid.db.read() as tx:
        row = await work.get_task(tx, task.task_id)
    assert row is not None
    assert (row.node_id, row.attempt, row.progress) == (victim.id, task.attempt, None)
    await victim.report(await victim.outcome(task))
    await world.settle()
    assert [a.counted for a in victim.acks if a.task_id == task.task_id] == [True]
    assert (await queries.show_job(world.grid, job_id)).version >= 1


async def test_a_registration_takes_neither_another_s_task_nor_its_session(
    any_world: World,
) -> None:
    world = any_world
    await world.job(workers_max=1)
    victim = await world.node("victim")
    task = await victim.next_training()
    await world.node("evaluates")
    await world.settle()
    session = world.grid.fleet.of(victim.id)
    assert session is not None
    before = await state(world)
    thief = FakeNode(world, "thief")
    world.nodes.append(thief)
    await thief.connect(tasks=in_hand(task), resume_session=session.id, received=0)
    ack = thief.register_ack
    assert ack is not None
    assert (ack.resumed, list(ack.keep)) == (False, [])
    assert [t.task_id for t in ack.drop] == [task.task_id]
    await world.settle()
    assert await state(world) == before
    assert world.grid.fleet.of(victim.id) is session
    # Nor does the victim's key without its signature.
    forger = FakeNode(world, "forger")
    world.nodes.append(forger)
    await forger.connect(public_key=victim.public)
    assert forger.end is not None
    assert forger.end.code == "node.key"
    assert await state(world) == before
    assert world.grid.fleet.of(victim.id) is session


async def test_not_even_a_task_that_waits_for_its_node_goes_to_another(any_world: World) -> None:
    world = any_world
    await world.job(workers_max=1)
    victim = await world.node("victim")
    task = await victim.next_training()
    await victim.vanish()
    world.grid.fleet.drop(world.grid.fleet.of(victim.id))  # type: ignore[arg-type]
    await world.advance(world.grid.settings.liveness.offline_s + 10)
    thief = FakeNode(world, "thief")
    world.nodes.append(thief)
    await thief.connect(tasks=in_hand(task))
    assert thief.register_ack is not None
    assert [t.task_id for t in thief.register_ack.drop] == [task.task_id]


async def test_a_report_of_what_a_node_never_had_tells_it_nothing(any_world: World) -> None:
    world = any_world
    await world.job(workers_max=1)
    victim = await world.node("victim")
    task = await victim.next_training()
    thief = await world.node("thief")
    outcome = await victim.outcome(task)
    heard = []
    for task_id in (task.task_id, "task_aaaaaaaaaaaaaaaa"):
        named = replace(outcome, task_id=task_id)
        await thief.report(named)
        await world.settle()
        heard.append(thief.acks[-1].reason.replace(task_id, "*"))
    await victim.report(outcome)
    await world.settle()
    assert victim.acks[-1].counted
    await thief.report(outcome)
    await world.settle()
    heard.append(thief.acks[-1].reason.replace(task.task_id, "*"))
    assert len(set(heard)) == 1
    assert {a.code for a in thief.acks} == {"task.not_held"}


async def test_lines_that_say_why_an_attempt_failed_are_kept_though_another_has_the_task(
    world: World,
) -> None:
    job_id = await world.job(workers_max=1)
    a, b = await world.node("a"), await world.node("b")
    for _ in range(3):
        await world.settle()
        for node in (a, b):
            await node.work("evaluate")
    (failing,) = [n for n in (a, b) if n.tasks]
    (other,) = [n for n in (a, b) if n is not failing]
    task = failing.only_task()
    await failing.fail(task, "node.child", "it died")
    await world.duties.settle()
    assert other.tasks.keys() == {task.task_id}
    line = pb.LogMessage(level="error", message="the last words", task_id=task.task_id)
    await failing.send(pb.NodeMessage(log=line))
    await world.settle()
    told = await queries.list_logs(world.grid, job_id)
    assert "the last words" in [entry.message for entry in told]


async def test_a_result_that_names_another_s_file_tells_no_more_than_one_that_names_none(
    world: World,
) -> None:
    secret = await world.grid.blobs.put_bytes(b"a line of somebody's text\n" * 400)
    await world.job(data=DataSpec(source="blobs", files=(secret,), held_out=0.1), max_attempts=9)
    node = await world.node("a")
    told = set()
    wrong_size = replace(secret, size=secret.size + 1)
    for named in (secret, wrong_size, BlobRef("0" * 64, secret.size)):
        task = await node.next_training()
        await node.report(replace(await node.outcome(task), delta=named))
        await world.settle()
        ack = node.acks[-1]
        told.add((ack.code, ack.reason.replace(named.sha256[:12], "*")))
        await world.advance(60, node)
    assert len(told) == 1
    assert "blob.unknown" in told.pop()[1]


async def test_lines_about_the_own_task_are_kept_a_while_longer_than_the_task(
    world: World,
) -> None:
    job_id = await world.job(workers_max=1)
    node = await world.node("a")
    task = await node.next_training()

    said = []

    async def say(words: str) -> None:
        said.append(words)
        line = pb.LogMessage(level="info", message=words, task_id=task.task_id)
        await node.send(pb.NodeMessage(log=line))
        await world.settle()

    async def kept() -> list[str]:
        told = await queries.list_logs(world.grid, job_id)
        return [line.message for line in told if line.message in said]

    await say("at work")
    await node.report(await node.outcome(task))
    await world.settle()
    await say("just after")
    assert await kept() == ["at work", "just after"]
    world.time.now += 120
    await say("long after")
    assert await kept() == ["at work", "just after"]
