"""What a node may say that no honest one does: nothing of it harms anybody but the node itself."""

from __future__ import annotations

import asyncio
import dataclasses
import math
from typing import Any

import pytest

from distribai.core.spec import BlobRef
from distribai.core.tasks import Assignment
from distribai.orchestrator import callers
from distribai.orchestrator.fleet.queries import list_nodes
from distribai.orchestrator.jobs import queries
from distribai.orchestrator.limits import Limits
from distribai.sections import LimitSettings
from distribai.store.statements import work
from distribai.wire import convert, signing
from distribai.wire.v1 import distribai_pb2 as pb
from tests.orchestrator.harness import FakeNode, World, breathe

HUGE = 2**64 - 1


async def refused(world: World, name: str, message: pb.NodeMessage) -> str:
    """Join, say ``message``, let every duty run; the code that ended the session, if one did."""
    node = await world.node(name)
    await node.send(message)
    await world.settle()
    return node.end.code if node.end is not None else ""


def beat(**fields: Any) -> pb.NodeMessage:
    return pb.NodeMessage(heartbeat=pb.Heartbeat(**fields))


async def evaluation(world: World, node: FakeNode) -> Assignment:
    """The next evaluation that comes to the node."""
    for _ in range(5):
        await world.settle()
        for task in node.tasks.values():
            if task.phase == "evaluate":
                return task
        await node.work("train")
    raise AssertionError("no evaluation comes")


async def test_nothing_that_a_node_says_stops_the_duties(any_world: World) -> None:
    world = any_world
    job_id = await world.job()
    many = [pb.TaskInHand(task_id=f"task_{i}", attempt=1) for i in range(10_000)]
    hand = pb.TaskInHand(task_id="task_x", attempt=2**32 - 1)
    accept = pb.TaskAccept(task_id="task_x", attempt=2**32 - 1, accepted=True)
    log = pb.LogMessage(level="\0", message="a\0b", task_id="t\0", fields={"\0": "\0"})
    result = pb.TaskResult(task_id="t\0", attempt=1, status="done")
    messages = {
        "many tasks": (beat(tasks=many), "protocol.malformed"),
        "huge attempt": (beat(tasks=[hand]), "protocol.malformed"),
        "zero in an id": (
            beat(tasks=[pb.TaskInHand(task_id="t\0", attempt=1)]),
            "protocol.malformed",
        ),
        "huge bytes": (beat(bytes_up=HUGE, bytes_down=HUGE), ""),
        "many versions": (
            beat(held_versions={f"job_{i}": HUGE for i in range(5000)}),
            "protocol.malformed",
        ),
        "foreign accept": (pb.NodeMessage(task_accept=accept), "protocol.malformed"),
        "zero bytes in a log": (pb.NodeMessage(log=log), "protocol.malformed"),
        "odd log": (pb.NodeMessage(log=pb.LogMessage(level="loud", message="a\0\x1b[2J")), ""),
        "zero bytes in a result": (pb.NodeMessage(task_result=result), "protocol.malformed"),
        "a second registration": (
            pb.NodeMessage(register=pb.RegisterSession()),
            "protocol.malformed",
        ),
        "nothing": (pb.NodeMessage(), "protocol.malformed"),
    }
    found = {name: await refused(world, name, m) for name, (m, _) in messages.items()}
    assert found == {name: code for name, (_, code) in messages.items()}
    assert (await queries.show_job(world.grid, job_id)).state in ("queued", "running")


async def test_ten_thousand_accepts_leave_nothing_behind(world: World) -> None:
    node = await world.node("a")
    world.grid.limits = Limits(LimitSettings(messages_per_s=0.0), world.time)
    for i in range(2000):
        body = pb.TaskAccept(task_id=f"task_{i}", attempt=1, accepted=True)
        node.queue.put_nowait(pb.NodeMessage(task_accept=body))
    await node.taken_in()
    await world.settle()
    session = world.grid.fleet.of(node.id)
    assert session is not None
    assert session.in_hand == {}


@pytest.mark.parametrize(
    "changes",
    [
        {"tasks": [pb.TaskInHand(task_id=f"task_{i}", attempt=1) for i in range(10_000)]},
        {"devices": [pb.Device(index=2**32 - 1, type="cpu")]},
        {"devices": [pb.Device(type="cpu", memory_mb=HUGE)]},
    ],
)
async def test_a_registration_beyond_all_bounds_is_refused(
    any_world: World, changes: dict[str, Any]
) -> None:
    node = FakeNode(any_world, "a")
    any_world.nodes.append(node)
    await node.connect(**changes)
    assert node.end is not None
    assert node.end.code == "protocol.malformed"
    assert await list_nodes(any_world.grid) == ()


async def test_names_are_cut_and_cannot_steer_a_terminal(any_world: World) -> None:
    node = await any_world.node("a\0\x1b[2J\nb" + "x" * 1_000_000)
    assert node.end is None
    (record,) = await list_nodes(any_world.grid)
    assert record.name.isprintable()
    assert len(record.name) == 100


async def test_figures_that_no_column_holds_are_refused(any_world: World) -> None:
    world = any_world
    await world.job()
    node = await world.node("a")
    task = await evaluation(world, node)
    honest = await node.outcome(task)
    for spoiled in (
        {"tokens": HUGE},
        {"steps": 2**32 - 1},
        {"delta": BlobRef("0" * 64, HUGE)},
        {"base_hash": "\0"},
    ):
        outcome = dataclasses.replace(honest, **spoiled)
        signature = signing.sign_outcome(node.key, outcome)
        message = convert.outcome_to_wire(outcome, signature)
        await node.send(pb.NodeMessage(task_result=message))
        await world.settle()
        assert node.end is not None, spoiled
        assert node.end.code == "protocol.malformed"
        await node.connect()
    # What a column holds, but an evaluation cannot have done, is rejected.
    await node.report(dataclasses.replace(honest, tokens=7))
    await world.settle()
    assert node.acks[-1].code == "task.rejected"


async def test_a_reason_of_megabytes_is_cut(any_world: World) -> None:
    world = any_world
    job_id = await world.job()
    node = await world.node("a")
    task = await evaluation(world, node)
    await node.fail(task, "not a code\0" * 100, "x\0y" * 500_000)
    await world.settle()
    (found,) = [t for t in (await queries.list_tasks(world.grid, job_id)).items if t.causes]
    assert found.causes[0].code == "task.failed"
    assert len(found.causes[0].reason) <= 2000
    assert "\0" not in found.causes[0].reason


async def test_impossible_progress_is_shown_as_none(world: World) -> None:
    job_id = await world.job()
    node = await world.node("a")
    task = await node.next_training()
    for loss, speed in ((math.inf, math.inf), (-math.inf, math.nan), (math.nan, -1.0)):
        body = pb.TaskProgress(
            task_id=task.task_id, attempt=task.attempt, step=1, loss=loss, tokens_per_s=speed
        )
        await node.send(pb.NodeMessage(task_progress=body))
        await node.heartbeat()
        await world.settle()
        (record,) = [
            t for t in (await queries.list_tasks(world.grid, job_id)).items if t.id == task.task_id
        ]
        assert (record.loss, record.tokens_per_s) == (None, 0.0)


async def test_a_round_done_in_no_time_at_all_breaks_no_later_round(world: World) -> None:
    job_id = await world.job()
    for name in ("a", "b"):
        await world.node(name)
    for _ in range(60):
        await world.settle()
        if (await queries.show_job(world.grid, job_id)).state == "completed":
            break
        for node in world.nodes:
            for task in list(node.tasks.values()):
                outcome = await node.outcome(task)
                metrics = {**outcome.metrics, "seconds": 5e-324}
                await node.report(dataclasses.replace(outcome, metrics=metrics))
    assert (await queries.show_job(world.grid, job_id)).state == "completed"


async def test_a_flood_of_long_lines_is_cut_and_counted(world: World) -> None:
    node = await world.node("a")
    line = pb.LogMessage(
        level="info", message="m" * 1_000_000, fields={f"f{i}": "v" * 9999 for i in range(99)}
    )
    for _ in range(50):
        node.queue.put_nowait(pb.NodeMessage(log=line))
    await node.taken_in()
    kept = sum(
        len(e.message) + sum(len(k) + len(v) for k, v in e.fields.items())
        for e in world.grid.fleet.logs
    )
    assert 0 < kept < 2_000_000
    await world.settle()
    assert node.end is None


async def test_a_store_that_is_away_rejects_nobody(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    from distribai.errors import Unavailable

    await world.job()
    node = await world.node("a")
    task = await node.next_training()
    await node.report(await node.outcome(task))

    def away(ref: BlobRef) -> Any:
        raise Unavailable("blob.store", "The blob store is away.")

    with monkeypatch.context() as patch:
        patch.setattr(world.grid.blobs, "local", away)
        with pytest.raises(Unavailable):
            await world.settle()
    async with world.grid.db.read() as tx:
        found = await work.get_task(tx, task.task_id)
    assert found is not None
    assert found.state == "verifying"
    await world.settle()
    assert [a.counted for a in node.acks if a.task_id == task.task_id] == [True]


async def test_a_signature_of_another_result_counts_for_nothing(world: World) -> None:
    await world.job()
    node = await world.node("a")
    task = await node.next_training()
    outcome = await node.outcome(task)
    other = signing.sign_outcome(node.key, dataclasses.replace(outcome, steps=1))
    message = pb.NodeMessage(task_result=convert.outcome_to_wire(outcome, other))
    await node.send(message, reliable=True)
    await world.settle()
    assert node.acks[-1].code == "node.key"


async def test_two_streams_of_one_key_at_once_leave_one_session_that_works(world: World) -> None:
    await world.job()
    first = FakeNode(world, "a")
    others = [FakeNode(world, "a", key=first.key) for _ in range(5)]
    for node in (first, *others):
        world.nodes.append(node)
    await asyncio.gather(*(node.connect() for node in (first, *others)))
    await world.settle()
    alive = [node for node in world.nodes if node.end is None]
    assert len(alive) == 1
    session = world.grid.fleet.of(first.id)
    assert session is not None
    assert session.id == alive[0].session
    assert (await callers.verify_token(world.grid, alive[0].token)).node_id == first.id
    assert alive[0].tasks


async def test_a_session_forgotten_while_it_comes_back_is_no_deaf_one(world: World) -> None:
    node = await world.node("a")
    await node.vanish()
    session = world.grid.fleet.of(node.id)
    assert session is not None
    async with world.grid.db.write():
        coming = asyncio.create_task(node.connect())
        await breathe()
        world.grid.fleet.drop(session)  # as the sweep does
    await coming
    await world.job()
    await world.settle()
    assert node.end is None
    assert node.tasks
