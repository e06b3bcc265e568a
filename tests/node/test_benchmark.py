"""What a node says of its machine, and when it measures."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from pathlib import Path

from distribai.core.devices import Device, LinkFigures, Machine, Speed
from distribai.errors import Unavailable
from distribai.node.benchmark import (
    FILE,
    LIFETIME_S,
    LOOK_S,
    PATIENCE_S,
    Meter,
    disk_mbps,
    fingerprint,
    load_per_core,
    worth_telling,
)
from distribai.node.devices import Place
from distribai.testing.clock import FakeClock
from tests.node.helpers import eventually

PLACE = Place(Device(0, "cpu", "fast", 1000, 2), "cpu")


class Bench:
    """A machine whose load and hands a test decides."""

    def __init__(self, state: Path) -> None:
        self.state, self.clock = state, FakeClock()
        self.idle, self.load, self.wall = True, 0.0, 1e9
        self.measured = 0
        self.told = 0
        self.problem: Unavailable | None = None

    async def measure(self, place: Place) -> Speed:
        self.measured += 1
        if self.problem is not None:
            raise self.problem
        return Speed(place.device.index, 100.0 * self.measured, 20.0)

    def tell(self) -> None:
        self.told += 1

    def meter(self, torch: str = "2.13") -> Meter:
        return Meter(
            state=self.state,
            clock=self.clock,
            places=(PLACE,),
            torch=torch,
            measure=self.measure,
            idle=lambda: self.idle,
            link=lambda: LinkFigures(12.0, 3.0, 1000, 400),
            isolation="L0",
            changed=self.tell,
            load=lambda: self.load,
            wall=lambda: self.wall,
        )


async def run(meter: Meter, looks: int = 1) -> None:
    """Let a meter look once, and so often more."""
    clock = meter.clock
    assert isinstance(clock, FakeClock)
    task = asyncio.ensure_future(meter.run())
    await eventually(lambda: clock.sleeping)  # the disk is measured in a thread
    for _ in range(looks):
        await clock.advance(LOOK_S)
        await eventually(lambda: clock.sleeping)
    task.cancel()
    await asyncio.wait({task})


async def test_an_idle_machine_is_measured_once_and_remembers_it(tmp_path: Path) -> None:
    bench = Bench(tmp_path)
    meter = bench.meter()
    assert meter.machine().speeds == ()
    assert meter.machine().memory_mb > 0
    assert meter.machine().disk_mb > 0
    await run(meter, looks=3)
    assert (bench.measured, bench.told) == (1, 1)
    machine = meter.machine()
    assert machine.speeds == (Speed(0, 100.0, 20.0),)
    assert machine.disk_mbps > 0
    assert (machine.link_mbps, machine.link_up_mbps, machine.isolation) == (12.0, 3.0, "L0")
    assert (machine.month_bytes, machine.month_left) == (1000, 400)
    again = bench.meter()
    assert again.machine().speeds == machine.speeds, "a restart does not measure anew"
    await run(again)
    assert bench.measured == 1


async def test_figures_of_another_machine_or_of_long_ago_are_measured_anew(tmp_path: Path) -> None:
    bench = Bench(tmp_path)
    await run(bench.meter())
    assert bench.meter(torch="3.0").machine().speeds == ()
    bench.wall += LIFETIME_S + 1
    old = bench.meter()
    assert old.machine().speeds, "old figures are better than none"
    await run(old)
    assert bench.measured == 2
    (tmp_path / FILE).write_bytes(b"torn")
    assert bench.meter().machine().speeds == ()


async def test_a_busy_machine_waits_for_a_quiet_moment_but_not_for_ever(tmp_path: Path) -> None:
    bench = Bench(tmp_path)
    bench.load = 0.9
    await run(bench.meter(), looks=3)
    assert bench.measured == 0
    bench.load, bench.idle = 0.0, False
    await run(bench.meter(), looks=int(PATIENCE_S / LOOK_S) + 2)
    assert bench.measured == 0, "never beside a task"
    bench.load, bench.idle = 0.9, True
    await run(bench.meter(), looks=int(PATIENCE_S / LOOK_S) + 1)
    assert bench.measured == 1


async def test_a_machine_that_cannot_be_measured_says_nothing_and_is_asked_again(
    tmp_path: Path,
) -> None:
    bench = Bench(tmp_path)
    bench.problem = Unavailable("node.child", "The device cannot be measured: it is too warm.")
    meter = bench.meter()
    await run(meter, looks=2)
    assert bench.measured == 3
    assert bench.told == 0
    assert meter.machine().speeds == ()


def test_small_changes_of_link_and_disk_are_not_worth_telling() -> None:
    told = Machine(1000, 10_000, 500.0, 100.0, "L0", "f", (Speed(0, 1.0, 1.0),))
    assert worth_telling(None, told)
    assert not worth_telling(told, replace(told, disk_mb=9_000, link_mbps=110.0))
    assert worth_telling(told, replace(told, disk_mb=5_000))
    assert worth_telling(told, replace(told, link_mbps=10.0))
    assert worth_telling(told, replace(told, link_up_mbps=10.0))
    assert worth_telling(replace(told, month_left=10**9), replace(told, month_left=0))
    assert worth_telling(told, replace(told, speeds=()))
    assert worth_telling(told, replace(told, trouble="nothing comes"))
    assert worth_telling(told, replace(told, limit_up_mbps=1.0))


def test_the_fingerprint_tells_machines_apart() -> None:
    other = replace(PLACE, device=replace(PLACE.device, name="another"))
    assert fingerprint((PLACE,), "2") == fingerprint((PLACE,), "2")
    assert len({fingerprint(p, t) for p in ((PLACE,), (other,)) for t in "23"}) == 4


def test_the_disk_probe_leaves_nothing_behind(tmp_path: Path) -> None:
    assert disk_mbps(tmp_path) > 0
    assert list(tmp_path.iterdir()) == []
    assert load_per_core() >= 0
