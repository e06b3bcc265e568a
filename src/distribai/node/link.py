"""The node's end of its one stream: it registers, keeps the session, survives broken connections.

::

    connect -> Challenge -> RegisterSession -> RegisterAck -> talk ... lost -> wait -> connect
                                            -> SessionEnd(retry)            -> wait -> connect
                                            -> SessionEnd, node.fenced      -> run() raises

Numbered messages wait in the :class:`~distribai.wire.channel.Channel` until they are acknowledged.
After a break the node asks to go on with the same session; an orchestrator that still knows it
resends what was lost, and so does the node. The token for the blobs comes with the registration,
and its successors over the stream. Heartbeats run in a task of their own. A connection on
which nothing arrives for three heartbeats counts as lost, besides HTTP/2's keepalive: a proxy may
answer pings for an orchestrator that is gone.
"""

from __future__ import annotations

import asyncio
import random
from collections import deque
from collections.abc import Coroutine, Sequence
from dataclasses import dataclass
from typing import Any, NoReturn, Protocol

import structlog

from distribai.core.devices import Device, Machine, TaskInHand
from distribai.core.states import Intent
from distribai.errors import NotAllowed, ProtocolMismatch
from distribai.node.clock import Clock, reconnecting, within
from distribai.node.identity import Identity
from distribai.node.transport import Connection, ConnectionLost, Transport
from distribai.wire import checks, convert, signing
from distribai.wire.channel import RELIABLE, Channel
from distribai.wire.endings import error_of
from distribai.wire.joinlink import JoinLink
from distribai.wire.machines import machine_to_wire
from distribai.wire.v1 import distribai_pb2 as pb
from distribai.wire.versions import negotiate

log = structlog.get_logger("distribai.node")

Body = pb.TaskAccept | pb.TaskProgress | pb.TaskResult | pb.LogMessage | pb.Heartbeat
"""What the daemon may send; registering is the link's own."""

_FIELDS: dict[type, str] = {
    pb.TaskAccept: "task_accept",
    pb.TaskProgress: "task_progress",
    pb.TaskResult: "task_result",
    pb.LogMessage: "log",
    pb.Heartbeat: "heartbeat",
}

UNRELIABLE_WAITING = 256
"""Progress and log lines that may wait for the writer; older ones fall out first."""

HANDSHAKE_S = 30.0
"""Patience with an orchestrator that accepts a connection and then says nothing."""

HINT_AFTER = 2
"""Failures in a row at which the log says what to try: the first one is often nothing."""

HINT_EVERY_S = 600.0
"""Seconds after which the log says it again, if it still fails. Something else to try is said at
once: a grid that is turned to TLS is away at first."""

FRAMES = 64
"""Bytes that are counted for each message beside its own, each way: its frames (gRPC's 5, HTTP/2's
9, TLS 1.3's 22), and its share of the pings that keep the stream alive. Measured at a proxy before
an idle node, which sends heartbeats and gets answers."""

SILENCE = 3.0
"""Heartbeat intervals without any message after which a connection counts as lost."""


@dataclass(frozen=True, slots=True)
class Hello:
    """What the node tells about itself when it registers."""

    name: str
    software: str
    devices: Sequence[Device]
    tasks: Sequence[TaskInHand]
    blobs: Sequence[str]
    intent: Intent
    intent_reason: str = ""
    machine: Machine | None = None
    jobs: Sequence[str] = ()


class Handler(Protocol):
    """The daemon, as the link sees it. None of these may block."""

    def hello(self) -> Hello:
        """What to register with, asked anew for each connection."""
        ...

    def heartbeat(self) -> pb.Heartbeat:
        """The next heartbeat."""
        ...

    def registered(self, ack: pb.RegisterAck) -> None:
        """A session has begun or, with ``ack.resumed``, goes on."""
        ...

    def received(self, message: pb.OrchestratorMessage) -> None:
        """A numbered message, once and in order."""
        ...

    def unreachable(self, why: str, hint: str) -> None:
        """There is no connection, after :data:`HINT_AFTER` tries; again after each further one."""
        ...


class Link:
    """The session of one node.

    Args:
        rng: jitter of heartbeats and waits.
    """

    def __init__(
        self,
        join: JoinLink,
        transport: Transport,
        identity: Identity,
        handler: Handler,
        clock: Clock,
        rng: random.Random,
    ) -> None:
        self._join = join
        self._transport = transport
        self._identity = identity
        self._handler = handler
        self._clock = clock
        self._rng = rng
        self._channel: Channel[Body] = Channel()
        self._unreliable: deque[Body] = deque(maxlen=UNRELIABLE_WAITING)
        self._wake = asyncio.Event()
        self._beat = asyncio.Event()
        self._written = 0
        self._heard = 0.0
        self._interval = 10.0
        self._healthy = False
        self._leaving = False
        self._connected = False
        self._left = asyncio.Event()
        self._session_id = ""
        self.session_token = ""
        self.node_id = identity.node_id
        self.bytes_up = 0
        self.bytes_down = 0

    def send(self, body: Body) -> None:
        """Queue a message; a numbered one survives whatever happens to the connection.

        Raises:
            Unavailable: ``protocol.backlog``.
        """
        if _FIELDS[type(body)] in RELIABLE:
            self._channel.number(body)
        else:
            self._unreliable.append(body)
        self._wake.set()

    def beat(self) -> None:
        """Send a heartbeat now, for news that cannot wait."""
        self._beat.set()

    def unacked(self) -> tuple[Body, ...]:
        """Numbered messages that the orchestrator has not acknowledged."""
        return tuple(body for _, body in self._channel.unacked())

    async def farewell(self) -> None:
        """Tell the grid what the last heartbeat has to tell, and end the stream in order; returns
        when the other side has ended it too, or at once when there is no connection."""
        if not self._connected:
            return
        self.send(self._handler.heartbeat())
        self._leaving = True
        await self._left.wait()

    async def run(self) -> None:
        """Keep the session, until cancelled or after :meth:`farewell`.

        Raises:
            DistribAIError: why the grid does not take this node (any more): ``node.fenced``,
                ``node.invite``, ``protocol.version`` and others; ``grid.ca``: it is not the grid
                that the join link names.
        """
        waits, failures, hinted = reconnecting(self._rng), 0, ("", 0.0)
        while True:
            try:
                await self._session()
            except ConnectionLost as problem:
                reason, hint = str(problem), problem.hint or self._what_to_try()
            except _TryAgain as ended:
                reason, hint = str(ended.__cause__), getattr(ended.__cause__, "hint", "")
            if self._leaving:
                self._left.set()
                return
            if self._healthy:
                waits, failures, hinted = reconnecting(self._rng), 0, ("", 0.0)
                self._healthy = False
            wait, failures = next(waits), failures + 1
            now, told = self._clock.monotonic(), {}
            if failures >= HINT_AFTER:
                self._handler.unreachable(reason, hint)
                if hint != hinted[0] or now - hinted[1] >= HINT_EVERY_S:
                    told, hinted = {"try": hint}, (hint, now)
            log.warning("not connected", reason=reason, again_in_s=round(wait, 1), **told)
            await self._clock.sleep(wait)

    def _what_to_try(self) -> str:
        if self._session_id:
            return "It goes on by itself; see that the orchestrator runs and the network is up."
        return (
            "See that the orchestrator runs, that a firewall lets you through to "
            f"{self._join.grpc} and {self._join.http}, and that the join link is the one that it "
            "printed last."
        )

    # -------------------------------------------------------------- one connection

    async def _session(self) -> NoReturn:
        connection = await self._transport.connect()
        try:
            await self._register(connection)
            self._unreliable.clear()
            self._connected = True
            await _first_failure(
                self._read_all(connection), self._write_all(connection), self._beat_all()
            )
        finally:
            self._connected = False
            await connection.close()

    async def _register(self, connection: Connection) -> None:
        challenge = (await self._expect(connection, "challenge")).challenge
        version = negotiate(challenge.protocol_min, challenge.protocol_max)
        if challenge.grid_id != self._join.grid:
            raise NotAllowed(
                "node.link",
                f"Grid {challenge.grid_id!r} answers where the join link promises "
                f"{self._join.grid!r}.",
                "Ask the operator for a fresh join link.",
            )
        hello = self._handler.hello()
        register = pb.RegisterSession(
            protocol=version,
            public_key=self._identity.public_key,
            signature=signing.sign_register(self._identity.key, challenge.grid_id, challenge.nonce),
            invite=self._join.invite,
            name=hello.name,
            software=hello.software,
            devices=[convert.device_to_wire(d) for d in hello.devices],
            tasks=convert.in_hand_to_wire(hello.tasks),
            blobs=hello.blobs,
            resume_session=self._session_id,
            received=self._channel.received,
            intent=hello.intent.value,
            intent_reason=hello.intent_reason,
            machine=machine_to_wire(hello.machine),
            jobs=hello.jobs[: checks.MAX_NAMES],
        )
        await self._write(connection, pb.NodeMessage(register=register))
        ack = (await self._expect(connection, "register_ack")).register_ack
        self._begin(ack)

    def _begin(self, ack: pb.RegisterAck) -> None:
        if ack.resumed and ack.session_id == self._session_id:
            try:
                self._channel.resume(ack.received)
            except ProtocolMismatch as problem:
                # The two sides remember different sessions; the next one starts from nothing.
                self._session_id = ""
                raise _TryAgain from problem
        else:
            self._channel.renumber()
        self._session_id = ack.session_id
        self._written = 0
        self._beat.clear()  # registering told the news already
        self.session_token = ack.session_token
        self.node_id = ack.node_id
        self._set_interval(ack.heartbeat_s)
        self._heard = self._clock.monotonic()
        log.info("connected", node=ack.node_id, grid=self._join.grid, resumed=ack.resumed)
        self._handler.registered(ack)
        self._wake.set()

    async def _expect(self, connection: Connection, body: str) -> pb.OrchestratorMessage:
        try:
            message = await within(self._clock, HANDSHAKE_S, connection.read())
        except TimeoutError as problem:
            said = f"{self._join.grpc} is silent: no {body} within {HANDSHAKE_S:.0f} s"
            raise ConnectionLost(said) from problem
        if message is None:
            raise ConnectionLost("the orchestrator ended the stream before the session began")
        self.bytes_down += message.ByteSize() + FRAMES
        found = message.WhichOneof("body")
        if found == "session_end":
            raise _ending(message.session_end)
        if found != body:
            checks.malformed(f"{body} was due, not {found}")
        return message

    async def _read_all(self, connection: Connection) -> None:
        while (message := await connection.read()) is not None:
            self._heard = self._clock.monotonic()
            self.bytes_down += message.ByteSize() + FRAMES
            try:
                verdict = self._channel.on_receive(message.seq, message.ack)
            except ProtocolMismatch as problem:
                raise _TryAgain from problem  # a resumed session sends again what is missing
            body = message.WhichOneof("body")
            if body == "session_end":
                raise _ending(message.session_end)
            if body == "session_token":
                self.session_token = message.session_token.token
            elif body == "heartbeat_ack":
                self._healthy = True
                self._set_interval(message.heartbeat_ack.next_s)
            elif verdict == "deliver" and body in RELIABLE:
                self._handler.received(message)
                # The acknowledgement travels with the next message; a heartbeat at the latest.
        raise ConnectionLost("the orchestrator ended the stream")

    async def _write_all(self, connection: Connection) -> None:
        while True:
            await self._wake.wait()
            self._wake.clear()
            for seq, body in self._channel.unacked(after=self._written):
                if not await self._write(connection, self._envelope(seq, body)):
                    return
                self._written = seq
            while self._unreliable:
                body = self._unreliable.popleft()
                if not await self._write(connection, self._envelope(0, body)):
                    return
            if self._leaving:
                await connection.end()
                return

    def _envelope(self, seq: int, body: Body) -> pb.NodeMessage:
        message = pb.NodeMessage(seq=seq, ack=self._channel.received)
        getattr(message, _FIELDS[type(body)]).CopyFrom(body)
        return message

    async def _write(self, connection: Connection, message: pb.NodeMessage) -> bool:
        """Send; whether the connection still took it. Why not is for the reader to find: a last
        word of the orchestrator may wait there."""
        try:
            await connection.write(message)
        except ConnectionLost:
            return False
        self.bytes_up += message.ByteSize() + FRAMES
        return True

    async def _beat_all(self) -> None:
        while True:
            wait = self._interval * self._rng.uniform(0.8, 1.0)
            await self._sleep_or_beat(wait)
            silent = self._clock.monotonic() - self._heard
            if silent > SILENCE * self._interval:
                raise ConnectionLost(f"nothing was heard for {silent:.0f} s")
            self.send(self._handler.heartbeat())

    async def _sleep_or_beat(self, wait: float) -> None:
        sleep = asyncio.ensure_future(self._clock.sleep(wait))
        now = asyncio.ensure_future(self._beat.wait())
        try:
            await asyncio.wait({sleep, now}, return_when=asyncio.FIRST_COMPLETED)
        finally:
            sleep.cancel()
            now.cancel()
        self._beat.clear()

    def _set_interval(self, seconds: float) -> None:
        if seconds > 0:
            self._interval = seconds


async def _first_failure(*parts: Coroutine[Any, Any, None]) -> NoReturn:
    """Run ``parts`` together until one fails; end the others and raise its exception."""
    tasks = [asyncio.ensure_future(part) for part in parts]
    try:
        await asyncio.wait(tasks, return_when=asyncio.FIRST_EXCEPTION)
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
    for task in tasks:
        if not task.cancelled() and (problem := task.exception()) is not None:
            raise problem
    raise ConnectionLost("the stream was cancelled")


class _TryAgain(Exception):
    """The session ended with an error (the cause) that a new connection may cure."""


def _ending(end: pb.SessionEnd) -> Exception:
    error = error_of(end)
    if not end.retry or end.code == "node.fenced":
        return error
    again = _TryAgain()
    again.__cause__ = error
    return again
