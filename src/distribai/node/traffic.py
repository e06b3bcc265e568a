"""The node's bytes: how fast they may go, how many a month, and how fast they really came.

Every blob passes here on its way. Its owner's limits are token buckets, one for each direction;
what is sent waits before it goes, what comes is read only as fast as it may. What the month has
taken (the calendar month of this machine's clock, both directions, blobs and messages) is kept in
the state directory, written every few seconds: a daemon that is killed forgets at most those.

How fast the link is comes from these transfers alone: nothing is sent to measure it. A direction
is at work from the first byte of a transfer to the last; bytes over that time, the newest
64 MiB counting half, are what the grid is told.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import structlog

from distribai import durable
from distribai.core.devices import LinkFigures
from distribai.core.limits import Flow, Rate
from distribai.core.plain import from_plain
from distribai.core.sealed import seal, unseal
from distribai.core.traffic import FILE, MBPS, Kept, Seen, within
from distribai.errors import DistribAIError, NotAllowed
from distribai.node.clock import Clock

log = structlog.get_logger("distribai.node")

KEEP_S: Final = 5.0
"""Seconds between two looks at whether there is something to keep on disk, or a new month."""

SMOOTH_S: Final = 0.1
"""A limited direction sends so much at once, and may be ahead by as much: short enough that others
at the same link notice nothing."""

LEAST_CHUNK: Final = 4096
MOST_CHUNK: Final = 1 << 18

MONTHS: Final = 6
"""Months that are remembered: a clock that is wrong for a while forgets nothing."""


class Lane:
    """One direction.

    Args:
        limit_mbps: its owner's limit, 10^6 bits a second; 0: none.
        seen: what an earlier daemon knew.
    """

    def __init__(self, limit_mbps: float, clock: Clock, seen: Seen) -> None:
        rate = limit_mbps * MBPS
        self.chunk = MOST_CHUNK
        """Bytes to send at a time."""
        if rate:
            self.chunk = int(min(MOST_CHUNK, max(LEAST_CHUNK, rate * SMOOTH_S)))
        self.limit_mbps = limit_mbps
        self._flow = Flow(Rate(rate, float(self.chunk)))
        self._clock = clock
        self._at_work = self._moved = 0
        self._began = 0.0
        self.seen = seen
        self.total = self.due = 0
        """Bytes that have moved, and that transfers at work still have to move."""

    @property
    def mbps(self) -> float:
        """10^6 bits a second that it brings; 0: not known."""
        return within(self.seen.mbps, self.limit_mbps)

    @contextmanager
    def transfer(self, size: int) -> Iterator[Transfer]:
        """While ``size`` bytes move; transfers at the same time share their seconds."""
        if not self._at_work:
            self._began, self._moved = self._clock.monotonic(), 0
        self._at_work += 1
        self.due += size
        moving = Transfer(self, size)
        try:
            yield moving
        finally:
            self.due -= moving.due
            self._at_work -= 1
            if not self._at_work and self._moved:
                seconds = self._clock.monotonic() - self._began
                self.seen = self.seen.after(self._moved, seconds)

    def count(self, size: int) -> float:
        """``size`` bytes move; the seconds until they may."""
        self.total += size
        self._moved += size
        return self._flow.take(size, self._clock.monotonic())

    async def wait(self, seconds: float) -> None:
        """Let ``seconds`` pass."""
        if seconds:
            await self._clock.sleep(seconds)


@dataclass
class Transfer:
    """A blob on its way; ``due`` bytes of it have still to move."""

    lane: Lane
    due: int

    async def go(self, size: int) -> None:
        """Count ``size`` bytes; return when they may be sent, or more be read."""
        moved = min(size, self.due)
        self.due -= moved
        self.lane.due -= moved
        await self.lane.wait(self.lane.count(size))


class Traffic:
    """The bytes of one daemon.

    Args:
        state: the node's state directory; None keeps nothing.
        clock: paces.
        up_mbps, down_mbps: the owner's limits, 10^6 bits a second; 0: none.
        month_bytes: what a month may take, both directions; 0: no limit.
        stream: bytes of messages since the daemon started, both directions. They go on when the
            month is used up, else nobody would hear why.
        changed: called when :meth:`why_not` has something new to say, or :meth:`stuck` was told
            something new.
        wall: seconds since 1970.
    """

    def __init__(
        self,
        state: Path | None,
        clock: Clock,
        *,
        up_mbps: float = 0.0,
        down_mbps: float = 0.0,
        month_bytes: int = 0,
        stream: Callable[[], int] = lambda: 0,
        changed: Callable[[], None] = lambda: None,
        wall: Callable[[], float] = time.time,
    ) -> None:
        self._path = None if state is None else state / FILE
        self._clock = clock
        self._budget = month_bytes
        self._stream = stream
        self._changed = changed
        self._wall = wall
        self._written = kept = self._load()
        self._months = dict(kept.months)
        self._counted = self._wanted = 0
        self._largest_up = kept.largest_up
        self._told = False
        self._trouble = ""
        self.up = Lane(up_mbps, clock, kept.up)
        self.down = Lane(down_mbps, clock, kept.down)

    # -------------------------------------------------------------- bytes on their way

    @contextmanager
    def sending(self, size: int) -> Iterator[Transfer]:
        """While a blob's ``size`` bytes are sent.

        Raises:
            NotAllowed: ``node.month``: the month does not have so many; none has moved.
        """
        self.check(size)
        self._largest_up = max(self._largest_up, size)
        with self.up.transfer(size) as moving:
            yield moving

    @contextmanager
    def receiving(self, size: int) -> Iterator[Transfer]:
        """While a blob's ``size`` bytes come.

        Raises:
            NotAllowed: ``node.month``: the month does not have so many; none has moved.
        """
        self.check(size)
        with self.down.transfer(size) as moving:
            yield moving

    def check(self, size: int) -> None:
        """Refuse ``size`` bytes that the month does not have.

        Raises:
            NotAllowed: ``node.month``.
        """
        left = self.left
        if left is None or size <= left - self.up.due - self.down.due:
            return
        self._wanted = max(self._wanted, size)
        self._look()
        raise NotAllowed(
            "node.month",
            f"{self._used_words()}: {_words(size)} more do not fit.",
            "It goes on with the next month, or with a larger node.month_bytes.",
        )

    # -------------------------------------------------------------- the month

    @property
    def left(self) -> int | None:
        """Bytes that this month still has; None: there is no limit."""
        return max(0, self._budget - self._account()) if self._budget else None

    @property
    def total(self) -> int:
        """Bytes of blobs that have moved, both ways."""
        return self.up.total + self.down.total

    def why_not(self) -> str:
        """Why no task should be taken, for people; empty when there is no reason. A task is
        expected to move as much each way as the largest blob that was sent, and what was refused
        is not tried again."""
        left = self.left
        if left is None or left > max(2 * self._largest_up, self._wanted - 1):
            return ""
        return f"{self._used_words()}; it goes on with the next month, or with a larger limit"

    def figures(self) -> LinkFigures:
        """What the grid is told of the link."""
        left = self.left
        return LinkFigures(
            down_mbps=self.down.mbps,
            up_mbps=self.up.mbps,
            month_bytes=self._budget,
            month_left=0 if left is None else left,
            limit_down_mbps=self.down.limit_mbps,
            limit_up_mbps=self.up.limit_mbps,
            trouble=self._trouble,
        )

    def stuck(self, why: str) -> None:
        """Blobs do not come through, and the grid shall hear why; an empty reason: they do again.
        The first reason stands until then."""
        if bool(why) != bool(self._trouble):
            self._trouble = why
            self._changed()

    async def run(self) -> None:
        """Notice a new month, and keep what was counted; never returns."""
        while True:
            self._look()
            await asyncio.to_thread(self._write, self._now())
            await self._clock.sleep(KEEP_S)

    def close(self) -> None:
        """Keep what was counted. Blocking."""
        self._write(self._now())

    def _account(self) -> int:
        """Count what has moved since the last call; the bytes of this month."""
        month = self._month()
        if month not in self._months:
            self._wanted = 0  # what was refused in the last one may be asked for again
        total = self.total + self._stream()
        used = self._months.pop(month, 0) + total - self._counted
        self._months[month], self._counted = used, total
        while len(self._months) > MONTHS:
            del self._months[next(iter(self._months))]
        return used

    def _look(self) -> None:
        why = self.why_not()
        if bool(why) != self._told:
            log.info("monthly bytes", takes_tasks=not why, why=why)
            self._told = bool(why)
            self._changed()

    def _month(self) -> str:
        return time.strftime("%Y-%m", time.localtime(self._wall()))

    def _used_words(self) -> str:
        given, used = _words(self._budget), _words(self._account())
        return f"its owner gives {given} a month, and {used} of {self._month()} are used"

    def _now(self) -> Kept:
        self._account()
        return Kept(
            dict(self._months),
            self.up.seen,
            self.down.seen,
            self._largest_up,
            self._budget,
            self.why_not(),
            self.up.limit_mbps,
            self.down.limit_mbps,
        )

    def _write(self, kept: Kept) -> None:
        if self._path is None or kept == self._written:
            return
        try:
            durable.write(self._path, seal(kept), point="node.traffic")
            self._written = kept
        except OSError as problem:
            log.warning("the month's bytes cannot be kept", why=str(problem))

    def _load(self) -> Kept:
        if self._path is None or not self._path.is_file():
            return Kept()
        try:
            return from_plain(Kept, unseal(self._path.read_bytes()))
        except (DistribAIError, ValueError, OSError) as problem:
            log.warning("the month's bytes cannot be read; counting anew", why=str(problem))
            return Kept()


def _words(size: int) -> str:
    unit, name = next((u for u in ((1e9, "GB"), (1e6, "MB")) if size >= u[0]), (1e3, "kB"))
    return f"{size / unit:.4g} {name}"
