"""Rate limits, pure: token buckets whose time is an argument.

:class:`Buckets` are for requests, which are refused; :class:`Flow` is for bytes, which wait.

A bucket holds up to ``burst`` tokens and gains ``rate`` a second; each request takes one. Whoever
finds it empty is told after how many seconds it holds one again. A full bucket is forgotten: it is
what an unknown caller starts with, so memory is bounded by who asked lately, and by ``capacity``.
"""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import dataclass, field

CAPACITY = 50_000
"""Callers that one set of buckets remembers, about 10 MB."""


@dataclass(frozen=True, slots=True)
class Rate:
    """``per_s`` requests a second over any long time, and ``burst`` at once. 0 a second: no
    limit."""

    per_s: float
    burst: float


@dataclass
class Buckets:
    """One bucket for each caller that was seen lately."""

    rate: Rate
    capacity: int = CAPACITY
    _left: OrderedDict[str, tuple[float, float]] = field(default_factory=OrderedDict)

    def __len__(self) -> int:
        return len(self._left)

    def take(self, key: str, now: float, cost: float = 1.0) -> float:
        """Take ``cost`` tokens at ``now`` (seconds, monotonic): 0.0, or, with nothing taken, the
        seconds after which there will be enough."""
        if self.rate.per_s <= 0:
            return 0.0
        left = self._at(key, now)
        # Who is refused was seen as well: forgotten, it would begin with a full bucket.
        self._put(key, left - cost if left >= cost else left, now)
        return 0.0 if left >= cost else (cost - left) / self.rate.per_s

    def _at(self, key: str, now: float) -> float:
        left, since = self._left.get(key, (self.rate.burst, now))
        return min(self.rate.burst, left + max(0.0, now - since) * self.rate.per_s)

    def _put(self, key: str, left: float, now: float) -> None:
        self._left[key] = (left, now)
        self._left.move_to_end(key)
        # The longest unseen are the fullest; those that are full again say nothing.
        while self._left:
            oldest = next(iter(self._left))
            if len(self._left) <= self.capacity and self._at(oldest, now) < self.rate.burst:
                return
            if oldest == key:
                return
            del self._left[oldest]


@dataclass
class Flow:
    """One bucket for bytes on their way: it lets go into debt, and whoever did waits.

    After a pause ``rate.burst`` bytes pass at once; over any longer time ``rate.per_s`` bytes a
    second and those. Who asks while others are in debt waits for them too, in order. ``rate`` may
    be changed at any time.
    """

    rate: Rate
    _left: float = 0.0
    _since: float | None = None

    def take(self, size: int, now: float) -> float:
        """Take ``size`` bytes at ``now`` (seconds, monotonic); the seconds until they may go."""
        if self.rate.per_s <= 0:
            return 0.0
        # It begins full, and time that runs backwards adds nothing.
        passed = 0.0 if self._since is None else max(0.0, now - self._since)
        left = self.rate.burst if self._since is None else self._left
        self._left = min(self.rate.burst, left + passed * self.rate.per_s) - size
        self._since = now
        return max(0.0, -self._left / self.rate.per_s)
