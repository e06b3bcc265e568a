"""Virtual nodes that are real on the wire: the production link and blob client, sessions, leases
and uploads over sockets; only the training is pretended, in a thread of this process.

They are unruly on purpose, as networks are: bytes of an upload come out of order, whole uploads and
results come twice, a result comes again long after it was answered. How often, and when, the seed
says.
"""

from __future__ import annotations

import asyncio
import random
import threading
import time
from collections import Counter
from collections.abc import Callable, Coroutine, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx

from distribai.core.child import Done, Run
from distribai.core.devices import Device, TaskInHand
from distribai.core.spec import BlobRef
from distribai.core.states import Intent
from distribai.core.tasks import Assignment, Outcome
from distribai.errors import DistribAIError
from distribai.node import identity
from distribai.node.blobs import BlobClient
from distribai.node.cache import BlobCache
from distribai.node.clock import SystemClock
from distribai.node.executors import failed
from distribai.node.fetching import Fetcher
from distribai.node.link import Hello, Link
from distribai.node.transport import GrpcTransport
from distribai.testing.child import PretendChild
from distribai.wire import convert, joinlink, signing
from distribai.wire.v1 import distribai_pb2 as pb
from tests.chaos.front import Loop

UNRULY = 0.3
"""Share of uploads and results that come twice or out of order."""

SinceWhen = Callable[[], float | None]


@dataclass(eq=False)
class Hand:
    """One task in a virtual node's hands, from its assignment to the answer to its result."""

    task: Assignment
    device: int
    result: pb.TaskResult | None = None
    work: asyncio.Task[None] | None = None
    hurry: asyncio.Event = field(default_factory=asyncio.Event)


class VirtualNode:
    """One node: the handler of a :class:`Link`, and what a daemon's worker does.

    ``away`` are the seconds, on its own clock, from each loss of its stream to its next
    registration, less those in which nobody could have taken it: ``serves_since`` tells since when
    somebody can.
    """

    def __init__(
        self, root: Path, link: str, index: int, step_s: float, pool: Any, serves_since: SinceWhen
    ) -> None:
        self.name = f"virtual{index}"
        self.rng = random.Random(f"{self.name}")
        self.away: list[float] = []
        self.mischief: Counter[str] = Counter()
        self.hands: dict[tuple[str, int], Hand] = {}
        self._root, self._step_s, self._pool = root / self.name, step_s, pool
        self._serves_since = serves_since
        self._root.mkdir(parents=True)
        self._join = joinlink.parse(link)
        self._key = identity.load_or_create(self._root)
        clock = SystemClock()
        transport = _Watched(self, GrpcTransport(self._join.grpc))
        self._link = Link(self._join, transport, self._key, self, clock, self.rng)
        self._blobs = BlobClient(
            self._join.http_url, lambda: self._link.session_token, clock, self.rng, trust_env=False
        )
        self._fetcher = Fetcher(BlobCache(self._root / "cache", 1 << 30), self._blobs)
        self._child = PretendChild(_InPlace(self), 0.0)  # type: ignore[arg-type]
        self._device = asyncio.Lock()
        self._answered: list[pb.TaskResult] = []
        self._one_at_a_time = threading.Lock()
        self._tasks: set[asyncio.Task[Any]] = set()
        self._lost_at: float | None = None
        self.goal, self.job_id = 0, ""

    @property
    def node_id(self) -> str:
        """Its id in the grid."""
        return self._key.node_id

    async def run(self) -> None:
        """Work until cancelled.

        Raises:
            DistribAIError: the grid does not take this node any more.
        """
        self.loop = asyncio.get_running_loop()
        mischief = asyncio.create_task(self._report_again())
        try:
            await self._link.run()
        finally:
            for task in (mischief, *self._tasks):
                task.cancel()
            await asyncio.gather(mischief, *self._tasks, return_exceptions=True)
            await self._blobs.close()

    def lost(self) -> None:
        """Its stream has ended."""
        if self._lost_at is None:
            self._lost_at = time.monotonic()

    # -------------------------------------------------------------- the link's handler

    def hello(self) -> Hello:
        """What it registers with."""
        devices = [Device(0, "cpu", "virtual", 0, 1)]
        return Hello(self.name, "virtual", devices, self._told(), (), Intent.CONTRIBUTE)

    def heartbeat(self) -> pb.Heartbeat:
        """What it says every few seconds."""
        return pb.Heartbeat(
            tasks=convert.in_hand_to_wire(self._told()), intent=Intent.CONTRIBUTE.value
        )

    def _told(self) -> list[TaskInHand]:
        return [TaskInHand(*key, h.device) for key, h in self.hands.items()]

    def registered(self, ack: pb.RegisterAck) -> None:
        """A session has begun or goes on."""
        if self._lost_at is not None:
            now = time.monotonic()
            since = self._serves_since()
            self.away.append(now - max(self._lost_at, now if since is None else since))
            self._lost_at = None
        for told in ack.drop:
            self._drop(told.task_id)
        if ack.resumed:
            return
        waiting = self._link.unacked()
        for hand in list(self.hands.values()):
            if hand.result is not None and not any(b is hand.result for b in waiting):
                self._link.send(hand.result)

    def unreachable(self, why: str, hint: str) -> None:
        """The link tries again."""

    def received(self, message: pb.OrchestratorMessage) -> None:
        """A numbered message."""
        kind = message.WhichOneof("body")
        if kind == "task_assign":
            self._assigned(message.task_assign)
        elif kind == "task_result_ack":
            ack = message.task_result_ack
            hand = self.hands.get((ack.task_id, ack.attempt))
            if hand is not None and hand.result is not None:
                del self.hands[ack.task_id, ack.attempt]
                self._answered.append(hand.result)
        elif kind == "control" and message.control.action == "cancel":
            self._drop(message.control.task_id)
        elif kind == "control" and message.control.action == "finish":
            for hand in self.hands.values():
                if hand.task.task_id == message.control.task_id:
                    hand.hurry.set()

    def _drop(self, task_id: str) -> None:
        for key, hand in list(self.hands.items()):
            if hand.task.task_id == task_id:
                del self.hands[key]
                if hand.work is not None:
                    hand.work.cancel()

    def _assigned(self, message: pb.TaskAssign) -> None:
        task, device = convert.assignment_from_wire(message)
        if (task.task_id, task.attempt) in self.hands:
            return
        self._drop(task.task_id)
        hand = self.hands[task.task_id, task.attempt] = Hand(task, device)
        self._link.send(pb.TaskAccept(task_id=task.task_id, attempt=task.attempt, accepted=True))
        hand.work = self._spawn(self._work(hand))

    def _spawn(self, work: Coroutine[Any, Any, None]) -> asyncio.Task[None]:
        task = asyncio.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return task

    # -------------------------------------------------------------- a task

    async def _work(self, hand: Hand) -> None:
        async with self._device:
            self.goal, self.job_id = hand.task.steps, hand.task.job_id
            if hand.task.phase == "train":
                self.goal = await self._train(hand)
            run = Run(hand.task, str(self._root), "cpu", 1)
            done = await self.loop.run_in_executor(self._pool, self._do, run)
            outcome = done.outcome
            if outcome.delta is not None:
                try:
                    await self._upload(Path(done.delta_path), outcome.delta, hand.task.job_id)
                except DistribAIError as problem:  # the task may be somebody else's by now
                    outcome = failed(hand.task, problem.code, problem.message)
        self._report(hand, outcome)

    def _do(self, run: Run) -> Done:
        with self._one_at_a_time:  # a thread whose task was cancelled goes on
            return self._child.do(run)

    async def _train(self, hand: Hand) -> int:
        """Let the time pass that the steps take; how many there was time for."""
        for step in range(1, hand.task.steps + 1):
            if hand.hurry.is_set():
                return max(1, step - 1)
            with suppress(TimeoutError):
                await asyncio.wait_for(hand.hurry.wait(), self._step_s)
        return hand.task.steps

    def _report(self, hand: Hand, outcome: Outcome) -> None:
        if self.hands.get((hand.task.task_id, hand.task.attempt)) is not hand:
            return
        signature = signing.sign_outcome(self._key.key, outcome)
        hand.result = convert.outcome_to_wire(outcome, signature)
        self._link.send(hand.result)
        if self.rng.random() < UNRULY:
            self.mischief["result at once again"] += 1
            self._link.send(hand.result)

    async def _report_again(self) -> None:
        """Now and then bring a result again that was answered long ago, the newest first."""
        while True:
            await asyncio.sleep(self.rng.uniform(1.0, 5.0))
            if self._answered:
                self.mischief["result long after"] += 1
                self._link.send(self._answered.pop())

    # -------------------------------------------------------------- uploads

    async def _upload(self, path: Path, blob: BlobRef, job_id: str) -> None:
        if self.rng.random() < UNRULY:
            await self._out_of_order(await asyncio.to_thread(path.read_bytes), blob, job_id)
        twice = self.rng.random() < UNRULY
        uploads = [self._blobs.upload(path, blob, job_id) for _ in range(1 + twice)]
        self.mischief["upload twice at once"] += twice
        await asyncio.gather(*uploads)
        await asyncio.to_thread(path.unlink)

    async def _out_of_order(self, data: bytes, blob: BlobRef, job_id: str) -> None:
        """Send the second half first, both halves at once, and the first one again."""
        self.mischief["upload out of order"] += 1
        token = self._link.session_token
        headers = {"Authorization": f"Bearer {token}", "X-DistribAI-Job": job_id}
        half = len(data) // 2
        with suppress(httpx.HTTPError, KeyError, ValueError):
            async with httpx.AsyncClient(
                base_url=self._join.http_url, headers=headers, trust_env=False, timeout=60.0
            ) as http:
                wanted = {"sha256": blob.sha256, "size": blob.size}
                begun = (await http.post("/api/v1/blobs", json=wanted)).json()
                url = f"/api/v1/blobs/uploads/{begun['upload_id']}"

                async def part(start: int, stop: int) -> None:
                    with suppress(httpx.HTTPError):
                        await http.patch(
                            url,
                            content=data[start:stop],
                            headers={
                                "Upload-Offset": str(start),
                                "Content-Type": "application/offset+octet-stream",
                            },
                        )

                await part(half, blob.size)
                await asyncio.gather(part(0, half), part(half, blob.size))
                await part(0, half)

    # -------------------------------------------------------------- for the pretended child

    def fetch(self, blobs: Sequence[BlobRef]) -> dict[str, Path]:
        """Have blobs; called in a thread."""

        async def all_of_them() -> dict[str, Path]:
            return {b.sha256: await self._fetcher.fetch(b, self.job_id) for b in blobs}

        return asyncio.run_coroutine_threadsafe(all_of_them(), self.loop).result()


class _InPlace:
    """What a pretended child takes for the channel to its daemon."""

    def __init__(self, node: VirtualNode) -> None:
        self._node, self._steps = node, 0

    def __call__(self, _seconds: float, left: int | None = None) -> bool:
        self._steps = 0 if left is None else self._steps + 1
        return self._steps < self._node.goal

    def send(self, _message: object) -> None:
        """Progress and log lines go nowhere."""

    def fetch(self, blobs: Sequence[BlobRef]) -> dict[str, Path]:
        """Have blobs."""
        return self._node.fetch(blobs)


class _Watched:
    """A transport that tells its node when a stream ends."""

    def __init__(self, node: VirtualNode, inner: GrpcTransport) -> None:
        self._node, self._inner = node, inner

    async def connect(self) -> Any:
        connection = await self._inner.connect()
        close = connection.close

        async def closed() -> None:
            self._node.lost()
            await close()

        connection.close = closed  # type: ignore[method-assign]
        return connection


class Crowd:
    """Virtual nodes in a thread with a loop of its own."""

    def __init__(
        self, root: Path, link: str, count: int, step_s: float, serves_since: SinceWhen
    ) -> None:
        self.ended: list[str] = []
        self._loop = Loop("crowd")
        self._pool = ThreadPoolExecutor(4, "virtual")
        self.nodes: list[VirtualNode] = []
        self._runs: list[asyncio.Task[None]] = []

        def node(index: int) -> VirtualNode:
            return VirtualNode(root, link, index, step_s, self._pool, serves_since)

        self._loop.call(self._begin(node, count))

    async def _begin(self, node: Callable[[int], VirtualNode], count: int) -> None:
        for index in range(count):
            self.nodes.append(node(index))
            self._runs.append(asyncio.create_task(self._one(self.nodes[-1])))

    async def _one(self, node: VirtualNode) -> None:
        try:
            await node.run()
        except DistribAIError as problem:
            self.ended.append(f"{node.name} ended: {problem}")

    @property
    def in_hand(self) -> set[tuple[str, str, int]]:
        """Node, task and attempt of all that they hold."""
        return {(n.node_id, *key) for n in self.nodes for key in list(n.hands)}

    @property
    def away(self) -> list[float]:
        """Seconds without a stream, of all nodes."""
        return [seconds for node in self.nodes for seconds in node.away]

    @property
    def mischief(self) -> Counter[str]:
        """What they did that well-behaved nodes do not."""
        return sum((node.mischief for node in self.nodes), Counter())

    def close(self) -> None:
        """They vanish."""
        self._loop.close()
        self._pool.shutdown()
