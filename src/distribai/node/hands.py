"""The tasks that a node has in hand: from the assignment until the result is acknowledged."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from dataclasses import dataclass

from distribai.core.devices import TaskInHand
from distribai.core.tasks import Assignment
from distribai.node.keeping import Keeper
from distribai.wire.v1 import distribai_pb2 as pb

Key = tuple[str, int]
"""Task id and attempt."""


@dataclass(slots=True, eq=False)
class Hand:
    """One task.

    It is *taken* once its record is on disk, and at work until it has a ``result``, which is then
    owed until the orchestrator has acknowledged it. A *dropped* one is being stopped; nobody waits
    for its result.
    """

    assignment: Assignment
    device: int
    keeper: Keeper
    taken: bool = False
    work: asyncio.Task[None] | None = None
    result: pb.TaskResult | None = None
    dropped: bool = False

    @property
    def key(self) -> Key:
        """Task and attempt."""
        return (self.assignment.task_id, self.assignment.attempt)


class Hands:
    """All tasks in hand, by task and attempt."""

    def __init__(self) -> None:
        self._all: dict[Key, Hand] = {}
        self._changed = asyncio.Event()

    def __iter__(self) -> Iterator[Hand]:
        return iter(list(self._all.values()))

    def get(self, task_id: str, attempt: int) -> Hand | None:
        """The task under exactly this attempt."""
        return self._all.get((task_id, attempt))

    def of_task(self, task_id: str) -> list[Hand]:
        """The task under any attempt."""
        return [hand for hand in self if hand.assignment.task_id == task_id]

    def busy(self, device: int) -> bool:
        """Whether a task that somebody waits for is at work on the device."""
        return any(h.device == device and h.result is None and not h.dropped for h in self)

    def work_for(self, job_id: str) -> bool:
        """Whether a task of the job that somebody waits for is at work."""
        at_work = (h for h in self if h.result is None and not h.dropped)
        return any(h.assignment.job_id == job_id for h in at_work)

    def add(self, hand: Hand) -> None:
        """Take a task in hand."""
        self._all[hand.key] = hand

    def remove(self, hand: Hand) -> None:
        """Let a task go, on disk too."""
        if self._all.get(hand.key) is hand:
            del self._all[hand.key]
            hand.keeper.forget()
        self._changed.set()

    def end(self, hand: Hand, result: pb.TaskResult) -> None:
        """The task's work has ended; its result is owed."""
        hand.result = result
        self._changed.set()

    def told(self) -> list[TaskInHand]:
        """What the orchestrator is told about."""
        return [TaskInHand(*hand.key, hand.device) for hand in self if not hand.dropped]

    def owed(self) -> list[pb.TaskResult]:
        """Results that are not acknowledged yet."""
        return [hand.result for hand in self if hand.result is not None]

    def at_work(self) -> list[Hand]:
        """Tasks without a result."""
        return [hand for hand in self if hand.result is None]

    async def idle(self) -> None:
        """Return when no task is at work."""
        while self.at_work():
            self._changed.clear()
            await self._changed.wait()

    async def settled(self) -> None:
        """Return when no task is in hand at all."""
        while self._all:
            self._changed.clear()
            await self._changed.wait()
