"""The link against an orchestrator in memory: every way a connection can end."""

from __future__ import annotations

import asyncio
import random
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any

import pytest
import structlog
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
from hypothesis import given, settings
from hypothesis import strategies as st

from distribai.core.devices import Device, TaskInHand
from distribai.core.states import Intent
from distribai.errors import Conflict, DistribAIError, NotAllowed, ProtocolMismatch
from distribai.node.identity import Identity
from distribai.node.link import HINT_EVERY_S, UNRELIABLE_WAITING, Hello, Link
from distribai.node.transport import Connection, ConnectionLost
from distribai.testing.clock import FakeClock, settle
from distribai.testing.link import MemoryTransport
from distribai.wire.joinlink import JoinLink
from distribai.wire.v1 import distribai_pb2 as pb
from tests.node.helpers import GRID, NoJitter, Peer

IDENTITY = Identity(Ed25519PrivateKey.from_private_bytes(bytes(32)))
JOIN = JoinLink("h", "127.0.0.1:1", "127.0.0.1:2", GRID, "inv_1")


class Recorder:
    """A handler that writes down what it is told."""

    def __init__(self) -> None:
        self.got: list[pb.OrchestratorMessage] = []
        self.acks: list[pb.RegisterAck] = []
        self.losses: list[tuple[str, str]] = []
        self.beats = 0

    def hello(self) -> Hello:
        return Hello(
            "box", "test/1", [Device(0, "cpu")], [TaskInHand("task_a", 1)], ["ab"], Intent.PAUSE
        )

    def heartbeat(self) -> pb.Heartbeat:
        self.beats += 1
        return pb.Heartbeat(uptime_s=self.beats)

    def registered(self, ack: pb.RegisterAck) -> None:
        self.acks.append(ack)

    def received(self, message: pb.OrchestratorMessage) -> None:
        self.got.append(message)

    def unreachable(self, why: str, hint: str) -> None:
        self.losses.append((why, hint))


class Setup:
    """A link that runs, and the other side of it."""

    def __init__(self, rng: random.Random | None = None) -> None:
        self.clock = FakeClock()
        self.transport = MemoryTransport()
        self.handler = Recorder()
        self.peer = Peer()
        self.link = Link(
            JOIN, self.transport, IDENTITY, self.handler, self.clock, rng or NoJitter()
        )
        self.running: asyncio.Task[None] = asyncio.ensure_future(self.link.run())

    async def connect(self, **kw: Any) -> Any:
        stream = await self.transport.accept()
        await self.peer.welcome(stream, **kw)
        await settle()
        return stream

    async def stop(self) -> None:
        self.running.cancel()
        await asyncio.wait({self.running})


@pytest.fixture
async def setup() -> AsyncIterator[Setup]:
    made = Setup()
    yield made
    await made.stop()


async def test_a_node_registers_with_all_that_it_is(setup: Setup) -> None:
    stream = await setup.transport.accept()
    register = await setup.peer.welcome(stream)
    assert register.public_key == IDENTITY.public_key
    assert (register.protocol, register.invite, register.name) == (1, "inv_1", "box")
    assert register.devices[0].type == "cpu"
    assert register.tasks[0].task_id == "task_a"
    assert (list(register.blobs), register.intent) == (["ab"], "pause")
    assert register.resume_session == ""
    await settle()
    assert setup.link.session_token == "token-1"
    assert setup.link.node_id == "node_x"
    assert setup.link.bytes_up > 0
    assert setup.link.bytes_down > 0


class Nobody:
    """A transport by which nobody is reached."""

    def __init__(self, hint: str = "") -> None:
        self.hint = hint

    async def connect(self) -> Connection:
        raise ConnectionLost("nothing listens at 127.0.0.1:1", self.hint)


async def test_who_finds_nobody_is_told_what_to_try_and_where_it_tried() -> None:
    clock, handler = FakeClock(), Recorder()
    link = Link(JOIN, Nobody(), IDENTITY, handler, clock, NoJitter())
    with structlog.testing.capture_logs() as lines:
        running = asyncio.ensure_future(link.run())
        while len(lines) < 4:
            await settle()
            await clock.advance(1.0)
        running.cancel()
        await asyncio.wait({running})
    assert {line["reason"] for line in lines} == {"nothing listens at 127.0.0.1:1"}
    hints = [line.get("try", "") for line in lines[:4]]
    assert hints[0] == hints[2] == hints[3] == ""
    for word in ("127.0.0.1:1", "127.0.0.1:2", "join link", "firewall"):
        assert word in hints[1]
    assert handler.losses[0] == (lines[0]["reason"], hints[1])
    assert len(handler.losses) == len(lines) - 1, "not at the first failure"


async def test_what_to_try_is_said_again_from_time_to_time_and_fits_the_way_it_failed() -> None:
    clock = FakeClock()
    link = Link(JOIN, Nobody("ask for a new link"), IDENTITY, Recorder(), clock, NoJitter())
    with structlog.testing.capture_logs() as lines:
        running = asyncio.ensure_future(link.run())
        while clock.monotonic() < 3 * HINT_EVERY_S:
            await settle()
            await clock.advance(5.0)
        running.cancel()
        await asyncio.wait({running})
    hints = [line["try"] for line in lines if "try" in line]
    assert set(hints) == {"ask for a new link"}
    assert 3 <= len(hints) <= 4
    assert len(lines) > 10 * len(hints)


async def test_what_to_try_is_said_at_once_when_it_is_something_else() -> None:
    clock, transport = FakeClock(), Nobody("start it")
    link = Link(JOIN, transport, IDENTITY, Recorder(), clock, NoJitter())
    with structlog.testing.capture_logs() as lines:
        running = asyncio.ensure_future(link.run())
        for transport.hint in ("start it", "ask for a new link"):
            before = len(lines)
            while len(lines) < before + 4:
                await settle()
                await clock.advance(1.0)
        running.cancel()
        await asyncio.wait({running})
    assert [line["try"] for line in lines if "try" in line] == ["start it", "ask for a new link"]


async def test_numbered_messages_are_delivered_once(setup: Setup) -> None:
    stream = await setup.connect()
    setup.peer.say(control=pb.ControlMessage(action="pause"))
    stream.say(pb.OrchestratorMessage(seq=1, control=pb.ControlMessage(action="pause")))
    await settle()
    assert [m.control.action for m in setup.handler.got] == ["pause"]


async def test_a_cut_connection_is_resumed_and_loses_nothing(setup: Setup) -> None:
    first = await setup.connect()
    setup.link.send(pb.TaskAccept(task_id="a"))
    setup.link.send(pb.TaskResult(task_id="b"))
    assert (await setup.peer.hear("task_accept")).task_id == "a"
    first.cut()  # the result was on its way
    setup.peer.channel.number(pb.OrchestratorMessage(control=pb.ControlMessage(action="pause")))
    setup.link.send(pb.TaskResult(task_id="c"))
    second = await setup.connect(resume=True)
    assert setup.peer.registered[1].resume_session == "ses_1"
    assert setup.handler.acks[1].resumed
    results = [(await setup.peer.hear("task_result")).task_id for _ in range(2)]
    assert results == ["b", "c"]
    assert [m.control.action for m in setup.handler.got] == ["pause"]
    assert setup.link.session_token == "token-2"
    assert first.closed
    assert not second.closed


async def test_an_orchestrator_that_forgot_the_session_hears_it_all_again(setup: Setup) -> None:
    first = await setup.connect()
    setup.link.send(pb.TaskResult(task_id="a"))
    await setup.peer.hear("task_result")
    first.cut()  # before it was acknowledged
    await setup.connect()
    assert (await setup.peer.hear("task_result")).task_id == "a"
    setup.peer.say(control=pb.ControlMessage(action="pause"))
    await settle()
    assert len(setup.handler.got) == 1
    assert setup.link.unacked() == ()


async def test_an_orderly_end_of_the_stream_is_followed_by_a_new_connection(setup: Setup) -> None:
    (await setup.connect()).say(None)
    await setup.connect(resume=True)


async def test_a_gap_is_healed_by_a_new_connection(setup: Setup) -> None:
    stream = await setup.connect()
    setup.peer.channel.number(pb.OrchestratorMessage(control=pb.ControlMessage(action="pause")))
    setup.peer.say(control=pb.ControlMessage(action="resume"))
    await settle()
    assert stream.closed
    await setup.connect(resume=True)
    assert [m.control.action for m in setup.handler.got] == ["pause", "resume"]


async def test_a_session_that_both_sides_remember_differently_starts_anew(setup: Setup) -> None:
    (await setup.connect()).cut()
    stream = await setup.transport.accept()
    await setup.peer.challenge(stream)
    ack = pb.RegisterAck(session_id="ses_1", resumed=True, received=99)
    stream.say(pb.OrchestratorMessage(register_ack=ack))
    await setup.connect()
    assert setup.peer.registered[2].resume_session == ""


async def test_heartbeats_go_on_their_own_and_follow_the_interval_that_is_asked_for(
    setup: Setup,
) -> None:
    await setup.connect()
    await setup.clock.advance(8.0)
    assert (await setup.peer.hear("heartbeat")).uptime_s == 1
    setup.peer.say(heartbeat_ack=pb.HeartbeatAck(next_s=20.0))
    await settle()
    await setup.clock.advance(8.0)
    assert (await setup.peer.hear("heartbeat")).uptime_s == 2
    await setup.clock.advance(15.9)
    assert setup.handler.beats == 2
    await setup.clock.advance(0.2)
    assert setup.handler.beats == 3


async def test_news_that_cannot_wait_make_a_heartbeat_at_once(setup: Setup) -> None:
    await setup.connect()
    setup.link.beat()
    assert (await setup.peer.hear("heartbeat")).uptime_s == 1


async def test_a_new_token_takes_the_old_one_s_place_and_the_session_goes_on(
    setup: Setup,
) -> None:
    await setup.connect()
    assert setup.link.session_token == "token-1"
    setup.peer.say(session_token=pb.SessionToken(token="fresh"))
    await settle()
    assert setup.link.session_token == "fresh"
    assert setup.handler.got == [], "it is the link's own affair"
    assert len(setup.handler.acks) == 1


async def test_a_heartbeat_acknowledges_what_was_received(setup: Setup) -> None:
    await setup.connect()
    setup.peer.say(control=pb.ControlMessage(action="pause"))
    await settle()
    setup.link.beat()
    await setup.peer.hear("heartbeat")
    assert setup.peer.channel.unacked() == ()


async def test_a_farewell_is_heard_before_the_stream_ends(setup: Setup) -> None:
    stream = await setup.connect()
    leaving = asyncio.ensure_future(setup.link.farewell())
    assert (await setup.peer.hear("heartbeat")).uptime_s == 1
    await settle()
    assert stream.ended
    assert not leaving.done()
    stream.say(None)
    await leaving
    await setup.running


async def test_without_a_connection_there_is_nobody_to_say_farewell_to(setup: Setup) -> None:
    await setup.link.farewell()


async def test_silence_of_three_heartbeats_is_a_lost_connection(setup: Setup) -> None:
    stream = await setup.connect()
    await setup.clock.advance(30.0)
    assert not stream.closed
    await setup.clock.advance(10.0)
    assert stream.closed
    await setup.connect(resume=True)


async def test_an_orchestrator_that_says_nothing_at_first_is_given_up(setup: Setup) -> None:
    silent = await setup.transport.accept()
    await settle()
    await setup.clock.advance(31.0)
    assert silent.closed
    await setup.connect()


async def test_lost_connections_are_retried_with_growing_random_waits() -> None:
    setup = Setup(random.Random(3))
    setup.transport.refuse = True
    expected = random.Random(3)
    await settle()
    for bound in (0.5, 1.0, 2.0, 4.0, 8.0, 16.0, 30.0, 30.0):
        wait = expected.uniform(0, bound)
        await setup.clock.advance(wait - 1e-6)
        assert setup.clock.sleeping == 1
        await setup.clock.advance(2e-6)
    setup.transport.refuse = False
    await setup.clock.advance(30.0)
    await setup.connect()
    await setup.stop()


async def test_waits_start_small_again_after_a_healthy_connection() -> None:
    class Highest(random.Random):
        def uniform(self, a: float, b: float) -> float:
            return b

    setup = Setup(Highest())
    setup.transport.refuse = True
    await settle()
    await setup.clock.advance(3.5)
    setup.transport.refuse = False
    await setup.clock.advance(4.0)
    stream = await setup.connect()
    setup.peer.say(heartbeat_ack=pb.HeartbeatAck())
    await settle()
    stream.cut()
    await settle()
    await setup.clock.advance(0.5)
    await setup.connect(resume=True)
    await setup.stop()


Act = Callable[[Setup, Any], Awaitable[None]]


async def says_end(setup: Setup, stream: Any, **end: Any) -> None:
    stream.say(pb.OrchestratorMessage(session_end=pb.SessionEnd(message="No.", **end)))


async def fences(setup: Setup, stream: Any) -> None:
    await setup.peer.welcome(stream)
    await says_end(setup, stream, code="node.fenced", retry=True)


async def refuses_the_invite(setup: Setup, stream: Any) -> None:
    await setup.peer.challenge(stream)
    await says_end(setup, stream, code="node.invite")


async def refuses_and_hangs_up(setup: Setup, stream: Any) -> None:
    await says_end(setup, stream, code="node.key")
    stream.cut()


async def speaks_another_version(setup: Setup, stream: Any) -> None:
    stream.say(
        pb.OrchestratorMessage(
            challenge=pb.Challenge(grid_id=GRID, nonce=b"n", protocol_min=7, protocol_max=9)
        )
    )


async def is_another_grid(setup: Setup, stream: Any) -> None:
    stream.say(
        pb.OrchestratorMessage(
            challenge=pb.Challenge(grid_id="other", nonce=b"n", protocol_min=1, protocol_max=1)
        )
    )


async def talks_out_of_turn(setup: Setup, stream: Any) -> None:
    stream.say(pb.OrchestratorMessage(heartbeat_ack=pb.HeartbeatAck()))


@pytest.mark.parametrize(
    ("act", "kind", "code"),
    [
        (fences, Conflict, "node.fenced"),
        (refuses_the_invite, NotAllowed, "node.invite"),
        (refuses_and_hangs_up, NotAllowed, "node.key"),
        (speaks_another_version, ProtocolMismatch, "protocol.version"),
        (is_another_grid, NotAllowed, "node.link"),
        (talks_out_of_turn, ProtocolMismatch, "protocol.malformed"),
    ],
)
async def test_a_final_refusal_ends_the_link(
    setup: Setup, act: Act, kind: type[DistribAIError], code: str
) -> None:
    stream = await setup.transport.accept()
    await act(setup, stream)
    with pytest.raises(kind) as caught:
        await setup.running
    assert caught.value.code == code
    assert stream.closed


async def test_a_refusal_that_may_pass_is_tried_again(setup: Setup) -> None:
    stream = await setup.transport.accept()
    await says_end(setup, stream, code="grid.unreachable", retry=True)
    await setup.connect()


async def test_old_progress_gives_way_and_is_not_kept_over_a_break(setup: Setup) -> None:
    stream = await setup.connect()
    stream.cut()
    for step in range(UNRELIABLE_WAITING + 5):
        setup.link.send(pb.TaskProgress(step=step))
    await setup.connect(resume=True)
    setup.link.send(pb.TaskProgress(step=9999))
    assert (await setup.peer.hear("task_progress")).step == 9999


@settings(max_examples=30, deadline=None)
@given(st.lists(st.sampled_from(["send", "say", "read", "cut", "lose"]), max_size=25))
def test_whatever_breaks_each_message_arrives_once_and_in_order(script: list[str]) -> None:
    asyncio.run(play(script))


async def play(script: list[str]) -> None:
    setup = Setup()
    peer, stream = setup.peer, await setup.connect()
    sent, said, heard = 0, 0, []

    def take(message: pb.NodeMessage) -> None:
        if peer.channel.on_receive(message.seq, message.ack) == "deliver" and message.seq:
            heard.append(message.task_result.steps)

    for act in [*script, "cut"]:
        if act == "send":
            sent += 1
            setup.link.send(pb.TaskResult(steps=sent))
        elif act == "say":
            said += 1
            peer.say(control=pb.ControlMessage(action=str(said)))
        elif act == "read":
            await settle()
            for message in stream.heard():
                take(message)
        else:
            if act == "cut":  # what is on its way arrives first
                await settle()
                for message in stream.heard():
                    take(message)
            stream.cut()
            stream = await setup.connect(resume=True)
    await settle(500)
    for message in stream.heard():
        take(message)
    assert heard == list(range(1, sent + 1))
    assert [m.control.action for m in setup.handler.got] == [str(n + 1) for n in range(said)]
    await setup.stop()
