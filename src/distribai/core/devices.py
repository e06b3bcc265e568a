"""What a node offers to work with, and what it is working on."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from distribai.core.needs import Isolation

DeviceType = Literal["cuda", "mps", "cpu"]


@dataclass(frozen=True, slots=True)
class Device:
    """One device of a node.

    ``index`` names it in assignments. ``memory_mb`` is what a task may use at most, in MiB; 0 means
    that the node could not tell. ``threads`` are the CPU threads that a task may use.
    """

    index: int
    type: DeviceType
    name: str = ""
    memory_mb: int = 0
    threads: int = 1


@dataclass(frozen=True, slots=True)
class Speed:
    """What a device was measured to do: ``gflops`` single-precision matrix products in 10^9
    operations a second, ``memory_gbps`` copying in 10^9 bytes a second."""

    device: int
    gflops: float
    memory_gbps: float


@dataclass(frozen=True, slots=True)
class Machine:
    """What a node's machine was measured to have; 0: not known.

    ``memory_mb`` main memory, ``disk_mb`` free disk (both MiB), ``disk_mbps`` what the disk writes
    in 10^6 bytes a second, ``link_mbps`` what came over the link and ``link_up_mbps`` what went, in
    10^6 *bits* a second, ``isolation`` the level that it offers. ``fingerprint`` says when the
    figures of another machine were meant. Of ``month_bytes`` that its owner gives each month (0: as
    many as it takes) ``month_left`` are left. ``trouble`` is why blobs do not come through over
    HTTP, in the node's words; empty when they do.
    """

    memory_mb: int = 0
    disk_mb: int = 0
    disk_mbps: float = 0.0
    link_mbps: float = 0.0
    isolation: Isolation = "L0"
    fingerprint: str = ""
    speeds: tuple[Speed, ...] = ()
    link_up_mbps: float = 0.0
    month_bytes: int = 0
    month_left: int = 0
    trouble: str = ""
    limit_down_mbps: float = 0.0
    limit_up_mbps: float = 0.0


@dataclass(frozen=True, slots=True)
class LinkFigures:
    """What of :class:`Machine` is about its link, in the same units."""

    down_mbps: float = 0.0
    up_mbps: float = 0.0
    month_bytes: int = 0
    month_left: int = 0
    trouble: str = ""
    limit_down_mbps: float = 0.0
    limit_up_mbps: float = 0.0


@dataclass(frozen=True, slots=True)
class TaskInHand:
    """A task that a node works on, or whose result nobody has acknowledged yet."""

    task_id: str
    attempt: int
    device: int = 0
