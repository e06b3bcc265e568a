"""Virtual machines, their failures, and the ceiling that these leave."""

from __future__ import annotations

import asyncio
import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from distribai.testing.simulation import Fleet, Machine, Outage, capacity, ceiling
from distribai.testing.simulation import loop as virtual

HOUR = 3600.0


def test_the_same_seed_draws_the_same_machines_and_another_one_others() -> None:
    fleet = Fleet(4, spread=0.3, between_s=600, lose_disk=0.5, keep_key=0.5)
    assert fleet.draw(1, HOUR) == fleet.draw(1, HOUR)
    assert fleet.draw(1, HOUR) != fleet.draw(2, HOUR)


def test_failures_come_as_often_and_as_badly_as_was_asked() -> None:
    fleet = Fleet(200, between_s=600, lose_disk=0.25, down_s=60, down_spread=0.0)
    machines = fleet.draw(3, 10 * HOUR)
    outages = [o for m in machines for o in m.outages]
    up = capacity(machines, 0, 10 * HOUR)  # a step takes a second
    assert up / len(outages) == pytest.approx(600, rel=0.05)
    assert sum(not o.keeps_disk for o in outages) / len(outages) == pytest.approx(0.25, abs=0.02)


def test_outages_that_overlap_are_refused() -> None:
    with pytest.raises(ValueError, match="not in order"):
        Machine("m", outages=(Outage(10, 20), Outage(25, 5)))
    with pytest.raises(ValueError, match="outside of its life"):
        Machine("m", leaves_at=20, outages=(Outage(10, 20),))


def test_who_is_away_could_not_have_computed_anything() -> None:
    machine = Machine("m", step_s=2.0, joins_at=10, leaves_at=110, outages=(Outage(50, 20),))
    assert capacity([machine], 0, 1000) == (100 - 20) / 2
    assert capacity([machine], 60, 90) == 20 / 2


def test_nothing_fails_and_the_ceiling_is_one() -> None:
    assert ceiling([Machine("a"), Machine("b", step_s=3)], [0, 100, 200]) == 1.0


def test_a_lost_disk_costs_the_round_so_far_and_a_kept_one_the_steps_since_the_checkpoint() -> None:
    machine = Machine("m", step_s=1.0, checkpoint_steps=10)

    def lost(*outages: Outage) -> float:
        broken = Machine("m", step_s=1.0, checkpoint_steps=10, outages=outages)
        rounds = [0, 100, 200]
        return (1 - ceiling([broken], rounds)) * capacity([broken], 0, 200)

    assert machine.checkpoint_steps == 10
    assert lost(Outage(137, 5, keeps_disk=True)) == pytest.approx(7)
    assert lost(Outage(137, 5, keeps_disk=False)) == pytest.approx(37)
    # What was done before an earlier outage of the round went with the disk as well, and what was
    # lost once is not lost again.
    assert lost(Outage(120, 5), Outage(155, 5, keeps_disk=False)) == pytest.approx(50)
    assert lost(
        Outage(120, 5, keeps_disk=False), Outage(155, 5, keeps_disk=False)
    ) == pytest.approx(50)
    assert lost(Outage(95, 10, keeps_disk=False)) == pytest.approx(95)
    assert lost(Outage(250, 10, keeps_disk=False)) == 0


@given(
    seed=st.integers(0, 1000),
    lose=st.sampled_from([0.0, 0.5, 1.0]),
    every=st.integers(0, 20),
    lengths=st.lists(st.floats(10, 500), min_size=1, max_size=8),
)
def test_a_ceiling_is_a_share_and_losing_disks_never_raises_it(
    seed: int, lose: float, every: int, lengths: list[float]
) -> None:
    boundaries = [5.0]
    for length in lengths:
        boundaries.append(boundaries[-1] + length)

    def at(share: float) -> float:
        fleet = Fleet(3, between_s=200, lose_disk=share, down_s=20, checkpoint_steps=every)
        return ceiling(fleet.draw(seed, 5000), boundaries)

    assert 0.0 <= at(1.0) <= at(lose) + 1e-9
    assert at(lose) <= 1.0


def test_virtual_sleepers_wake_in_order_and_no_real_time_passes() -> None:
    woken: list[tuple[str, float]] = []

    async def sleeper(name: str, seconds: float) -> None:
        await asyncio.sleep(seconds)
        woken.append((name, asyncio.get_running_loop().time()))

    async def main() -> None:
        start = asyncio.get_running_loop().time()
        await asyncio.gather(
            sleeper("year", 3e7), sleeper("second", 1), asyncio.to_thread(lambda: None)
        )
        assert [(name, round(at - start)) for name, at in woken] == [
            ("second", 1),
            ("year", 30_000_000),
        ]

    virtual.run(main())


def test_a_loop_that_waits_for_nothing_says_so() -> None:
    async def main() -> None:
        await asyncio.Event().wait()

    with pytest.raises(virtual.Stuck):
        virtual.run(main())


def test_what_a_thread_would_raise_is_raised() -> None:
    async def main() -> None:
        await asyncio.to_thread(math.sqrt, -1)

    with pytest.raises(ValueError, match="math"):
        virtual.run(main())
