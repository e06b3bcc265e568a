"""What a task needs of a machine beside its device's type and memory, and what a machine has.

What a device has is measured on it at a quiet moment (``node.benchmark``) and told by its node. It
decides where work goes and nothing else: no credit, no verdict. What was never measured does not
count as there: a task that asks for speed goes to no device whose speed is unknown.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final, Literal, get_args

Isolation = Literal["L0", "L1", "L2", "L3"]
"""Levels of isolation, from none to most (trust.md T7)."""

LEVELS: Final[tuple[Isolation, ...]] = get_args(Isolation)


@dataclass(frozen=True, slots=True)
class Needs:
    """What a task asks for; 0 and the first word of a choice ask for nothing.

    ``host_memory_mb`` main memory of the machine and ``disk_mb`` free disk, in MiB; ``gflops``
    single-precision matrix products of the device, 10^9 operations a second; ``link_mbps`` 10^6
    bits a second from the grid; ``standing`` of the node; ``isolation`` at least.
    """

    host_memory_mb: int = 0
    disk_mb: int = 0
    gflops: float = 0.0
    link_mbps: float = 0.0
    standing: Literal["any", "trusted"] = "any"
    isolation: Isolation = "L0"


NOTHING: Final = Needs()
"""What most tasks need."""


@dataclass(frozen=True, slots=True)
class Capacity:
    """What a device and its machine have, in the units of :class:`Needs`; 0: not known."""

    host_memory_mb: int = 0
    disk_mb: int = 0
    gflops: float = 0.0
    link_mbps: float = 0.0
    trusted: bool = True
    isolation: Isolation = "L0"


UNMEASURED: Final = Capacity()


def capacity_of(machine: Mapping[str, Any] | None, device: int, trusted: bool) -> Capacity:
    """What one device of a measured machine has; of one never measured nothing is known.

    ``machine`` is the plain form of :class:`distribai.core.devices.Machine`: ten thousand of them
    are read at each look of the scheduler.
    """
    if machine is None:
        return Capacity(trusted=trusted)
    return Capacity(
        host_memory_mb=machine["memory_mb"],
        disk_mb=machine["disk_mb"],
        gflops=next((s["gflops"] for s in machine["speeds"] if s["device"] == device), 0.0),
        link_mbps=machine["link_mbps"],
        trusted=trusted,
        isolation=machine["isolation"],
    )


def lacks(needs: Needs, has: Capacity) -> str:
    """The first thing that a device lacks for a task, for people; empty when it has all of it."""
    for wanted, there, unit, what in (
        (needs.host_memory_mb, has.host_memory_mb, "MB", "of main memory"),
        (needs.disk_mb, has.disk_mb, "MB", "of free disk"),
        (needs.gflops, has.gflops, "GFLOP/s", "of speed"),
        (needs.link_mbps, has.link_mbps, "Mbit/s", "of link"),
    ):
        if there < wanted:
            known = f"has {there:.4g}" if there else "has never measured it"
            return f"it needs {wanted:.4g} {unit} {what}, and the machine {known}"
    if needs.standing == "trusted" and not has.trusted:
        return "it needs a trusted node, and this one is on probation"
    if LEVELS.index(has.isolation) < LEVELS.index(needs.isolation):
        return f"it needs isolation {needs.isolation}, and the machine offers {has.isolation}"
    return ""
