from __future__ import annotations

import asyncio
import itertools
import random

import pytest

from distribai.node.clock import SystemClock, full_jitter, reconnecting, within
from distribai.testing.clock import FakeClock, settle


def test_waits_are_uniform_below_a_bound_that_doubles_up_to_a_cap() -> None:
    class Highest(random.Random):
        def uniform(self, a: float, b: float) -> float:
            assert a == 0
            return b

    waits = list(itertools.islice(full_jitter(Highest()), 8))
    assert waits == [0.5, 1, 2, 4, 8, 16, 30, 30]


def test_a_node_that_has_lost_its_grid_tries_often_for_a_while() -> None:
    class Highest(random.Random):
        def uniform(self, a: float, b: float) -> float:
            return b

    waits = list(itertools.islice(reconnecting(Highest()), 14))
    assert waits == [0.5, 1, 2, 4, *[5] * 6, 10, 20, 30, 30]


async def test_work_that_is_quick_enough_gives_its_result() -> None:
    async def work() -> int:
        return 7

    assert await within(FakeClock(), 1.0, work()) == 7


async def test_work_that_takes_too_long_is_cancelled_and_has_ended() -> None:
    clock, ended = FakeClock(), False

    async def work() -> None:
        nonlocal ended
        try:
            await asyncio.Event().wait()
        finally:
            await asyncio.sleep(0)
            ended = True

    limited = asyncio.ensure_future(within(clock, 5.0, work()))
    await settle()
    await clock.advance(4.9)
    assert not limited.done()
    await clock.advance(0.1)
    with pytest.raises(TimeoutError):
        await limited
    assert ended


async def test_the_fake_clock_wakes_sleepers_in_order_at_their_own_times() -> None:
    clock, woken = FakeClock(100.0), []

    async def sleeper(seconds: float) -> None:
        await clock.sleep(seconds)
        woken.append((seconds, clock.monotonic()))

    tasks = [asyncio.ensure_future(sleeper(s)) for s in (3.0, 1.0, 2.0)]
    await settle()
    assert clock.sleeping == 3
    tasks[2].cancel()
    await settle()
    await clock.advance(10.0)
    assert woken == [(1.0, 101.0), (3.0, 103.0)]
    assert clock.monotonic() == 110.0


async def test_the_system_clock_goes_on() -> None:
    clock = SystemClock()
    before = clock.monotonic()
    await clock.sleep(0)
    assert clock.monotonic() >= before
