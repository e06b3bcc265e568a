"""A grid without sockets: real stores, a clock that a test moves, nodes that obey."""

from __future__ import annotations

import asyncio
import itertools
import random
from collections.abc import AsyncIterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

from distribai.core.architectures import manifest_of
from distribai.core.devices import Device, TaskInHand
from distribai.core.ids import node_id
from distribai.core.ranges import total
from distribai.core.spec import BlobRef, DataSpec, JobSpec, ModelSpec, RoundSpec
from distribai.core.tasks import Assignment, Outcome
from distribai.merge.delta import DeltaHeader, write_delta
from distribai.merge.weights import open_weights
from distribai.orchestrator.context import Grid
from distribai.orchestrator.duties import Duties
from distribai.orchestrator.fleet import tokens
from distribai.orchestrator.grpc import serve
from distribai.orchestrator.jobs import commands, queries
from distribai.sections import LivenessSettings, OrchestratorSettings
from distribai.store.blobs import BlobStore
from distribai.store.engine import Database
from distribai.wire import convert, signing
from distribai.wire.channel import Channel
from distribai.wire.v1 import distribai_pb2 as pb
from distribai.wire.versions import PROTOCOL

MICRO = {"dim": 8, "layers": 1, "heads": 2, "ffn_dim": 8}
LIVENESS = LivenessSettings()


class FakeTime:
    """Monotonic and database time, moved by hand."""

    def __init__(self) -> None:
        self.now = 1_000_000.0

    def __call__(self) -> float:
        return self.now


class World:
    """One grid with its duties; ``restart`` gives another process on the same stores."""

    def __init__(self, root: Path, url: str, time: FakeTime | None = None, seed: int = 0) -> None:
        self.root, self.url, self.seed = root, url, seed
        self.time = time or FakeTime()
        self.invite = ""
        self.nodes: list[FakeNode] = []

    async def open(self) -> World:
        settings = OrchestratorSettings(state_dir=self.root, merge_threads=1, liveness=LIVENESS)
        rng = random.Random(self.seed)
        db = Database(self.url, clock=self.time, durable=False)
        self.grid = Grid(
            db=db,
            blobs=BlobStore.open(self.root / "blobs", self.root / "staging", max_bytes=1 << 24),
            settings=settings,
            clock=self.time,
            entropy=rng.randbytes,
            grid_id="grid_test",
            holder=f"holder{self.seed}",
            replica=f"host{self.seed}:8766",
        )
        self.grid.sleep = self._slow
        self.invite = await tokens.ensure_invite(db, self.root, rng.randbytes)
        self.duties = Duties(self.grid)
        return self

    async def _slow(self, seconds: float) -> None:
        """What a node waits that talks too much passes at once."""
        self.time.now += seconds

    async def close(self) -> None:
        for node in self.nodes:
            await node.vanish()
        self.nodes.clear()
        await self.grid.db.close()

    async def restart(self) -> World:
        """The process dies and another one starts."""
        from distribai.orchestrator.fleet.liveness import after_start

        await self.close()
        again = await World(self.root, self.url, self.time, self.seed + 1).open()
        await after_start(again.grid)
        return again

    async def settle(self) -> None:
        """Let every duty run until nothing changes, and every message arrive."""
        await self.duties.settle()
        await breathe()

    async def advance(self, seconds: float, *alive: FakeNode) -> None:
        """Let time pass; ``alive`` nodes send heartbeats all along."""
        end = self.time.now + seconds
        while self.time.now < end:
            self.time.now = min(end, self.time.now + 10.0)
            for node in alive:
                await node.heartbeat()
            await self.settle()

    async def node(self, name: str, **kwargs: Any) -> FakeNode:
        """A new node that has joined."""
        node = FakeNode(self, name, **kwargs)
        self.nodes.append(node)
        await node.connect()
        return node

    async def job(self, spec: JobSpec | None = None, **changes: Any) -> str:
        """A job that has been accepted."""
        job_id = await commands.create_job(
            self.grid, replace(spec or await self.spec(), **changes), None, "tester"
        )
        await commands.accept_job(self.grid, job_id, "tester")
        return job_id

    async def spec(self, **changes: Any) -> JobSpec:
        """A micro job on a few kilobytes of text: 3 rounds of 2 steps."""
        text = "".join(f"line {i} of the text\n" for i in range(200)).encode()
        ref = await self.grid.blobs.put_bytes(text)
        spec = JobSpec(
            name="micro",
            model=ModelSpec("decoder_transformer", MICRO),
            data=DataSpec(source="blobs", files=(ref,), held_out=0.1),
            steps=6,
            batch=2,
            seq_len=8,
            rounds=RoundSpec(inner_steps=2, grace_min=2.0, grace_max=20.0),
        )
        return replace(spec, **changes)

    async def run_job(self, job_id: str, turns: int = 60) -> str:
        """Let all nodes do all their tasks until the job has ended; its state."""
        for _ in range(turns):
            await self.settle()
            state = (await queries.show_job(self.grid, job_id)).state
            if state in ("completed", "failed", "cancelled"):
                return state
            self.time.now += 1.0  # every task takes a second: nobody is faster than others
            for node in self.nodes:
                await node.work()
        raise AssertionError("the job does not end")


async def breathe() -> None:
    """Let messages that are on their way arrive."""
    for _ in range(20):
        await asyncio.sleep(0)


class FakeNode:
    """A node over :func:`serve`: it registers, keeps what it is assigned, answers on demand."""

    _numbers = itertools.count(1)

    def __init__(
        self,
        world: World,
        name: str,
        *,
        devices: int = 1,
        key: Ed25519PrivateKey | None = None,
        protocol: int = PROTOCOL,
    ) -> None:
        self.protocol = protocol
        self.world, self.name = world, name
        seed = next(self._numbers).to_bytes(32, "big")
        self.key = key or Ed25519PrivateKey.from_private_bytes(seed)
        self.public = self.key.public_key().public_bytes_raw()
        self.id = node_id(self.public)
        self.devices = [Device(i, "cpu", "fake", 0, 1) for i in range(devices)]
        self.channel: Channel[pb.NodeMessage] = Channel()
        self.session = ""
        self.token = ""
        self.tasks: dict[str, Assignment] = {}
        self.acks: list[pb.TaskResultAck] = []
        self.completed: list[pb.DiLoCoRoundComplete] = []
        self.stopped: list[str] = []
        self.hurried: list[tuple[str, float]] = []
        self.orders: list[str] = []
        self.end: pb.SessionEnd | None = None
        self.register_ack: pb.RegisterAck | None = None
        self.intent = "contribute"
        self.shown = b""
        self._stream: asyncio.Task[None] | None = None

    async def connect(self, **changes: Any) -> None:
        """Open a stream and register; ``changes`` spoil the registration's fields."""
        self.end = None
        self.queue: asyncio.Queue[pb.NodeMessage | None] = asyncio.Queue()
        self._changes = changes
        self._ready = asyncio.Event()
        served = serve(self.world.grid, self._incoming(), "", self.shown)
        self._stream = asyncio.create_task(self._run(served))
        ready = asyncio.create_task(self._ready.wait())
        await asyncio.wait([self._stream, ready], return_when=asyncio.FIRST_COMPLETED)
        ready.cancel()
        await breathe()

    async def _incoming(self) -> AsyncIterator[pb.NodeMessage]:
        while (message := await self.queue.get()) is not None:
            yield message
            self.queue.task_done()
        self.queue.task_done()

    async def _run(self, stream: AsyncIterator[pb.OrchestratorMessage]) -> None:
        async for message in stream:
            verdict = self.channel.on_receive(message.seq, message.ack)
            kind = message.WhichOneof("body")
            if kind == "challenge":
                self.queue.put_nowait(self._registration(message.challenge))
            elif kind == "register_ack":
                self._registered(message.register_ack)
            elif kind == "session_end":
                self.end = message.session_end
            elif verdict == "deliver":
                self._take(kind, message)

    def _registration(self, challenge: pb.Challenge) -> pb.NodeMessage:
        register = pb.RegisterSession(
            protocol=self.protocol,
            public_key=self.public,
            signature=signing.sign_register(self.key, challenge.grid_id, challenge.nonce),
            invite=self.world.invite,
            name=self.name,
            software="fake",
            devices=[convert.device_to_wire(d) for d in self.devices],
            tasks=convert.in_hand_to_wire(self.in_hand()),
            resume_session=self.session,
            received=self.channel.received,
            intent=self.intent,
        )
        for name, value in self._changes.items():
            register.ClearField(name)
            register.MergeFrom(pb.RegisterSession(**{name: value}))
        return pb.NodeMessage(register=register)

    def in_hand(self) -> list[TaskInHand]:
        return [TaskInHand(t.task_id, t.attempt) for t in self.tasks.values()]

    def _registered(self, ack: pb.RegisterAck) -> None:
        if ack.resumed:
            self.channel.resume(ack.received)
        else:
            self.channel.renumber()
        self.register_ack, self.session, self.token = ack, ack.session_id, ack.session_token
        for dropped in ack.drop:
            self.tasks.pop(dropped.task_id, None)
        for seq, body in self.channel.unacked():
            body.seq, body.ack = seq, self.channel.received
            self.queue.put_nowait(body)
        self._ready.set()

    def _take(self, kind: str | None, message: pb.OrchestratorMessage) -> None:
        if kind == "task_assign":
            assignment, _ = convert.assignment_from_wire(message.task_assign)
            self.tasks[assignment.task_id] = assignment
        elif kind == "task_result_ack":
            self.acks.append(message.task_result_ack)
            self.tasks.pop(message.task_result_ack.task_id, None)
        elif kind == "session_token":
            self.token = message.session_token.token
        elif kind == "round_complete":
            self.completed.append(message.round_complete)
        elif kind == "control" and message.control.action == "finish":
            self.hurried.append((message.control.task_id, message.control.within_s))
        elif kind == "control" and message.control.action in ("pause", "resume", "drain"):
            self.orders.append(message.control.action)
        elif kind == "control":
            self.stopped.append(message.control.task_id)

    async def send(self, message: pb.NodeMessage, *, reliable: bool = False) -> None:
        """Send a message and wait until the orchestrator has taken it in."""
        message.seq = self.channel.number(message, reliable=reliable)
        message.ack = self.channel.received
        self.queue.put_nowait(message)
        await self.taken_in()

    async def taken_in(self) -> None:
        """Wait until the orchestrator has taken in everything, or has ended the stream."""
        assert self._stream is not None
        joined = asyncio.create_task(self.queue.join())
        await asyncio.wait([joined, self._stream], return_when=asyncio.FIRST_COMPLETED)
        joined.cancel()
        await breathe()

    async def heartbeat(self, intent: str | None = None, **fields: Any) -> None:
        self.intent = intent or self.intent
        beat = pb.Heartbeat(
            tasks=convert.in_hand_to_wire(self.in_hand()), intent=self.intent, **fields
        )
        await self.send(pb.NodeMessage(heartbeat=beat))

    async def vanish(self) -> None:
        """The connection breaks without a word."""
        if self._stream is not None:
            self._stream.cancel()
            await asyncio.gather(self._stream, return_exceptions=True)

    async def leave(self) -> None:
        """The node closes its stream."""
        self.queue.put_nowait(None)
        assert self._stream is not None
        await asyncio.wait_for(self._stream, 10)

    # -------------------------------------------------------------- work

    def only_task(self, phase: str = "train") -> Assignment:
        """The one task of a phase that the node holds."""
        (found,) = [t for t in self.tasks.values() if t.phase == phase]
        return found

    async def next_training(self) -> Assignment:
        """The next training task, after whatever else comes before it."""
        for _ in range(5):
            await self.world.settle()
            for task in self.tasks.values():
                if task.phase == "train":
                    return task
            await self.work()
        raise AssertionError("no training task comes")

    async def work(self, phase: str | None = None) -> int:
        """Do every task in hand (of one phase); how many."""
        todo = [t for t in self.tasks.values() if phase in (None, t.phase)]
        for task in todo:
            await self.report(await self.outcome(task))
        return len(todo)

    async def outcome(self, task: Assignment, *, steps: int | None = None) -> Outcome:
        """What an honest node returns; the delta is uploaded."""
        base = {"task_id": task.task_id, "attempt": task.attempt, "status": "done"}
        if task.phase == "evaluate":
            metrics = {"held_out_loss": 3.0 - 0.1 * task.round, "held_out_tokens": 64.0}
            return Outcome(**base, base_hash=task.base.weights_hash, metrics=metrics)  # type: ignore[arg-type]
        if task.phase == "generate":
            text = f"{task.params['prompt']}..."
            return Outcome(**base, base_hash=task.base.weights_hash, text=text)  # type: ignore[arg-type]
        done = task.steps if steps is None else steps
        wanted = done * task.spec.batch
        samples = []
        for r in task.samples:
            take = min(len(r), wanted - total(samples))
            if take:
                samples.append(replace(r, stop=r.start + take))
        tokens_done = wanted * task.spec.seq_len
        return Outcome(
            **base,  # type: ignore[arg-type]
            delta=await self.upload(task, done, tokens_done),
            samples=tuple(samples),
            steps=done,
            tokens=tokens_done,
            base_hash=task.base.weights_hash,
            metrics={"loss_first": 5.0, "loss_last": 4.0, "seconds": 2.0},
        )

    async def upload(
        self, task: Assignment, steps: int, tokens_done: int, value: float | None = None
    ) -> BlobRef:
        """A delta in the blob store: small noise, or ``value`` everywhere."""
        grid = self.world.grid
        manifest = manifest_of(task.spec.model.family, task.spec.model.config)
        _, ref = await queries.weights_blob(grid, task.job_id, task.round)
        rng = np.random.default_rng([ord(c) for c in task.task_id])
        async with grid.blobs.local(ref) as path:
            base = {k: np.array(v) for k, v in open_weights(path, manifest).items()}
        if value is not None:  # the same difference everywhere, whatever the weights are
            base = {k: np.full_like(v, value) for k, v in base.items()}
            local = {k: np.zeros_like(v) for k, v in base.items()}
        else:
            local = {
                k: (v - rng.normal(0, 0.01, v.shape)).astype(np.float32) for k, v in base.items()
            }
        header = DeltaHeader(
            task.job_id,
            task.task_id,
            task.attempt,
            task.round,
            manifest.hash,
            task.spec.codec_up_of(task.round),
            tokens_done,
            steps,
        )
        out = grid.scratch / f"{task.task_id}-{task.attempt}-{next(self._numbers)}"
        blob = write_delta(out, manifest, base, local, header)
        await grid.blobs.put_file(out, blob)
        return blob

    async def report(self, outcome: Outcome, key: Ed25519PrivateKey | None = None) -> None:
        """Send a result, signed with the node's key or another."""
        signature = signing.sign_outcome(key or self.key, outcome)
        message = pb.NodeMessage(task_result=convert.outcome_to_wire(outcome, signature))
        await self.send(message, reliable=True)

    async def fail(self, task: Assignment, code: str, reason: str) -> None:
        """Report a failed attempt."""
        await self.report(
            Outcome(task.task_id, task.attempt, "failed", error_code=code, reason=reason)
        )
