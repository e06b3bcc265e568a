"""A clock that stands still until a test moves it."""

from __future__ import annotations

import asyncio
import heapq
import itertools


class FakeClock:
    """Monotonic seconds that only :meth:`advance` changes; whoever sleeps waits for it."""

    def __init__(self, start: float = 0.0) -> None:
        self._now = start
        self._order = itertools.count()
        self._sleepers: list[tuple[float, int, asyncio.Future[None]]] = []

    def monotonic(self) -> float:
        """Seconds."""
        return self._now

    @property
    def sleeping(self) -> int:
        """How many coroutines wait."""
        return sum(not future.done() for _, _, future in self._sleepers)

    async def sleep(self, seconds: float) -> None:
        """Return once the clock has been advanced by ``seconds``."""
        if seconds <= 0:
            await asyncio.sleep(0)
            return
        future = asyncio.get_running_loop().create_future()
        heapq.heappush(self._sleepers, (self._now + seconds, next(self._order), future))
        await future

    async def advance(self, seconds: float) -> None:
        """Let ``seconds`` pass: wake sleepers in the order of their times, each at its own time,
        and let the loop run between them."""
        until = self._now + seconds
        while self._sleepers and self._sleepers[0][0] <= until:
            due, _, future = heapq.heappop(self._sleepers)
            if future.done():  # its sleeper was cancelled
                continue
            self._now = due
            future.set_result(None)
            await settle()
        self._now = until
        await settle()


async def settle(turns: int = 50) -> None:
    """Let the event loop run what is ready, without waiting."""
    for _ in range(turns):
        await asyncio.sleep(0)
