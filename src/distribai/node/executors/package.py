"""Declarative tasks: our own training code in a child process that stays warm.

The child keeps the model and the canonical copy of its jobs between tasks. When it dies, is killed
or sends nonsense, a new one goes on from the task's checkpoint within the same attempt, as long as
each child gets further than the one before; one that does not costs the attempt, with its reason.
What an earlier daemon had trained to the end is uploaded without training it again.
"""

from __future__ import annotations

import asyncio
from collections.abc import Collection, Mapping
from functools import partial
from pathlib import Path

import structlog

from distribai import spawn
from distribai.core.child import (
    RESIDUAL,
    Cancel,
    Checkpointed,
    Done,
    Finish,
    Gate,
    Kept,
    LogLine,
    Measure,
    Measured,
    Need,
    ProgressLine,
    Ready,
    Run,
)
from distribai.core.devices import Speed
from distribai.core.spec import BlobRef
from distribai.core.tasks import Assignment, Outcome
from distribai.errors import DistribAIError, Unavailable
from distribai.node.cache import Pins, sha256_of
from distribai.node.child import ChildEnded, ChildProcess, start
from distribai.node.clock import within
from distribai.node.devices import Place
from distribai.node.executors import Executor, Services, failed
from distribai.node.feedback import has_feedback
from distribai.node.keeping import Keeper
from distribai.node.providing import Provider, measured

log = structlog.get_logger("distribai.node")

NAME = "package"

READY_S = 300.0
"""Importing torch from a cold network disk has been seen to take minutes."""

CANCEL_S = 60.0
"""A child that is told to drop its task answers after the step it is at; longer is a hang."""


MEASURE_S = 60.0
"""Measuring takes a second or two; ten times more on a machine that swaps."""

REPORT_S = 1.0
"""What a result needs besides its upload to be counted before its round merges."""

UNKNOWN_UPLOAD = 0.25
"""Share of the time before a merge that the first upload of this node is expected to take."""


def make(services: Services) -> Executor:
    """The executor; its child starts with :meth:`PackageExecutor.start` or the first task."""
    return PackageExecutor(services)


class PackageExecutor:
    """One training child and the task that it is at."""

    def __init__(self, services: Services) -> None:
        self._services = services
        self._command = services.command or spawn.command("training-child")
        self._lock = asyncio.Lock()
        self._child: ChildProcess | None = None
        self._at_work: Assignment | None = None
        self._patience: asyncio.Task[None] | None = None
        self._held: dict[str, int] = {}
        self._keeper: Keeper | None = None  # of the task that the child is at
        self._kept_steps = self._resumed_at = 0
        self._upload_s: float | None = None
        self._cancelled = False

    async def start(self) -> Ready:
        """Start the child.

        Raises:
            UsageError: ``node.torch``, torch is not installed.
            Unavailable: ``node.child`` or ``node.memory``, it ended.
        """
        try:
            return (await self._ensure()).ready
        except ChildEnded as ended:
            raise ended.as_error() from ended

    async def run(self, assignment: Assignment, place: Place, keeper: Keeper) -> Outcome:
        """Run a task to its end; see :class:`distribai.node.executors.Executor`."""
        async with self._lock:
            try:
                keeper.folder.mkdir(parents=True, exist_ok=True)
                done = await self._reached(assignment, place, keeper)
                if done is None:
                    done = await self._train(assignment, place, keeper)
                return await self._deliver(assignment, place, done, keeper)
            except ChildEnded as ended:
                return failed(assignment, ended.code, ended.reason)
            except DistribAIError as problem:
                return failed(assignment, problem.code, problem.message)
            except OSError as problem:
                return failed(assignment, "io.file", f"This machine's disk: {problem}.")

    async def measure(self, place: Place) -> Speed:
        """Let the child measure a device, between two tasks.

        Raises:
            Unavailable: ``node.child`` or ``node.memory``: it could not be measured.
        """
        async with self._lock:
            try:
                child = await self._ensure()
                await child.send(Measure(place.torch, place.device.threads))
                answer = await within(self._services.clock, MEASURE_S, child.receive())
                if not isinstance(answer, Measured):
                    raise await child.nonsense(f"a {answer.type} message that was not due")
            except ChildEnded as ended:
                self._lose_child()
                raise ended.as_error() from ended
            except TimeoutError as late:
                await child.kill("did not measure its device in time")
                self._lose_child()
                why = f"The device was not measured within {MEASURE_S:.0f} s."
                raise Unavailable("node.child", why) from late
            except asyncio.CancelledError:
                await child.kill("was measuring when its node left")
                self._lose_child()
                raise
        if answer.problem:
            raise Unavailable("node.child", f"The device cannot be measured: {answer.problem}.")
        return Speed(place.device.index, answer.gflops, answer.memory_gbps)

    async def cancel(self, assignment: Assignment, reason: str) -> bool:
        """Tell the child to drop the task, and see to it that it does."""
        child = self._child
        if self._at_work is not assignment or child is None:
            return False
        self._cancelled = True
        await child.send(Cancel(assignment.task_id, reason))
        if self._patience is None:
            self._patience = asyncio.create_task(self._lose_patience(child))
        return True

    async def gate(self, gate: Gate) -> None:
        """Pass on what the governor wants."""
        if self._child is not None:
            await self._child.send(gate)

    async def finish(self, assignment: Assignment) -> None:
        """Tell the child when the task's round merges; one that begins later is told then."""
        if self._at_work is assignment and self._child is not None:
            await self._tell_the_merge(self._child, assignment)

    def held_versions(self) -> Mapping[str, int]:
        """Canonical versions in the child, by job."""
        return dict(self._held)

    async def forget(self, job_ids: Collection[str]) -> None:
        """Jobs have ended."""
        for job_id in job_ids:
            self._held.pop(job_id, None)
        await asyncio.to_thread(self._services.feedback.forget, job_ids)

    async def close(self) -> None:
        """End the child."""
        child = self._child
        self._lose_child()
        if child is not None:
            await child.close()

    # -------------------------------------------------------------- the child

    async def _ensure(self) -> ChildProcess:
        if self._child is None or not self._child.alive:
            self._lose_child()
            self._child = await start(
                self._command,
                self._services.log_dir / "training.log",
                self._services.gate(),
                self._services.clock,
                READY_S,
            )
        return self._child

    def _lose_child(self) -> None:
        self._child = None
        self._held.clear()

    async def _lose_patience(self, child: ChildProcess) -> None:
        await self._services.clock.sleep(CANCEL_S)
        await child.kill("did not drop its task when it was told to")

    # -------------------------------------------------------------- one task

    async def _reached(self, assignment: Assignment, place: Place, keeper: Keeper) -> Done | None:
        """What an earlier daemon had trained to the end, if its delta lies there whole, and what
        the delta leaves unsent."""
        record = keeper.record
        outcome, path = record.outcome, keeper.folder / record.delta
        if outcome is None or outcome.delta is None:
            return None
        whole = path if await asyncio.to_thread(_is_whole, path, outcome.delta) else None
        if record.residual is not None:
            look = partial(self._services.feedback.find, assignment, place.device.index)
            whole = whole or await asyncio.to_thread(look, outcome.delta)
            rest = keeper.folder / RESIDUAL
            here = await asyncio.to_thread(_is_whole, rest, record.residual)
            if not here and await asyncio.to_thread(look, record.residual) is None:
                whole = None
        if whole is not None:
            return Done(outcome, str(whole), record.residual)
        log.warning("a delta is torn or gone; training it again", task=outcome.task_id)
        return None

    async def _train(self, assignment: Assignment, place: Place, keeper: Keeper) -> Done:
        """Train with as many children as it takes, while each gets further than the last."""
        self._kept_steps = self._resumed_at = 0
        self._cancelled = False
        while True:
            try:
                with self._services.cache.pinned() as pins:
                    return await self._attempt(assignment, place, keeper, pins)
            except ChildEnded as ended:
                self._lose_child()
                if self._cancelled or self._kept_steps <= self._resumed_at:
                    raise
                self._resumed_at = self._kept_steps
                log.warning("going on from the checkpoint", step=self._kept_steps, why=ended.reason)

    async def _attempt(
        self, assignment: Assignment, place: Place, keeper: Keeper, pins: Pins
    ) -> Done:
        child = await self._ensure()
        owed = None
        if has_feedback(assignment):
            prepare = self._services.feedback.prepare
            owed = await asyncio.to_thread(prepare, assignment, place.device.index)
        cache, begun = self._services.cache, self._services.begun.of(assignment.job_id)
        leads = (*assignment.base.blobs, *(ref.blob for ref in begun))
        self._at_work, self._keeper = assignment, keeper
        run = Run(
            assignment,
            str(keeper.folder),
            place.torch,
            place.device.threads,
            self._services.checkpoints,
            owed,
            cache.held_of(leads),
            begun,
            cache.room,
            self._services.progress_s,
        )
        try:
            await child.send(run)
            await child.send(self._services.gate())  # a run lifts an earlier task's finish
            await self._tell_the_merge(child, assignment)
            done = await self._listen(child, assignment, pins)
        except asyncio.CancelledError:
            await child.kill("was at a task that is not wanted any more")
            self._lose_child()
            raise
        finally:
            self._at_work = self._keeper = None
            if self._patience is not None:
                self._patience.cancel()
                self._patience = None
        if done.outcome.status == "done":
            self._held[assignment.job_id] = assignment.base.version
        else:
            self._held.pop(assignment.job_id, None)
        return done

    async def _listen(self, child: ChildProcess, assignment: Assignment, pins: Pins) -> Done:
        provider = Provider(self._services, child, assignment, pins)
        name = (assignment.task_id, assignment.attempt)
        try:
            while True:
                message = await child.receive()
                if isinstance(message, Need) and not provider.busy:
                    provider.start(message)
                elif isinstance(message, Kept):
                    provider.keep(message)
                elif isinstance(message, ProgressLine):
                    self._services.listener.progress(message.progress)
                elif isinstance(message, Checkpointed):
                    self._checkpointed(message)
                elif isinstance(message, LogLine):
                    self._services.listener.log(assignment.task_id, message)
                elif isinstance(message, Done) and name == (
                    message.outcome.task_id,
                    message.outcome.attempt,
                ):
                    return provider.judge(message)
                else:
                    raise await child.nonsense(f"a {message.type} message that was not due")
        finally:
            await provider.stop()

    def _checkpointed(self, message: Checkpointed) -> None:
        self._kept_steps = message.steps
        if message.resumed:
            self._resumed_at = message.steps
            log.info("resumed from a checkpoint", step=message.steps)

    async def _tell_the_merge(self, child: ChildProcess, assignment: Assignment) -> None:
        keeper = self._keeper
        if keeper is None or keeper.merges_at is None:
            return
        left = keeper.merges_at - self._services.clock.monotonic() - REPORT_S
        upload = left * UNKNOWN_UPLOAD if self._upload_s is None else self._upload_s
        await child.send(Finish(assignment.task_id, max(0.0, left - upload)))

    async def _deliver(
        self, assignment: Assignment, place: Place, done: Done, keeper: Keeper
    ) -> Outcome:
        delta, path = done.outcome.delta, Path(done.delta_path)
        if delta is None:
            return done.outcome
        await self._tell_the_record(done, keeper)
        if done.residual is None:
            return await self._upload(assignment, path, done.outcome, delta, keeper)
        kept, where = self._services.feedback, (assignment, place.device.index)
        path = await asyncio.to_thread(
            kept.adopt, *where, keeper.folder, path, delta, done.residual
        )
        try:
            outcome = await self._upload(assignment, path, done.outcome, delta, keeper)
        except (DistribAIError, OSError):
            await asyncio.to_thread(kept.undo, *where)
            raise
        await asyncio.to_thread(kept.settle, *where)
        return outcome

    async def _tell_the_record(self, done: Done, keeper: Keeper) -> None:
        """Write down what the training came to.

        Raises:
            OSError: it cannot be written, and it has error feedback: trained again by a later
                daemon it would have other bytes than what counts.
        """
        known = keeper.record.outcome
        if known is not None and known.delta == done.outcome.delta:
            return
        # Trained again after its delta was torn it may have other bytes: what was begun to upload
        # is of no use then.
        told = {"outcome": done.outcome, "delta": Path(done.delta_path).name, "upload": ""}
        if done.residual is None:
            await keeper.note("trained", **told)
        else:
            await keeper.keep("trained", **told, residual=done.residual)

    async def _upload(
        self, assignment: Assignment, path: Path, outcome: Outcome, delta: BlobRef, keeper: Keeper
    ) -> Outcome:
        """Upload a delta; the outcome, with how long that took."""

        async def begun(upload_id: str) -> None:
            await keeper.note("uploading", upload=upload_id)

        before = self._services.clock.monotonic()
        await self._services.blobs.upload(
            path, delta, assignment.job_id, upload_id=keeper.record.upload, begun=begun
        )
        self._upload_s = self._services.clock.monotonic() - before
        return measured(outcome, upload_seconds=self._upload_s)


def _is_whole(path: Path, blob: BlobRef) -> bool:
    return path.is_file() and sha256_of(path) == blob.sha256
