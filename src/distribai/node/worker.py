"""What the node does about its tasks: take or decline them, run, report, drop."""

from __future__ import annotations

import asyncio
import base64
import math
from collections.abc import Callable, Coroutine, Sequence
from typing import Any

import structlog

from distribai.core.child import LogLine
from distribai.core.devices import Speed
from distribai.core.needs import Isolation
from distribai.core.states import Intent
from distribai.core.tasks import Assignment, Outcome, Progress
from distribai.errors import ProtocolMismatch
from distribai.node import executors
from distribai.node.ahead import Ahead
from distribai.node.clock import within
from distribai.node.devices import Place, offer
from distribai.node.executors import Executor, Services, failed
from distribai.node.governor import Governor
from distribai.node.hands import Hand, Hands
from distribai.node.identity import Identity
from distribai.node.keeping import HandFiles, Kept
from distribai.node.link import Body
from distribai.wire import checks, convert, signing
from distribai.wire.options import MAX_MESSAGE_BYTES
from distribai.wire.v1 import distribai_pb2 as pb

log = structlog.get_logger("distribai.node")

ISOLATION: Isolation = "L0"
"""The isolation level of declarative tasks, the only one that this node offers."""

LOG_CHARS = 16_384
"""Characters of a log message or field that travel; a traceback fits."""

TELL_UNBEGUN = 2
"""Tasks of a job in a row that ended before their first step, of which the owner is told."""


class Worker:
    """The tasks of one daemon.

    Args:
        services: what executors get.
        files: where tasks in hand outlive the daemon.
        send: queues a message to the orchestrator.
        beat: sends a heartbeat now.
    """

    def __init__(
        self,
        services: Callable[[Worker], Services],
        files: HandFiles,
        governor: Governor,
        identity: Identity,
        send: Callable[[Body], None],
        beat: Callable[[], None],
    ) -> None:
        self._services = services(self)
        self._files = files
        self._governor = governor
        self._identity = identity
        self._send = send
        self._beat = beat
        self._reported: dict[str, float] = {}
        self._unbegun: dict[str, int] = {}
        self._executors: dict[str, Executor] = {}
        self._background: set[asyncio.Task[None]] = set()
        self._defect: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self.places: tuple[Place, ...] = ()
        self.torch = ""
        self.hands = Hands()
        self._ahead = Ahead(
            self._services.cache,
            self._services.fetcher,
            self._services.begun,
            held=lambda job_id: self.held_versions().get(job_id),
            may=lambda: self._governor.intent is Intent.CONTRIBUTE,
            waits=self.hands.work_for,
        )

    async def start(self, device: str, threads: int) -> None:
        """Start all executors, see what there is to run on, and go on with the tasks that an
        earlier daemon had in hand.

        Raises:
            DistribAIError: this machine cannot run tasks.
        """
        for name, make in executors.find().items():
            self._executors[name] = make(self._services)
            ready = await self._executors[name].start()
            self.places, self.torch = offer(device, ready, threads), ready.torch
            log.info("ready", executor=name, torch=ready.torch, device=self.places[0].torch)
        for kept in await self._files.load():
            self._take_up(kept)

    def _take_up(self, kept: Kept) -> None:
        task = kept.assignment
        why_not = self._cannot(task, kept.device)
        if why_not:
            log.warning("a task in hand is given up", task=task.task_id, why=why_not)
            kept.keeper.forget()
            return
        hand = Hand(task, kept.device, kept.keeper, taken=True, result=kept.result)
        self.hands.add(hand)
        log.info("taken up again", task=task.task_id, done=kept.result is not None)
        if hand.result is None:
            hand.work = self._watched(self._work(hand))

    async def broken(self) -> None:
        """Never return; raise what went wrong where no error of a task was expected, so that a
        defect ends the daemon instead of leaving it deaf."""
        await asyncio.shield(self._defect)

    async def close(self) -> None:
        """Stop everything, finished or not. What is in hand stays on disk for the next daemon."""
        self._defect.cancel()
        tasks = [*self._background, *(h.work for h in self.hands if h.work is not None)]
        for task in tasks:
            task.cancel()
        if tasks:
            await asyncio.wait(tasks)
        for executor in self._executors.values():
            await executor.close()
        await self._files.close()

    @property
    def idle(self) -> bool:
        """Whether no task is in hand."""
        return not any(hand.result is None for hand in self.hands)

    async def measure(self, place: Place) -> Speed:
        """How fast a device is, by the executor that offers it.

        Raises:
            Unavailable: ``node.child`` or ``node.memory``.
        """
        (executor,) = self._executors.values()
        return await executor.measure(place)

    def held_versions(self) -> dict[str, int]:
        """Canonical versions in memory, by job."""
        return {j: v for e in self._executors.values() for j, v in e.held_versions().items()}

    def regulate(self) -> None:
        """Pass the governor's gate on to whatever runs."""
        for executor in self._executors.values():
            self._spawn(self._regulate(executor))

    async def _regulate(self, executor: Executor) -> None:
        await executor.gate(self._governor.gate)  # the newest, whatever was overtaken

    # -------------------------------------------------------------- from the orchestrator

    def registered(self, ack: pb.RegisterAck, waiting: Sequence[Body]) -> None:
        """A session began: stop what is not ours any more, and report again what a new session
        has never heard of. ``waiting`` are messages that the link sends again by itself."""
        for told in ack.drop:
            hand = self.hands.get(told.task_id, told.attempt)
            if hand is not None:
                self._drop(hand, "the grid has given the task to somebody else")
        self._forget(list(ack.ended))
        if ack.resumed:
            return
        for result in self.hands.owed():
            if not any(body is result for body in waiting):
                self._send(result)

    def assign(self, message: pb.TaskAssign) -> None:
        """Take a task or decline it."""
        try:
            assignment, device = convert.assignment_from_wire(message)
            checks.check_id(assignment.task_id, "TaskAssign.task_id")
        except ProtocolMismatch as problem:
            log.warning("malformed task", reason=problem.message)
            self._answer(message, problem.message)
            return
        known = self.hands.get(assignment.task_id, assignment.attempt)
        if known is not None:
            if known.taken:  # else its own answer is on the way
                self._answer(message)
            return
        for older in self.hands.of_task(assignment.task_id):
            self._drop(older, "the task has a newer attempt")
        why_not = self._why_not(assignment, device)
        if why_not:
            self._answer(message, why_not)
            return
        hand = Hand(assignment, device, self._files.new(message))
        self.hands.add(hand)
        hand.work = self._watched(self._work(hand, message))

    def cancel(self, task_id: str, reason: str) -> None:
        """Drop a task; nobody waits for its result."""
        for hand in self.hands.of_task(task_id):
            self._drop(hand, reason or "the grid has cancelled it")

    def finish(self, task_id: str, within_s: float, reason: str) -> None:
        """The round of a task merges in ``within_s`` seconds at the latest: whoever cannot be done
        with it by then hands in what it has done. A task whose training is over goes on."""
        left = within_s if math.isfinite(within_s) else 0.0
        for hand in self.hands.of_task(task_id):
            if hand.result is None and not hand.dropped:
                log.info("the round merges soon", task=task_id, within_s=left, why=reason)
                hand.keeper.merges_at = self._services.clock.monotonic() + left
                executor = self._executors[hand.assignment.executor]
                self._spawn(executor.finish(hand.assignment))

    def acknowledged(self, ack: pb.TaskResultAck) -> None:
        """The orchestrator has dealt with a result."""
        hand = self.hands.get(ack.task_id, ack.attempt)
        if hand is None or hand.result is None:
            return
        self.hands.remove(hand)
        if not ack.counted:
            log.warning("a result did not count", task=ack.task_id, why=ack.reason, code=ack.code)

    def round_complete(self, message: pb.DiLoCoRoundComplete) -> None:
        """Fetch what the next task of a job will need, before it asks for it."""
        if message.job_done:
            self._forget([message.job_id])
            return
        if not message.HasField("weights"):
            return
        try:
            weights = convert.weights_from_wire(message.weights, "weights")
        except ProtocolMismatch as problem:
            log.warning("malformed end of a round", reason=problem.message)
            return
        self._ahead.hear(message.job_id, weights)
        self._spawn(self._ahead.fetch(message.job_id))

    def _forget(self, job_ids: Sequence[str]) -> None:
        if job_ids:
            self._services.begun.forget(job_ids)
            for job_id in job_ids:
                self._ahead.forget(job_id)
                self._unbegun.pop(job_id, None)
            for executor in self._executors.values():
                self._spawn(executor.forget(job_ids))

    # -------------------------------------------------------------- from the executors

    def progress(self, progress: Progress) -> None:
        """Report progress; the last step always.

        Executors keep the pace that they were given; one that does not is held to twice as often.
        """
        now = self._services.clock.monotonic()
        last = self._reported.get(progress.task_id)
        if (
            progress.step < progress.steps
            and last is not None
            and now - last < self._services.progress_s / 2
        ):
            return
        self._reported[progress.task_id] = now
        for hand in self.hands.of_task(progress.task_id):
            self._unbegun.pop(hand.assignment.job_id, None)
        self._send(convert.progress_to_wire(progress))

    def log(self, task_id: str, line: LogLine) -> None:
        """Pass on a line for the job's owner."""
        fields = {name: value[:LOG_CHARS] for name, value in line.fields.items()}
        message = line.message[:LOG_CHARS]
        self._send(pb.LogMessage(level=line.level, message=message, task_id=task_id, fields=fields))

    # -------------------------------------------------------------- one task

    def _why_not(self, assignment: Assignment, device: int) -> str:
        if self._governor.intent is not Intent.CONTRIBUTE:
            why = f": {self._governor.reason}" if self._governor.reason else ""
            return f"the node's intent is {self._governor.intent.value}{why}"
        if why_not := self._cannot(assignment, device):
            return why_not
        return f"device {device} is busy" if self.hands.busy(device) else ""

    def _cannot(self, assignment: Assignment, device: int) -> str:
        if assignment.executor not in self._executors:
            return f"no executor {assignment.executor!r} here"
        if assignment.isolation != ISOLATION:
            return f"isolation {assignment.isolation!r} is not offered here"
        if all(place.device.index != device for place in self.places):
            return f"no device {device} here"
        return ""

    def _answer(self, message: pb.TaskAssign, why_not: str = "") -> None:
        self._send(
            pb.TaskAccept(
                task_id=message.task_id,
                attempt=message.attempt,
                accepted=not why_not,
                reason=why_not,
            )
        )

    async def _work(self, hand: Hand, new: pb.TaskAssign | None = None) -> None:
        """From the assignment, if it is ``new``, to the result that is owed then."""
        try:
            if new is not None and not await self._take(hand, new):
                return
            outcome = await self._run(hand)
            if not hand.dropped:
                await self._owe(hand, outcome)
        finally:
            self._reported.pop(hand.assignment.task_id, None)
            if hand.dropped:  # else the daemon ends, and the next one goes on with it
                self.hands.remove(hand)

    async def _take(self, hand: Hand, message: pb.TaskAssign) -> bool:
        """Put the task on disk and accept it; without that a restart would lose it."""
        try:
            await hand.keeper.keep("taken")
        except OSError as problem:
            log.warning("task declined", task=message.task_id, why=str(problem))
            self.hands.remove(hand)
            self._answer(message, f"this machine's disk: {problem}")
            return False
        hand.taken = True
        self._answer(message)
        return True

    async def _owe(self, hand: Hand, outcome: Outcome) -> None:
        result = self._sign(outcome)
        if result.ByteSize() > MAX_MESSAGE_BYTES // 2:
            result = self._sign(
                failed(hand.assignment, "task.failed", "The task's result is too large to send.")
            )
        log.info("task ended", task=outcome.task_id, status=outcome.status, why=outcome.reason)
        signed = base64.b64encode(result.SerializeToString()).decode()
        await hand.keeper.note("owed", result=signed)
        hand.keeper.empty_folder()
        self.hands.end(hand, result)
        self._send(result)

    async def _run(self, hand: Hand) -> Outcome:
        assignment = hand.assignment
        place = next(p for p in self.places if p.device.index == hand.device)
        run = self._executors[assignment.executor].run(assignment, place, hand.keeper)
        if not assignment.deadline_s:
            return await run
        try:
            return await within(self._services.clock, assignment.deadline_s, run)
        except TimeoutError:
            why = f"The task took longer than its {assignment.deadline_s:.0f} s."
            return failed(assignment, "task.timeout", why)

    def _sign(self, outcome: Outcome) -> pb.TaskResult:
        return convert.outcome_to_wire(outcome, signing.sign_outcome(self._identity.key, outcome))

    def _drop(self, hand: Hand, reason: str) -> None:
        if hand.result is not None:
            self.hands.remove(hand)
        elif not hand.dropped:
            log.info("task dropped", task=hand.assignment.task_id, why=reason)
            hand.dropped = True
            self._beat()  # whoever told us to stop waits to give the device other work
            self._spawn(self._stop_work(hand, reason))
            self._tell_unbegun(hand)
            self._spawn(self._ahead.fetch(hand.assignment.job_id))  # no task waits for it now

    def _tell_unbegun(self, hand: Hand) -> None:
        """Tell the machine's owner when task after task ends while it still fetches."""
        task = hand.assignment
        if task.phase != "train" or task.task_id in self._reported:
            return
        count = self._unbegun[task.job_id] = self._unbegun.get(task.job_id, 0) + 1
        if count >= TELL_UNBEGUN:
            log.warning(
                "downloads take longer than the job's rounds",
                job=task.job_id,
                tasks=count,
                why="so many tasks in a row were taken back before their first step",
                hint="What was fetched is kept, and fetching goes on. If it does not help: a "
                "faster line (or a higher --down-mbps), or a job with longer rounds or a smaller "
                "model.",
            )

    async def _stop_work(self, hand: Hand, reason: str) -> None:
        executor = self._executors[hand.assignment.executor]
        if not await executor.cancel(hand.assignment, reason) and hand.work is not None:
            hand.work.cancel()
            await asyncio.wait({hand.work})
            self.hands.remove(hand)  # work that never began cannot let go by itself

    def _spawn(self, work: Coroutine[Any, Any, None]) -> None:
        task = self._watched(work)
        self._background.add(task)
        task.add_done_callback(self._background.discard)

    def _watched(self, work: Coroutine[Any, Any, None]) -> asyncio.Task[None]:
        task = asyncio.create_task(work)
        task.add_done_callback(self._look_for_a_defect)
        return task

    def _look_for_a_defect(self, task: asyncio.Task[None]) -> None:
        problem = None if task.cancelled() else task.exception()
        if problem is not None and not self._defect.done():
            self._defect.set_exception(problem)
