"""The training child's process: one task at a time, warm in between.

``main`` speaks :mod:`distribai.core.child` over standard input and output. It ends when the daemon
closes its end; a task that goes wrong, by a defect too, ends in ``Done`` with status ``failed``.
"""

from __future__ import annotations

import os
import sys
import time
import traceback
from collections import OrderedDict
from collections.abc import Callable
from types import TracebackType
from typing import BinaryIO

import torch

from distribai.core.child import Done, LogLine, Measure, Measured, ProgressLine, Ready, Run
from distribai.core.plain import fingerprint
from distribai.core.tasks import Outcome, Progress
from distribai.errors import DistribAIError
from distribai.training import devices
from distribai.training.channel import Channel, ChannelClosed, TaskCancelled
from distribai.training.desk import Desk
from distribai.training.loop import is_out_of_memory
from distribai.training.measure import measure

WARM_JOBS = 2
"""Jobs whose model stays in memory; the longest unused one goes first."""


class Child:
    """Runs tasks from a channel.

    Args:
        channel: to the daemon; its reader is already running.
        clock: seconds, monotonic.
    """

    def __init__(self, channel: Channel, clock: Callable[[], float]) -> None:
        self._channel, self._clock = channel, clock
        self._desks: OrderedDict[tuple[str, str, str], Desk] = OrderedDict()

    def serve(self) -> None:
        """Announce the child and do tasks until the daemon is gone."""
        try:
            self._channel.send(Ready(torch.__version__, devices.available(), *devices.described()))
            while True:
                asked = self._channel.next_run()
                if isinstance(asked, Measure):
                    self._channel.send(self.measure(asked))
                else:
                    self._channel.send(self.do(asked))
        except ChannelClosed:
            return

    def measure(self, asked: Measure) -> Measured:
        """How fast a device is, between two tasks."""
        try:
            device = devices.choose(asked.device)
            return measure(device, asked.threads, self._clock)
        except DistribAIError as problem:
            return Measured(0.0, 0.0, problem.message)
        except RuntimeError as problem:  # torch's own: no memory left beside a warm model
            return Measured(0.0, 0.0, str(problem))

    def do(self, run: Run) -> Done:
        """One task, with its end, whatever happens in it.

        Raises:
            ChannelClosed: the daemon is gone.
        """
        task = run.assignment
        verdict = _Verdict()
        done = Done(Outcome(task.task_id, task.attempt, "failed"))
        with verdict:
            done = self._phase(run)
        problem = verdict.problem
        if problem is None:
            return done
        reached = [d.canonical.hash for k, d in self._desks.items() if k[0] == task.job_id]
        if not isinstance(problem, TaskCancelled):
            self._forget(task.job_id)
        code, reason = self._explain(problem)
        outcome = Outcome(
            task.task_id,
            task.attempt,
            "failed",
            base_hash=reached[-1] if reached else "",
            error_code=code,
            reason=reason,
        )
        return Done(outcome)

    def _phase(self, run: Run) -> Done:
        task, fetch, gate = run.assignment, self._channel.fetch, self._channel
        if run.threads > 0:
            torch.set_num_threads(run.threads)
        gate(0.0)
        desk = self._desk(run)
        if task.phase == "evaluate":
            return Done(desk.evaluate(run, fetch, gate, self._channel.send))
        if task.phase == "generate":
            return Done(desk.generate(run, fetch, gate, self._channel.send))

        def report(step: int, loss: float, tokens_per_s: float) -> None:
            progress = Progress(task.task_id, task.attempt, step, task.steps, loss, tokens_per_s)
            self._channel.send(ProgressLine(progress))

        done = desk.train(run, fetch, gate, report, self._channel.send)
        self._channel.encoded()
        return done

    def _desk(self, run: Run) -> Desk:
        """The warm desk of the task's job, or a new one."""
        task, device = run.assignment, devices.choose(run.device)
        key = (task.job_id, device, fingerprint(task.spec))
        if key not in self._desks:
            self._forget(task.job_id)
            while len(self._desks) >= WARM_JOBS:
                self._desks.popitem(last=False)
            self._desks[key] = Desk(task.job_id, task.spec, device, self._clock)
        self._desks.move_to_end(key)
        return self._desks[key]

    def _forget(self, job_id: str) -> None:
        """Drop what is warm of a job: after a failure nothing of it can be relied on."""
        for key in [k for k in self._desks if k[0] == job_id]:
            del self._desks[key]

    def _explain(self, problem: Exception) -> tuple[str, str]:
        if isinstance(problem, DistribAIError):
            return problem.code, problem.message
        if is_out_of_memory(problem):
            return "node.memory", f"The machine has too little memory for the task: {problem}"
        if isinstance(problem, OSError):
            return "io.file", f"A file could not be read or written: {problem}"
        trace = "".join(traceback.format_exception(problem))
        self._channel.send(LogLine("error", "defect in the training child", {"traceback": trace}))
        return "internal.fault", f"{type(problem).__name__}: {problem}"


class _Verdict:
    """Keeps whatever exception ends its block.

    The one place where any exception is held up: it becomes a failed attempt with its reason, or
    a defect in one task would end the child without an answer. ``ChannelClosed`` passes, since
    there is nobody left to answer, and so do ``KeyboardInterrupt`` and ``SystemExit``.
    """

    def __init__(self) -> None:
        self.problem: Exception | None = None

    def __enter__(self) -> _Verdict:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        problem: BaseException | None,
        trace: TracebackType | None,
    ) -> bool:
        if not isinstance(problem, Exception) or isinstance(problem, ChannelClosed):
            return False
        self.problem = problem
        return True


def main(stdin: BinaryIO | None = None, stdout: BinaryIO | None = None) -> int:
    """Serve a daemon until it closes its end; the process's exit status.

    Without arguments the channel is the process's own standard input and output; whatever a
    library prints afterwards goes to standard error. Status 2 means that the daemon sent a line
    that cannot be read.
    """
    if stdin is None:
        stdin = os.fdopen(os.dup(0), "rb")
    if stdout is None:
        sys.stdout.flush()
        stdout = os.fdopen(os.dup(1), "wb")
        os.dup2(2, 1)
    channel = Channel(stdin, stdout)
    channel.start()
    Child(channel, time.monotonic).serve()
    if channel.fault is not None:
        print(f"unreadable line on the child's channel: {channel.fault}", file=sys.stderr)
        return 2
    return 0
