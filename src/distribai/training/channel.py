"""The child's end of :mod:`distribai.core.child`: a reader thread, and the gate that it moves.

The thread is the only reader of the channel and blocks on nothing else, so a ``Gate`` or ``Cancel``
takes effect between two steps of a running task.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import BinaryIO

from distribai.core import child as wire
from distribai.core.spec import BlobRef
from distribai.errors import DistribAIError

STEPS_TIMED = 16
"""Last steps whose mean time foretells that of the next ones: long enough for a device that runs
behind its host, short enough to notice that somebody else uses it now."""


class TaskCancelled(DistribAIError):
    """The daemon dropped the running task."""


class ChannelClosed(Exception):
    """The daemon's end is gone; the child ends."""


class Channel:
    """One end of the channel. Methods other than :meth:`read_loop` belong to the task's thread.

    Args:
        stdin: lines from the daemon.
        stdout: lines to the daemon.
        wait: waits on a condition at most so many seconds; tests pass one that does not wait.
        clock: seconds, monotonic.
    """

    def __init__(
        self,
        stdin: BinaryIO,
        stdout: BinaryIO,
        wait: Callable[[threading.Condition, float], object] = threading.Condition.wait,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._stdin, self._stdout, self._wait, self._clock = stdin, stdout, wait, clock
        self._changed = threading.Condition()
        self._runs: deque[wire.Run | wire.Measure] = deque()
        self._have: dict[str, Path] = {}
        self._gone: set[str] = set()
        self._limits = wire.Gate()
        self._current = ""
        self._cancel: wire.Cancel | None = None
        self._merge: tuple[str, float] | None = None  # the task, and when to be done with it
        self._passed: deque[float] = deque(maxlen=STEPS_TIMED + 1)  # times of the gate
        self._encode_s = 0.0
        self._closed = False
        self.fault: ValueError | None = None
        """What was wrong with the line that ended the channel, if one did."""

    def start(self) -> None:
        """Start the reader; a daemon thread, since a blocked read cannot be interrupted."""
        threading.Thread(target=self.read_loop, name="channel", daemon=True).start()

    def read_loop(self) -> None:
        """Take in lines until the daemon closes its end or sends an unreadable one."""
        try:
            for line in self._stdin:
                self._take(wire.decode(line))
        except ValueError as problem:
            self.fault = problem
        finally:
            with self._changed:
                self._closed = True
                self._changed.notify_all()

    def _take(self, message: wire.Message) -> None:
        with self._changed:
            if isinstance(message, wire.Run):
                self._runs.append(message)
                # `finish` was meant for the task before this one.
                self._limits = wire.Gate(self._limits.share, self._limits.pause)
            elif isinstance(message, wire.Measure):
                self._runs.append(message)
            elif isinstance(message, wire.Have):
                self._have.update((sha, Path(p)) for sha, p in message.paths.items())
                self._gone.update(message.gone)
            elif isinstance(message, wire.Gate):
                self._limits = message
            elif isinstance(message, wire.Finish):
                if self._is_known(message.task_id):
                    self._merge = (message.task_id, self._clock() + message.within_s)
            elif isinstance(message, wire.Cancel):
                # One for a task that has ended meanwhile is late, not wrong.
                if self._is_known(message.task_id):
                    self._cancel = message
            else:
                raise ValueError(f"a {message.type!r} message does not go to the child")
            self._changed.notify_all()

    def _is_known(self, task_id: str) -> bool:
        waiting = (r.assignment.task_id for r in self._runs if isinstance(r, wire.Run))
        return task_id in (self._current, *waiting)

    def send(self, message: wire.FromChild) -> None:
        """Write one line.

        Raises:
            ChannelClosed: the daemon is gone.
        """
        try:
            self._stdout.write(wire.encode(message))
            self._stdout.flush()
        except (BrokenPipeError, ConnectionResetError) as problem:
            raise ChannelClosed from problem

    def next_run(self) -> wire.Run | wire.Measure:
        """The next task, or what is to be measured before it; blocks until there is one.

        Raises:
            ChannelClosed: the daemon is gone and no task is waiting.
        """
        with self._changed:
            self._current = ""
            while not self._runs:
                if self._closed:
                    raise ChannelClosed
                self._changed.wait()
            run = self._runs.popleft()
            if isinstance(run, wire.Measure):
                return run
            self._current = run.assignment.task_id
            if self._cancel and self._cancel.task_id != self._current:
                self._cancel = None
            if self._merge and self._merge[0] != self._current:
                self._merge = None
            self._passed.clear()
            return run

    def encoded(self) -> None:
        """The running task's result is a file now: what has passed since its last step is what the
        next one will need, too."""
        if self._passed:
            self._encode_s = self._clock() - self._passed[-1]

    def fetch(self, blobs: Iterable[BlobRef]) -> Mapping[str, Path]:
        """Local paths of ``blobs`` by SHA-256, asking the daemon for those it has not named yet.
        As soon as one of them is gone, what there is is returned without it.

        Raises:
            TaskCancelled: the task was dropped while waiting.
            ChannelClosed: the daemon is gone.
        """
        wanted = {b.sha256: b for b in blobs}
        with self._changed:
            # Paths are asked for anew for each task: the daemon's cache may have evicted them.
            for sha in wanted:
                self._have.pop(sha, None)
            self._gone.clear()
        if wanted:
            self.send(wire.Need(tuple(wanted.values())))
        with self._changed:
            while not wanted.keys() <= self._have.keys() and self._gone.isdisjoint(wanted):
                self._raise_if_over()
                self._changed.wait()
            return {sha: self._have[sha] for sha in wanted if sha in self._have}

    @property
    def exact(self) -> bool:
        """A duty cycle needs the device's own time, and so does a merge to be in time for."""
        return self._limits.share < 1 or self._merge is not None

    def __call__(self, step_seconds: float, left: int = 0) -> bool:
        """The gate between steps, see :class:`distribai.core.child.Gate` and ``Finish``.

        Raises:
            TaskCancelled: the task was dropped.
            ChannelClosed: the daemon is gone: nobody wants the result.
        """
        with self._changed:
            self._raise_if_over()
            share = self._limits.share
            if share < 1 and step_seconds > 0 and not self._limits.finish:
                self._wait(self._changed, step_seconds * (1 / share - 1))
            while self._limits.pause and not self._limits.finish:
                self._raise_if_over()
                if self._merge is not None and left:
                    return False  # nobody knows when the pause ends: the round does not wait
                self._passed.clear()  # a pause is no step's time
                self._changed.wait()
            self._raise_if_over()
            if step_seconds or left:  # not the look before the first step
                self._passed.append(self._clock())
            return not self._limits.finish and self._fits(step_seconds, left)

    def _fits(self, step_seconds: float, left: int) -> bool:
        """Whether ``left`` steps and the encoding end before the round merges."""
        if self._merge is None or not left:
            return True
        times = self._passed
        steps = len(times) - 1  # none right after the first step, or after a pause
        step_s = (times[-1] - times[0]) / steps if steps else step_seconds
        return left * step_s + self._encode_s <= self._merge[1] - times[-1]

    def _raise_if_over(self) -> None:
        if self._cancel is not None and self._cancel.task_id == self._current:
            raise TaskCancelled("task.failed", f"The task was cancelled: {self._cancel.reason}.")
        if self._closed:
            raise ChannelClosed
