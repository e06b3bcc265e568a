"""Time and chance as arguments: what the node asks of its clock."""

from __future__ import annotations

import asyncio
import itertools
import math
import random
import time
from collections.abc import Coroutine, Iterator
from typing import Any, Protocol, TypeVar

T = TypeVar("T")


class Clock(Protocol):
    """Monotonic seconds, and waiting."""

    def monotonic(self) -> float:
        """Seconds from an arbitrary start."""
        ...

    async def sleep(self, seconds: float) -> None:
        """Return after ``seconds``."""
        ...


class SystemClock:
    """The machine's clock."""

    def monotonic(self) -> float:
        """Seconds from an arbitrary start."""
        return time.monotonic()

    async def sleep(self, seconds: float) -> None:
        """Return after ``seconds``."""
        await asyncio.sleep(seconds)


async def within(clock: Clock, seconds: float, work: Coroutine[Any, Any, T]) -> T:
    """The result of ``work``, which is cancelled when it takes longer than ``seconds``.

    Returns only when ``work`` has ended, by being cancelled too.

    Raises:
        TimeoutError: it did.
    """
    task = asyncio.ensure_future(work)
    limit = asyncio.ensure_future(clock.sleep(seconds))
    try:
        await asyncio.wait({task, limit}, return_when=asyncio.FIRST_COMPLETED)
        if not task.done():
            raise TimeoutError
        return task.result()
    finally:
        task.cancel()
        limit.cancel()
        await asyncio.wait({task, limit})


def full_jitter(
    rng: random.Random,
    base: float = 0.5,
    cap: float = 30.0,
    *,
    early: float = math.inf,
    tries: int = 0,
) -> Iterator[float]:
    """Endless waits: uniform between 0 and a bound that doubles from ``base`` to ``cap`` seconds,
    and for the first ``tries`` waits no further than to ``early``.

    "Full jitter" of M. Brooker, "Exponential Backoff And Jitter" (AWS Architecture Blog, 2015):
    of the variants compared there, the one with the least work for the server that comes back.
    """
    bound = base
    for number in itertools.count(1):
        yield rng.uniform(0, bound)
        bound = min(cap, early if number < tries else cap, 2 * bound)


EARLY_S, EARLY_TRIES = 5.0, 10
"""The longest wait between two tries to connect, and how many waits it holds for: some 20 s, in
which an orchestrator that is restarted is back. Two thousand nodes then come at 400 a second."""


def reconnecting(rng: random.Random) -> Iterator[float]:
    """The waits of a node that has lost its grid: short ones at first, then up to 30 s."""
    return full_jitter(rng, early=EARLY_S, tries=EARLY_TRIES)
