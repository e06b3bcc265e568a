"""What tasks need and machines have."""

from __future__ import annotations

from dataclasses import replace

import pytest

from distribai.core.devices import Machine, Speed
from distribai.core.needs import LEVELS, NOTHING, UNMEASURED, Capacity, Needs, capacity_of, lacks
from distribai.core.plain import to_plain

RICH = Capacity(64_000, 500_000, 900.0, 100.0, True, "L2")


def test_who_needs_nothing_can_go_anywhere() -> None:
    assert lacks(NOTHING, UNMEASURED) == ""
    assert lacks(NOTHING, replace(UNMEASURED, trusted=False)) == ""


@pytest.mark.parametrize(
    ("needs", "what"),
    [
        (Needs(host_memory_mb=64_001), "64e+03 MB of main memory"),
        (Needs(disk_mb=500_001), "of free disk"),
        (Needs(gflops=901.0), "901 GFLOP/s of speed, and the machine has 900"),
        (Needs(link_mbps=101.0), "101 Mbit/s of link"),
        (Needs(isolation="L3"), "isolation L3, and the machine offers L2"),
    ],
)
def test_what_is_lacking_is_said(needs: Needs, what: str) -> None:
    if "64e+03" not in what:
        assert what in lacks(needs, RICH)
    assert lacks(needs, RICH)
    assert lacks(needs, replace(RICH, trusted=False))


def test_what_was_never_measured_does_not_count_as_there() -> None:
    assert "has never measured it" in lacks(Needs(gflops=0.1), UNMEASURED)
    assert "has never measured it" in lacks(Needs(disk_mb=1), capacity_of(None, 0, True))


def test_a_node_on_probation_is_no_trusted_one() -> None:
    asked = Needs(standing="trusted")
    assert lacks(asked, RICH) == ""
    assert "probation" in lacks(asked, replace(RICH, trusted=False))


def test_each_level_of_isolation_includes_those_below_it() -> None:
    for i, offered in enumerate(LEVELS):
        for j, asked in enumerate(LEVELS):
            fits = not lacks(Needs(isolation=asked), replace(UNMEASURED, isolation=offered))
            assert fits is (j <= i)


def test_the_capacity_of_a_device_is_its_own_speed_and_its_machine_s_rest() -> None:
    speeds = (Speed(0, 10.0, 5.0), Speed(2, 900.0, 300.0))
    machine = to_plain(Machine(64_000, 500_000, 800.0, 100.0, "L2", "f", speeds))
    assert capacity_of(machine, 2, True) == RICH
    assert capacity_of(machine, 1, True) == replace(RICH, gflops=0.0)
