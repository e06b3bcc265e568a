"""What runs tasks. One file per executor, found by name; a test lists them.

A module of this package that has ``NAME`` and ``make(services) -> Executor`` is an executor; a task
names it in ``TaskAssign.executor``.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Protocol

from distribai.core.child import Checkpoints, Gate, LogLine, Ready
from distribai.core.devices import Speed
from distribai.core.scan import modules
from distribai.core.tasks import Assignment, Outcome, Progress
from distribai.node.begun import Begun
from distribai.node.blobs import BlobClient
from distribai.node.cache import BlobCache
from distribai.node.clock import Clock
from distribai.node.devices import Place
from distribai.node.feedback import FeedbackStore
from distribai.node.fetching import Fetcher
from distribai.node.keeping import Keeper


class Listener(Protocol):
    """Where a running task's news go."""

    def progress(self, progress: Progress) -> None:
        """How far the task is; as often as the executor likes."""
        ...

    def log(self, task_id: str, line: LogLine) -> None:
        """Something for the job's owner."""
        ...


@dataclass(frozen=True, slots=True)
class Services:
    """What the daemon lends to its executors.

    ``log_dir`` holds their children's standard error. ``gate`` gives what the governor wants now.
    ``checkpoints`` says how running tasks are kept on disk; ``feedback`` keeps what deltas did not
    send, ``begun`` which snapshots were begun to fetch. Progress is worth a message every
    ``progress_s`` at most.
    """

    cache: BlobCache
    blobs: BlobClient
    fetcher: Fetcher
    begun: Begun
    clock: Clock
    listener: Listener
    log_dir: Path
    gate: Callable[[], Gate]
    feedback: FeedbackStore
    command: Sequence[str] = ()
    checkpoints: Checkpoints = field(default_factory=Checkpoints)
    progress_s: float = 2.0


class Executor(Protocol):
    """Runs tasks, one at a time."""

    async def start(self) -> Ready:
        """Be ready for tasks, and say what there is to run them on.

        Raises:
            DistribAIError: this machine cannot run tasks of this executor.
        """
        ...

    async def run(self, assignment: Assignment, place: Place, keeper: Keeper) -> Outcome:
        """Run a task to its end. Whatever goes wrong with it is in the outcome, whose delta is
        uploaded already. Cancelling this coroutine ends the work at once. What an earlier daemon
        had of the task is in ``keeper`` and its folder: go on from there."""
        ...

    async def measure(self, place: Place) -> Speed:
        """How fast a device is; waits for a task that is at work.

        Raises:
            Unavailable: ``node.child`` or ``node.memory``: it could not be measured.
        """
        ...

    async def finish(self, assignment: Assignment) -> None:
        """The task's round merges at ``keeper.merges_at``, which is new: have it end in time."""
        ...

    async def cancel(self, assignment: Assignment, reason: str) -> bool:
        """Have the task end early. True: its :meth:`run` will return soon. False: it is not at
        work now (it waits, or uploads); cancelling :meth:`run` costs nothing."""
        ...

    async def gate(self, gate: Gate) -> None:
        """Pass on what the governor wants from now on."""
        ...

    def held_versions(self) -> Mapping[str, int]:
        """Canonical versions that are in memory, by job."""
        ...

    async def forget(self, job_ids: Collection[str]) -> None:
        """Jobs have ended; what was kept for them may go."""
        ...

    async def close(self) -> None:
        """End everything that was started."""
        ...


def failed(assignment: Assignment, code: str, reason: str) -> Outcome:
    """A failed attempt."""
    return Outcome(assignment.task_id, assignment.attempt, "failed", error_code=code, reason=reason)


def find() -> dict[str, Callable[[Services], Executor]]:
    """Every executor of this package by its name."""
    return {module.NAME: module.make for module in modules(__name__)}
