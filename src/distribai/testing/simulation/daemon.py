"""One life of a virtual node: it speaks the production protocol, and obeys it."""

from __future__ import annotations

import asyncio
import math
import random
from collections.abc import Coroutine, Iterator
from contextlib import contextmanager
from typing import Any

from distribai.core.devices import Device, TaskInHand
from distribai.core.tasks import Progress
from distribai.testing.simulation.hand import Hand
from distribai.testing.simulation.machines import Machine
from distribai.testing.simulation.post import Body, Post
from distribai.testing.simulation.site import Disk, Site
from distribai.wire import convert, signing
from distribai.wire.channel import Channel
from distribai.wire.v1 import distribai_pb2 as pb

RECONNECT_S = 1.0
"""Seconds until a daemon whose connection was ended tries again."""

EVALUATION = 1 / 3
"""Seconds of a forward pass over those of a training step."""


class Daemon:
    """One life of a node, from its start to its crash or farewell; the chance of all its lives is
    ``rng``."""

    def __init__(self, site: Site, machine: Machine, disk: Disk, rng: random.Random) -> None:
        self._site, self._machine, self._disk, self._rng = site, machine, disk, rng
        self._loop = asyncio.get_running_loop()
        self._channel: Channel[Body] = Channel()
        self._session, self._intent = "", "contribute"
        self._post: Post | None = None
        self._beat_s = 10.0
        self._upload_s = 0.0
        self._at_work = asyncio.Lock()
        self._fetching = asyncio.Lock()
        self._emptied = asyncio.Event()
        self._tasks: set[asyncio.Task[None]] = set()

    async def run(self) -> None:
        """Connect, again and again.

        Raises:
            Exception: a defect of the server or of the simulation.
        """
        while True:
            self._post = Post(
                self._site.grid, self._channel, self._machine.latency_s, self._hello, self._receive
            )
            beat = asyncio.create_task(self._beat())
            try:
                await self._post.ended()
            finally:
                beat.cancel()
                await self._post.cut()
            await asyncio.sleep(RECONNECT_S)

    async def leave(self, patience_s: float = 60.0) -> None:
        """Hand in what there is, say goodbye, and go."""
        self._intent = "drain"
        self._heartbeat()
        for hand in list(self._disk.hands.values()):
            hand.hurry(self._loop.time(), 0.0, 0.0)
        self._look_whether_empty()
        try:
            await asyncio.wait_for(self._emptied.wait(), patience_s)
        except TimeoutError:
            return
        self._heartbeat()
        if self._post is not None:
            self._post.hang_up()
        await asyncio.sleep(4 * self._machine.latency_s + 0.001)

    async def die(self) -> None:
        """Everything stops where it is."""
        tasks = list(self._tasks)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        if self._post is not None:
            await self._post.cut()

    # -------------------------------------------------------------- the stream

    def _hello(self, challenge: pb.Challenge) -> pb.RegisterSession:
        key = self._disk.key
        return pb.RegisterSession(
            protocol=challenge.protocol_max,
            public_key=key.public_key().public_bytes_raw(),
            signature=signing.sign_register(key, challenge.grid_id, challenge.nonce),
            invite=self._site.invite,
            name=self._machine.name,
            software="simulated",
            devices=[convert.device_to_wire(Device(0, "cpu", "virtual", 0, 1))],
            tasks=convert.in_hand_to_wire(self._told()),
            resume_session=self._session,
            received=self._channel.received,
            intent=self._intent,
        )

    def _told(self) -> list[TaskInHand]:
        hands = self._disk.hands.values()
        return [TaskInHand(*h.key, h.device) for h in hands if not h.dropped]

    def _send(self, body: Body) -> None:
        assert self._post is not None, "who sends has been connected"
        self._post.send(body)

    async def _beat(self) -> None:
        while True:
            await asyncio.sleep(self._beat_s)
            self._heartbeat()

    def _heartbeat(self) -> None:
        if not self._session:
            return
        now = self._loop.time()
        for hand in self._disk.hands.values():
            if not hand.trained and now >= hand.began:
                tokens = hand.task.spec.batch * hand.task.spec.seq_len / hand.step_s
                told = Progress(*hand.key, hand.done(now), hand.task.steps, 4.0, tokens)
                self._send(convert.progress_to_wire(told))
        self._send(
            pb.Heartbeat(
                tasks=convert.in_hand_to_wire(self._told()),
                intent=self._intent,
                held_versions=self._disk.held,
            )
        )

    def _receive(self, message: pb.OrchestratorMessage) -> None:
        kind = message.WhichOneof("body")
        if kind == "register_ack":
            self._registered(message.register_ack)
        elif kind == "task_assign":
            self._assigned(message.task_assign)
        elif kind == "task_result_ack":
            ack = message.task_result_ack
            hand = self._disk.hands.get((ack.task_id, ack.attempt))
            if hand is not None and hand.result is not None:
                self._remove(hand)
        elif kind == "control":
            self._obey(message.control)
        elif kind == "round_complete":
            self._round_complete(message.round_complete)

    def _registered(self, ack: pb.RegisterAck) -> None:
        assert self._post is not None
        if ack.resumed:
            self._channel.resume(ack.received)
        else:
            self._channel.renumber()
        self._session, self._beat_s = ack.session_id, ack.heartbeat_s
        for told in ack.drop:
            hand = self._disk.hands.get((told.task_id, told.attempt))
            if hand is not None:
                self._drop(hand)
        waiting = [body for _, body in self._channel.unacked()]
        self._post.send_again()
        for hand in list(self._disk.hands.values()):
            if hand.result is not None:
                if not ack.resumed and not any(body is hand.result for body in waiting):
                    self._send(hand.result)
            elif hand.work is None and not hand.dropped:
                self._start(hand)

    def _assigned(self, message: pb.TaskAssign) -> None:
        task, device = convert.assignment_from_wire(message)
        if (task.task_id, task.attempt) in self._disk.hands:
            return
        for hand in list(self._disk.hands.values()):
            if hand.task.task_id == task.task_id:
                self._drop(hand)
        busy = any(h.result is None and not h.dropped for h in self._disk.hands.values())
        accepted = self._intent == "contribute" and not busy
        why = "" if accepted else "the device is busy"
        self._send(
            pb.TaskAccept(task_id=task.task_id, attempt=task.attempt, accepted=accepted, reason=why)
        )
        if accepted:
            hand = Hand(task, device, goal=task.steps)
            self._disk.hands[hand.key] = hand
            self._start(hand)

    def _obey(self, control: pb.ControlMessage) -> None:
        for hand in list(self._disk.hands.values()):
            if hand.task.task_id != control.task_id:
                continue
            if control.action == "cancel":
                self._drop(hand)
            elif control.action == "finish" and self._site.obedient:
                hand.hurry(self._loop.time(), control.within_s, self._upload_s)

    def _round_complete(self, message: pb.DiLoCoRoundComplete) -> None:
        held = self._disk.held.get(message.job_id)
        if message.job_done:
            self._disk.held.pop(message.job_id, None)
            self._disk.feedback.forget([message.job_id])
        elif held is not None:
            self._spawn(self._fetch(message.job_id, message.version, message.version == 0))

    # -------------------------------------------------------------- tasks

    def _start(self, hand: Hand) -> None:
        hand.work = self._spawn(self._work(hand))

    def _spawn(self, work: Coroutine[Any, Any, None]) -> asyncio.Task[None]:
        task = asyncio.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._ended)
        return task

    def _ended(self, task: asyncio.Task[None]) -> None:
        self._tasks.discard(task)
        problem = None if task.cancelled() else task.exception()
        if problem is not None and not self._site.defect.done():
            self._site.defect.set_exception(problem)

    def _drop(self, hand: Hand) -> None:
        hand.dropped = True
        if hand.work is not None:
            hand.work.cancel()
        self._remove(hand)

    def _remove(self, hand: Hand) -> None:
        self._disk.hands.pop(hand.key, None)
        self._look_whether_empty()

    def _look_whether_empty(self) -> None:
        if not self._disk.hands:
            self._emptied.set()

    async def _work(self, hand: Hand) -> None:
        async with self._at_work:
            base = hand.task.base
            await self._fetch(hand.task.job_id, base.version, base.snapshot is None)
            if hand.task.phase != "train":
                await self._evaluate(hand)
                outcome = self._site.workshop.judged(hand.task)
            else:
                await self._train(hand)
                await self._upload(hand)
                outcome = await self._site.workshop.trained(
                    hand.task, hand.device, hand.goal, hand.seconds, self._disk.feedback
                )
        signature = signing.sign_outcome(self._disk.key, outcome)
        hand.result = convert.outcome_to_wire(outcome, signature)
        self._send(hand.result)

    async def _train(self, hand: Hand) -> None:
        if hand.trained:
            return
        machine = self._machine
        rate = max(0.2, self._rng.gauss(1.0, machine.noise))
        hand.begin(self._loop.time(), machine.step_s / rate)
        with self._spending("train"):
            try:
                while (left := hand.ends_at - self._loop.time()) > 0:
                    hand.changed.clear()
                    try:
                        await asyncio.wait_for(hand.changed.wait(), left)
                    except TimeoutError:
                        break
            finally:
                done = min(self._loop.time(), hand.ends_at) - hand.began
                self._site.steps_computed += done / hand.step_s
        hand.end()

    async def _evaluate(self, hand: Hand) -> None:
        batches = hand.task.params.get("batches", 1)
        assert isinstance(batches, int)
        with self._spending("evaluate"):
            await asyncio.sleep(batches * self._machine.step_s * EVALUATION)

    async def _upload(self, hand: Hand) -> None:
        """Send what is still to be sent; what has arrived stays there."""
        began = self._loop.time()
        left = self._site.payload.delta - hand.sent_bytes
        with self._spending("upload"):
            try:
                await asyncio.sleep(2 * self._machine.latency_s + left / self._machine.up)
                hand.sent_bytes = self._site.payload.delta
            finally:
                passed = self._loop.time() - began
                hand.sent_bytes = max(
                    hand.sent_bytes,
                    self._site.payload.delta - max(0.0, left - passed * self._machine.up),
                )
        self._upload_s = self._loop.time() - began

    async def _fetch(self, job_id: str, version: int, from_seed: bool) -> None:
        """Have weights ``version``: an update from the one before, else a snapshot."""
        async with self._fetching:
            held = self._disk.held.get(job_id)
            if held is not None and held >= version:
                return
            if not from_seed:
                payload = self._site.payload
                behind = math.inf if held is None else version - held
                size = min(payload.snapshot, behind * payload.update)
                with self._spending("download"):
                    await asyncio.sleep(2 * self._machine.latency_s + size / self._machine.down)
            self._disk.held[job_id] = version

    @contextmanager
    def _spending(self, on: str) -> Iterator[None]:
        began = self._loop.time()
        try:
            yield
        finally:
            self._site.spent[on] += self._loop.time() - began
