"""What a node offers to work with, and what it is working on."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

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
class TaskInHand:
    """A task that a node works on, or whose result nobody has acknowledged yet."""

    task_id: str
    attempt: int
    device: int = 0
