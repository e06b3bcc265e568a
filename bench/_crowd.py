"""Virtual nodes for the control benchmark: the wire protocol, and no work.

A node takes whatever it is given. A sample (``generate``) and a held-out loss (``evaluate``) it
hands in at once: a few bytes are an answer that the orchestrator accepts. What is to be trained it
keeps for ever.
"""

from __future__ import annotations

import asyncio
import random
import time
from collections.abc import AsyncIterator, Callable
from contextlib import suppress

import grpc.aio
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

from distribai.core.architectures import family
from distribai.core.devices import Device
from distribai.core.plain import to_plain
from distribai.core.spec import DataSpec, JobSpec, ModelSpec
from distribai.core.tasks import Outcome
from distribai.node.clock import reconnecting
from distribai.orchestrator.context import Grid
from distribai.orchestrator.grpc import serve
from distribai.wire import convert, signing
from distribai.wire.channel import RELIABLE, Channel
from distribai.wire.options import CLIENT_OPTIONS
from distribai.wire.v1 import distribai_pb2 as pb
from distribai.wire.v1.distribai_pb2_grpc import NodeServiceStub

ROUND = 2000
"""Slots of a round, at most."""

Told = Callable[[str, float], None]
"""Called with a task's id and the time of ``time.monotonic`` when its assignment arrives."""


class VirtualNode:
    """One node's half of the protocol, without a wire."""

    def __init__(self, index: int, invite: str, told: Told) -> None:
        self._key = Ed25519PrivateKey.from_private_bytes(random.Random(index).randbytes(32))
        self._name, self._invite, self._told = f"virtual-{index}", invite, told
        self._channel: Channel[pb.NodeMessage] = Channel()
        self._session = ""
        self._hand: dict[str, int] = {}
        self.registered = False

    @property
    def tasks(self) -> int:
        """Tasks in hand."""
        return len(self._hand)

    def begin(self) -> None:
        """A new stream is about to begin."""
        self.registered = False

    def answer(self, message: pb.OrchestratorMessage) -> list[pb.NodeMessage]:
        """What to say to a message of the orchestrator's."""
        kind = message.WhichOneof("body")
        if kind == "challenge":
            return [pb.NodeMessage(register=self._hello(message.challenge))]
        if kind == "session_end":
            return []
        if self._channel.on_receive(message.seq, message.ack) == "duplicate":
            return []
        if kind == "register_ack":
            return self._enter(message.register_ack)
        if kind == "task_assign":
            self._told(message.task_assign.task_id, time.monotonic())
            return self._work(message.task_assign)
        return []

    def heartbeat(self) -> pb.NodeMessage:
        """What a node says every few seconds."""
        beat = pb.Heartbeat(intent="contribute", tasks=self._in_hand())
        return pb.NodeMessage(ack=self._channel.received, heartbeat=beat)

    def _in_hand(self) -> list[pb.TaskInHand]:
        return [pb.TaskInHand(task_id=t, attempt=a, device=0) for t, a in self._hand.items()]

    def _hello(self, challenge: pb.Challenge) -> pb.RegisterSession:
        return pb.RegisterSession(
            protocol=challenge.protocol_max,
            public_key=self._key.public_key().public_bytes_raw(),
            signature=signing.sign_register(self._key, challenge.grid_id, challenge.nonce),
            invite=self._invite,
            name=self._name,
            software="virtual",
            devices=[convert.device_to_wire(Device(0, "cpu", "virtual", 0, 1))],
            resume_session=self._session,
            received=self._channel.received,
            intent="contribute",
            tasks=self._in_hand(),
        )

    def _enter(self, ack: pb.RegisterAck) -> list[pb.NodeMessage]:
        if ack.resumed:
            self._channel.resume(ack.received)
        else:
            self._channel.renumber()
        self._session, self.registered = ack.session_id, True
        return [self._numbered(seq, body) for seq, body in self._channel.unacked()]

    def _work(self, message: pb.TaskAssign) -> list[pb.NodeMessage]:
        # The fields that are needed: reading a spec strictly takes a node milliseconds, and here
        # it would be the orchestrator's core that pays.
        key = (message.task_id, message.attempt)
        accept = pb.TaskAccept(task_id=key[0], attempt=key[1], accepted=True)
        if message.phase == "train":
            self._hand[message.task_id] = message.attempt
            return [self._say(pb.NodeMessage(task_accept=accept))]
        base = message.base.weights_hash
        if message.phase == "evaluate":
            outcome = Outcome(*key, "done", base_hash=base, metrics={"held_out_loss": 5.0})
        else:
            outcome = Outcome(*key, "done", base_hash=base, text="x")
        result = convert.outcome_to_wire(outcome, signing.sign_outcome(self._key, outcome))
        return [
            self._say(pb.NodeMessage(task_accept=accept)),
            self._say(pb.NodeMessage(task_result=result)),
        ]

    def _say(self, body: pb.NodeMessage) -> pb.NodeMessage:
        reliable = body.WhichOneof("body") in RELIABLE
        return self._numbered(self._channel.number(body, reliable=reliable), body)

    def _numbered(self, seq: int, body: pb.NodeMessage) -> pb.NodeMessage:
        out = pb.NodeMessage()
        out.CopyFrom(body)
        out.seq, out.ack = seq, self._channel.received
        return out


class Attached:
    """A virtual node inside the orchestrator's process: no sockets, the production server."""

    def __init__(self, grid: Grid, node: VirtualNode) -> None:
        self._node = node
        self._inbox: asyncio.Queue[pb.NodeMessage | None] = asyncio.Queue()
        self._task = asyncio.create_task(self._run(grid))

    def beat(self) -> None:
        """Send a heartbeat, once it has been let in."""
        if not self.registered:
            return
        self._inbox.put_nowait(self._node.heartbeat())

    async def leave(self) -> None:
        """End the stream."""
        self._inbox.put_nowait(None)
        await self._task

    @property
    def registered(self) -> bool:
        """Whether the orchestrator has let it in."""
        return self._node.registered

    async def _run(self, grid: Grid) -> None:
        async for message in serve(grid, self._incoming()):
            for said in self._node.answer(message):
                self._inbox.put_nowait(said)

    async def _incoming(self) -> AsyncIterator[pb.NodeMessage]:
        while (message := await self._inbox.get()) is not None:
            yield message


class Connected:
    """A virtual node over gRPC that goes to the next address when its stream breaks."""

    def __init__(self, node: VirtualNode, channels: list[grpc.aio.Channel], first: int) -> None:
        self._node, self._channels, self._next = node, channels, first
        self._rng = random.Random(first)
        self.lost_at: float | None = None
        self.away: list[float] = []
        self._task = asyncio.create_task(self._run())

    @property
    def registered(self) -> bool:
        """Whether an orchestrator has let it in."""
        return self._node.registered

    @property
    def tasks(self) -> int:
        """Tasks that it holds."""
        return self._node.tasks

    async def stop(self) -> None:
        """End the stream."""
        self._task.cancel()
        await asyncio.gather(self._task, return_exceptions=True)

    async def _run(self) -> None:
        waits = reconnecting(self._rng)
        while True:
            self._node.begin()
            with suppress(grpc.aio.AioRpcError):  # whatever broke it: it connects again
                await self._stream(self._channels[self._next % len(self._channels)])
            if self._node.registered:
                waits, self.lost_at = reconnecting(self._rng), time.monotonic()
            self._node.begin()
            self._next += 1
            await asyncio.sleep(next(waits))

    async def _stream(self, channel: grpc.aio.Channel) -> None:
        stub = NodeServiceStub(channel)  # type: ignore[no-untyped-call]  # generated code
        call = stub.Session()
        beats: asyncio.Task[None] | None = None
        try:
            while (message := await call.read()) is not grpc.aio.EOF:
                for said in self._node.answer(message):
                    await call.write(said)
                if self._node.registered and beats is None:
                    beats = asyncio.create_task(self._beat(call))
                    if self.lost_at is not None:
                        self.away.append(time.monotonic() - self.lost_at)
                        self.lost_at = None
        finally:
            if beats is not None:
                beats.cancel()
            call.cancel()

    async def _beat(self, call: grpc.aio.StreamStreamCall) -> None:
        while True:
            await asyncio.sleep(self._rng.uniform(5.0, 10.0))
            try:
                await call.write(self._node.heartbeat())
            except (grpc.aio.AioRpcError, asyncio.InvalidStateError, grpc.aio.UsageError):
                return  # the reader notices


def spec(workers: int = 1) -> JobSpec:
    """The job whose tasks the crowd gets."""
    config = to_plain(family("decoder_transformer").PROFILES["tiny"])
    model = ModelSpec("decoder_transformer", config, "tiny")
    return JobSpec(
        "control", model, DataSpec(), steps=1, batch=1, workers_min=workers, workers_max=workers
    )


def channel(address: str) -> grpc.aio.Channel:
    """A connection that many streams share."""
    options = (*CLIENT_OPTIONS, ("grpc.use_local_subchannel_pool", 1))
    return grpc.aio.insecure_channel(address, options=options)
