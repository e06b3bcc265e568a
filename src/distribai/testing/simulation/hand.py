"""One task in a virtual node's hands: the arithmetic of its progress."""

from __future__ import annotations

import asyncio
import math
from dataclasses import dataclass, field

from distribai.core.tasks import Assignment
from distribai.wire.v1 import distribai_pb2 as pb

EPSILON = 1e-6
"""Seconds: what rounding may take from a virtual moment."""


@dataclass(eq=False)
class Hand:
    """One task, from the assignment to the acknowledgement of its result.

    ``goal`` is how many steps will be handed in, ``base`` how many were done when the present run
    began at ``began`` with ``step_s`` seconds each, ``seconds`` what those took. ``sent_bytes`` of
    the upload are there already. ``result`` is owed until it is acknowledged.
    """

    task: Assignment
    device: int
    goal: int
    base: int = 0
    began: float = math.inf
    step_s: float = 1.0
    seconds: float = 0.0
    sent_bytes: float = 0.0
    result: pb.TaskResult | None = None
    dropped: bool = False
    trained: bool = False
    work: asyncio.Task[None] | None = None
    changed: asyncio.Event = field(default_factory=asyncio.Event)

    @property
    def key(self) -> tuple[str, int]:
        """Task and attempt."""
        return self.task.task_id, self.task.attempt

    def begin(self, now: float, step_s: float) -> None:
        """Start to train, or go on after a crash."""
        self.began, self.step_s = now, step_s

    def done(self, now: float) -> int:
        """Steps done by now."""
        if self.trained or now < self.began:
            return self.base
        return min(self.goal, self.base + math.floor((now - self.began + EPSILON) / self.step_s))

    @property
    def ends_at(self) -> float:
        """When the last step will be done."""
        return self.began + (self.goal - self.base) * self.step_s

    def end(self) -> None:
        """All steps are done."""
        self.seconds += (self.goal - self.base) * self.step_s
        self.base, self.began, self.trained = self.goal, math.inf, True

    def hurry(self, now: float, within_s: float, upload_s: float) -> None:
        """The round merges in ``within_s`` seconds: go on if all fits, else hand in what there is
        after the present step, at least one."""
        if self.trained or self.dropped:
            return
        if now >= self.began and self.ends_at - now + upload_s <= within_s:
            return
        done = self.done(now)
        halfway = now >= self.began and now - self.began > (done - self.base) * self.step_s
        self.goal = min(self.goal, max(1, done + halfway))
        self.changed.set()

    def crash(self, now: float, every: int) -> None:
        """Its machine dies and keeps the disk: back to the last checkpoint, one every ``every``
        steps (0: none)."""
        if not self.trained and now >= self.began:
            kept = self.base + max(0, self.done(now) // every * every - self.base) if every else 0
            self.seconds += (kept - self.base) * self.step_s
            self.base = kept
        self.began, self.work = math.inf, None
        self.changed.clear()
