from __future__ import annotations

import asyncio

import pytest
from sqlalchemy import update

from distribai.core.states import TaskState
from distribai.core.tasks import Progress
from distribai.errors import DistribAIError
from distribai.orchestrator import callers
from distribai.orchestrator.fleet.liveness import flush
from distribai.orchestrator.fleet.queries import list_nodes
from distribai.orchestrator.grpc import serve
from distribai.orchestrator.jobs import queries
from distribai.store import leases
from distribai.store.statements import work
from distribai.store.tables import nodes
from distribai.wire import convert, signing
from distribai.wire.v1 import distribai_pb2 as pb
from tests.orchestrator.harness import FakeNode, World, breathe


@pytest.mark.parametrize(
    ("changes", "code", "retry"),
    [
        ({"protocol": 99}, "protocol.version", False),
        ({"signature": b"x" * 64}, "node.key", False),
        ({"public_key": b"short"}, "node.key", False),
        ({"invite": "guessed"}, "node.invite", False),
        ({"intent": "sleep"}, "protocol.malformed", True),
    ],
)
async def test_a_registration_that_does_not_fit_is_refused(
    world: World, changes: dict[str, object], code: str, retry: bool
) -> None:
    node = FakeNode(world, "a")
    await node.connect(**changes)
    assert node.end is not None
    assert (node.end.code, node.end.retry) == (code, retry)
    assert await list_nodes(world.grid) == ()


async def test_a_node_without_devices_is_refused(world: World) -> None:
    node = FakeNode(world, "a", devices=0)
    await node.connect()
    assert node.end is not None
    assert node.end.code == "protocol.malformed"


async def test_a_stream_that_does_not_begin_with_a_registration_is_ended(world: World) -> None:
    async def incoming():  # type: ignore[no-untyped-def]
        yield pb.NodeMessage(heartbeat=pb.Heartbeat())

    answers = [m async for m in serve(world.grid, incoming())]
    assert [m.WhichOneof("body") for m in answers] == ["challenge", "session_end"]


async def test_a_signature_for_one_challenge_is_worth_nothing_for_the_next(world: World) -> None:
    node = await world.node("a")
    stolen = pb.RegisterSession(
        protocol=1, public_key=node.public, signature=b"\0" * 64, invite=world.invite
    )

    async def incoming():  # type: ignore[no-untyped-def]
        yield pb.NodeMessage(register=stolen)

    answers = [m async for m in serve(world.grid, incoming())]
    assert answers[-1].session_end.code == "node.key"


async def test_a_known_key_needs_no_invite(world: World) -> None:
    node = await world.node("a")
    await node.vanish()
    await node.connect(invite="")
    assert node.end is None
    (record,) = await list_nodes(world.grid)
    assert (record.name, record.liveness) == ("a", "online")


async def test_the_newest_session_of_a_key_fences_the_older(world: World) -> None:
    first = await world.node("a")
    old_token = first.token
    second = FakeNode(world, "a again", key=first.key)
    world.nodes.append(second)
    await second.connect()
    await breathe()
    assert first.end is not None
    assert (first.end.code, first.end.retry) == ("node.fenced", False)
    assert (await callers.verify_token(world.grid, second.token)).node_id == first.id
    with pytest.raises(DistribAIError) as caught:
        await callers.verify_token(world.grid, old_token)
    assert caught.value.code == "auth.invalid"


async def test_a_broken_stream_loses_nothing_in_either_direction(world: World) -> None:
    a = await world.node("a")
    await a.vanish()
    await world.job()
    await world.settle()
    assert a.tasks == {}
    await a.connect()
    assert a.register_ack is not None
    assert a.register_ack.resumed
    task = a.only_task()
    await a.vanish()
    # The result is numbered while nobody listens, and sent again after the reconnect.
    outcome = await a.outcome(task)
    message = pb.NodeMessage(
        task_result=convert.outcome_to_wire(outcome, signing.sign_outcome(a.key, outcome))
    )
    a.channel.number(message)
    await a.connect()
    await a.taken_in()
    await world.settle()
    assert [ack.counted for ack in a.acks] == [True]


async def test_a_result_is_not_lost_when_the_stream_breaks_while_it_is_dealt_with(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    a = await world.node("a")
    await world.job()
    await world.settle()
    outcome = await a.outcome(a.only_task())
    began = asyncio.Event()

    async def stuck(*_: object) -> None:
        began.set()
        await asyncio.Event().wait()

    with monkeypatch.context() as patch:
        patch.setattr("distribai.orchestrator.grpc.take_result", stuck)
        message = pb.NodeMessage(
            task_result=convert.outcome_to_wire(outcome, signing.sign_outcome(a.key, outcome))
        )
        message.seq = a.channel.number(message)
        a.queue.put_nowait(message)
        await asyncio.wait_for(began.wait(), 20)
        await a.vanish()
    await a.connect()
    await a.taken_in()
    await world.settle()
    assert [ack.counted for ack in a.acks] == [True]


async def test_a_number_that_leaves_a_gap_ends_the_stream(world: World) -> None:
    a = await world.node("a")
    a.channel.number(pb.NodeMessage())  # "sent", but lost without a trace
    await a.heartbeat()
    message = pb.NodeMessage(task_accept=pb.TaskAccept(task_id="t", attempt=1), seq=7)
    a.queue.put_nowait(message)
    await breathe()
    assert a.end is not None
    assert a.end.code == "protocol.sequence"
    assert a.end.retry


async def test_a_message_that_is_malformed_ends_the_stream(world: World) -> None:
    a = await world.node("a")
    a.queue.put_nowait(pb.NodeMessage(task_result=pb.TaskResult(status="maybe")))
    await breathe()
    assert a.end is not None
    assert a.end.code == "protocol.malformed"


async def test_a_banned_node_loses_its_stream_its_token_and_its_way_back(world: World) -> None:
    a = await world.node("a")
    async with world.grid.db.write() as tx:
        await tx.run(update(nodes).values(standing="banned"))
    await a.heartbeat()
    await world.settle()
    assert a.end is not None
    assert a.end.code == "node.banned"
    with pytest.raises(DistribAIError) as caught:
        await callers.verify_token(world.grid, a.token)
    assert caught.value.code == "auth.forbidden"
    await a.connect()
    assert a.end is not None
    assert not a.end.retry


async def test_silence_makes_a_node_degraded_and_then_offline(world: World) -> None:
    a = await world.node("a")
    await world.settle()
    await a.vanish()
    seen = []
    for _ in range(6):
        await world.advance(10)
        seen.append((await list_nodes(world.grid))[0].liveness)
    assert seen == ["online", "online", "degraded", "degraded", "offline", "offline"]
    await a.connect()
    assert (await list_nodes(world.grid))[0].liveness == "online"


async def test_a_draining_node_keeps_what_it_does_and_gets_nothing_new(world: World) -> None:
    a = await world.node("a")
    job_id = await world.job()
    await world.settle()
    await a.heartbeat(intent="drain")
    await a.work("train")
    await world.settle()
    assert a.acks[-1].counted
    assert a.tasks == {}
    await a.leave()
    (record,) = await list_nodes(world.grid)
    assert (record.liveness, record.intent) == ("offline", "drain")
    assert (await queries.show_job(world.grid, job_id)).version == 1


async def test_a_node_that_drains_before_it_began_gives_its_task_to_others(world: World) -> None:
    a, b = await world.node("a"), await world.node("b")
    job_id = await world.job()
    await world.settle()
    lost = a.only_task()
    a.tasks.clear()  # the assignment was on its way when the node was told to finish
    await b.work()
    await a.heartbeat(intent="drain")
    await world.settle()
    await b.work()
    await world.settle()
    tasks = {t.id: t for t in (await queries.list_tasks(world.grid, job_id)).items}
    assert tasks[lost.task_id].attempt == 2
    assert tasks[lost.task_id].node_id == b.id


async def test_a_node_may_refuse_a_task_that_it_cannot_run(world: World) -> None:
    a, b = await world.node("a"), await world.node("b")
    await world.job(workers_max=1)
    await world.settle()
    (first,) = [n for n in (a, b) if any(t.phase == "train" for t in n.tasks.values())]
    other = b if first is a else a
    await other.work()
    refused = first.only_task()
    accept = pb.TaskAccept(
        task_id=refused.task_id, attempt=refused.attempt, accepted=False, reason="no disk"
    )
    await first.send(pb.NodeMessage(task_accept=accept), reliable=True)
    await world.settle()
    assert other.only_task().task_id == refused.task_id


async def test_a_paused_node_gets_no_work(world: World) -> None:
    a = await world.node("a")
    await a.heartbeat(intent="pause")
    await world.settle()
    job_id = await world.job()
    await world.settle()
    assert a.tasks == {}
    assert "0 of at least 1" in (await queries.show_job(world.grid, job_id)).waiting_for
    await a.heartbeat(intent="contribute")
    await world.settle()
    assert a.tasks


async def test_progress_logs_and_bytes_of_a_node_are_kept(world: World) -> None:
    a = await world.node("a")
    job_id = await world.job()
    await world.settle()
    task = a.only_task()
    progress = pb.TaskProgress(
        task_id=task.task_id, attempt=1, step=1, steps=2, loss=4.5, tokens_per_s=99.0
    )
    await a.send(pb.NodeMessage(task_progress=progress))
    line = pb.LogMessage(level="warning", message="hot", task_id=task.task_id, fields={"c": "90"})
    await a.send(pb.NodeMessage(log=line))
    await a.heartbeat(bytes_up=1000, bytes_down=10)
    record = await queries.show_job(world.grid, job_id)
    assert record.round is not None
    assert (record.round.mean_loss, record.round.tokens_per_s) == (4.5, 99.0)
    assert record.round.step == 1.0
    await world.settle()
    await a.heartbeat(bytes_up=1500, bytes_down=20)
    await world.settle()
    (log,) = [x for x in await queries.list_logs(world.grid, job_id) if x.node_id == a.id]
    assert (log.level, log.message, log.fields) == ("warning", "hot", {"c": "90"})
    (node,) = await list_nodes(world.grid)
    assert (node.bytes_up, node.bytes_down) == (1500, 20)
    async with world.grid.db.read() as tx:
        (row,) = await work.tasks_in(tx, (TaskState.LEASED,))
    assert row.progress["step"] == 1


async def test_bytes_that_an_earlier_session_told_of_are_not_counted_again(world: World) -> None:
    a = await world.node("a")
    await a.heartbeat(bytes_up=1000, bytes_down=100)
    await world.settle()
    world = await world.restart()
    again = FakeNode(world, "a", key=a.key)
    again.session = a.session
    world.nodes.append(again)
    await again.connect()
    await again.heartbeat(bytes_up=1000, bytes_down=100)
    await world.settle()
    await again.heartbeat(bytes_up=1200, bytes_down=150)
    await world.settle()
    (node,) = await list_nodes(world.grid)
    assert (node.bytes_up, node.bytes_down) == (1200, 150)
    await world.close()


async def test_progress_that_ends_while_it_is_written_hurts_nothing(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    node = await world.node("a")
    session = world.grid.fleet.of(node.id)
    assert session is not None
    session.progress = {f"task_{i}": Progress(f"task_{i}", 1, 1, 10, 2.0, 1.0) for i in range(3)}
    session.heard = True
    written = []

    async def write(_tx: object, reports: list[dict[str, str]]) -> None:
        session.progress.clear()  # the results came in meanwhile
        written.extend(report["task"] for report in reports)

    monkeypatch.setattr(leases, "write_progress", write)
    await flush(world.grid)
    assert written == ["task_0", "task_1", "task_2"]
