"""What this machine has: memory, disk, link; and its devices' speed, measured at a quiet moment.

The grid matches tasks with it, nothing else. Measuring takes about a second and happens while no
task is in hand and the machine has nothing else to do; a machine that never rests is measured
between two tasks all the same, because that is its speed. The figures stay in the state directory
under a fingerprint of the machine and are measured again when that changes, or after a month.
"""

from __future__ import annotations

import asyncio
import hashlib
import json
import os
import shutil
import time
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Final

import psutil
import structlog

from distribai import durable
from distribai.core.devices import LinkFigures, Machine, Speed
from distribai.core.needs import Isolation
from distribai.core.plain import from_plain
from distribai.core.sealed import seal, unseal
from distribai.errors import DistribAIError
from distribai.node.clock import Clock
from distribai.node.devices import Place

log = structlog.get_logger("distribai.node")

FILE: Final = "machine"
"""In the state directory: the last measurement."""

METHOD: Final = 1
"""Raised when figures of an earlier way of measuring mean something else."""

LOOK_S: Final = 30.0
"""Seconds between two looks whether the moment is quiet."""

QUIET_LOAD: Final = 0.5
"""Processes that want to run, per core, up to which a machine counts as quiet."""

PATIENCE_S: Final = 600.0
"""After so many seconds without a quiet moment an idle one will do."""

LIFETIME_S: Final = 30 * 86400.0
"""Figures are this old at most."""

DISK_BYTES: Final = 32 << 20
"""Bytes that are written to measure the disk."""

WORTH_TELLING: Final = 0.25
"""Relative change of the link, of the free disk or of the month's bytes that the grid hears of."""

MOVING: Final = ("disk_mb", "link_mbps", "link_up_mbps", "month_left")
"""What of a machine changes all the time, see :func:`_still`."""


@dataclass(frozen=True, slots=True)
class Measured:
    """One measurement as it is kept; ``at`` in seconds since 1970 by the machine's own clock."""

    fingerprint: str
    method: int
    at: float
    disk_mbps: float
    speeds: tuple[Speed, ...]


@dataclass
class Meter:
    """Measures the machine and remembers it.

    Args:
        state: the node's state directory.
        clock: waits between looks.
        places: the devices that the node offers.
        torch: its version, part of the fingerprint.
        measure: measures one device; it waits for a task that is at work on it.
        idle: whether no task is in hand.
        link: what the transfers so far say of the link.
        isolation: the level that the node offers.
        changed: called when there is something new to tell.
        load: processes that want to run, per core.
        wall: seconds since 1970.
    """

    state: Path
    clock: Clock
    places: Sequence[Place]
    torch: str
    measure: Callable[[Place], Awaitable[Speed]]
    idle: Callable[[], bool]
    link: Callable[[], LinkFigures]
    isolation: Isolation
    changed: Callable[[], None]
    load: Callable[[], float] = field(default_factory=lambda: load_per_core)
    wall: Callable[[], float] = time.time
    _kept: Measured | None = None

    def __post_init__(self) -> None:
        self.fingerprint = fingerprint(self.places, self.torch)
        self._kept = self._load()

    def machine(self) -> Machine:
        """What is known now. The disk is looked at, which takes microseconds."""
        kept, link = self._kept, self.link()
        return Machine(
            memory_mb=psutil.virtual_memory().total >> 20,
            disk_mb=shutil.disk_usage(self.state).free >> 20,
            disk_mbps=kept.disk_mbps if kept else 0.0,
            link_mbps=link.down_mbps,
            isolation=self.isolation,
            fingerprint=self.fingerprint,
            speeds=kept.speeds if kept else (),
            link_up_mbps=link.up_mbps,
            month_bytes=link.month_bytes,
            month_left=link.month_left,
            trouble=link.trouble,
            limit_down_mbps=link.limit_down_mbps,
            limit_up_mbps=link.limit_up_mbps,
        )

    async def run(self) -> None:
        """Measure whenever it is due and the moment is right; never returns."""
        waited = 0.0
        while True:
            if self._due():
                quiet = self.load() <= QUIET_LOAD
                if self.idle() and (quiet or waited >= PATIENCE_S):
                    await self._measure(quiet)
                    waited = 0.0
                else:
                    waited += LOOK_S
            await self.clock.sleep(LOOK_S)

    def _due(self) -> bool:
        return self._kept is None or self.wall() - self._kept.at > LIFETIME_S

    async def _measure(self, quiet: bool) -> None:
        try:
            speeds = tuple([await self.measure(place) for place in self.places])
            disk = await asyncio.to_thread(disk_mbps, self.state)
        except DistribAIError as problem:
            # The next task meets the same obstacle, and tells the grid.
            log.warning("this machine could not be measured", why=problem.message)
            return
        except OSError as problem:
            log.warning("this machine's disk could not be measured", why=str(problem))
            return
        self._kept = Measured(self.fingerprint, METHOD, self.wall(), disk, speeds)
        try:
            durable.write(self.state / FILE, seal(self._kept), point="node.machine")
        except OSError as problem:
            log.warning("the machine's figures cannot be kept", why=str(problem))
        told = {f"device_{s.device}_gflops": round(s.gflops, 1) for s in speeds}
        log.info("measured", quiet=quiet, disk_mbps=round(disk), **told)
        self.changed()

    def _load(self) -> Measured | None:
        path = self.state / FILE
        if not path.is_file():
            return None
        try:
            kept = from_plain(Measured, unseal(path.read_bytes()))
        except (DistribAIError, ValueError, OSError) as problem:
            log.warning("the machine's figures cannot be read; measuring anew", why=str(problem))
            return None
        same = kept.fingerprint == self.fingerprint and kept.method == METHOD
        return kept if same else None


def worth_telling(told: Machine | None, now: Machine) -> bool:
    """Whether the grid should hear of ``now`` after ``told``."""
    if told is None:
        return True
    for name in MOVING:
        before, after = getattr(told, name), getattr(now, name)
        if abs(after - before) > WORTH_TELLING * max(before, 1.0):
            return True
    return _still(told) != _still(now)


def _still(machine: Machine) -> Machine:
    return replace(machine, disk_mb=0, link_mbps=0.0, link_up_mbps=0.0, month_left=0)


def fingerprint(places: Sequence[Place], torch: str) -> str:
    """What the speed depends on, in 16 characters: devices, cores, memory, torch."""
    facts = [
        [[p.device.type, p.device.name, p.device.threads, p.torch] for p in places],
        os.cpu_count(),
        psutil.virtual_memory().total >> 30,
        torch,
    ]
    return hashlib.sha256(json.dumps(facts).encode()).hexdigest()[:16]


def load_per_core() -> float:
    """The load average of the last minute, per core (psutil emulates it on Windows)."""
    return psutil.getloadavg()[0] / (os.cpu_count() or 1)


def disk_mbps(folder: Path) -> float:
    """What the disk under ``folder`` writes durably, in 10^6 bytes a second. Blocking.

    Raises:
        OSError: it is full, or refuses.
    """
    path = folder / f"{FILE}.probe"
    block = os.urandom(1 << 20)  # not zeros, which some file systems do not store
    try:
        began = time.perf_counter()
        with path.open("wb") as file:
            for _ in range(DISK_BYTES >> 20):
                file.write(block)
            file.flush()
            os.fsync(file.fileno())
        return DISK_BYTES / max(time.perf_counter() - began, 1e-6) / 1e6
    finally:
        path.unlink(missing_ok=True)
