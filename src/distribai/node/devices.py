"""Which devices the node offers: what the training child can use, and the machine's figures."""

from __future__ import annotations

import os
import platform
from dataclasses import dataclass
from typing import get_args

import psutil

from distribai.core.child import Ready
from distribai.core.devices import Device, DeviceType
from distribai.errors import UsageError

PREFERENCE: tuple[DeviceType, ...] = get_args(DeviceType)
"""What ``auto`` takes first: cuda, mps, cpu."""


@dataclass(frozen=True, slots=True)
class Place:
    """A device as the grid knows it, and torch's name for it (``cpu``, ``cuda``, ``cuda:1``)."""

    device: Device
    torch: str


def choose(wanted: str, ready: Ready) -> DeviceType:
    """The device type to train on. ``wanted`` is ``auto``, a type, or ``cuda:1`` and such.

    Raises:
        UsageError: ``config.invalid``, the machine has no such device.
    """
    for kind in PREFERENCE:
        if kind in ready.devices and (wanted == "auto" or wanted.split(":")[0] == kind):
            return kind
    raise UsageError(
        "config.invalid",
        f"This machine has no device {wanted!r} (torch {ready.torch} offers "
        f"{', '.join(ready.devices) or 'none'}).",
        "Use --device auto.",
        field="device",
    )


def threads(wanted: int) -> int:
    """CPU threads that a task may use: the setting, or every core this process may run on."""
    if wanted > 0:
        return wanted
    affinity = getattr(os, "sched_getaffinity", None)  # containers and taskset; not on macOS
    return len(affinity(0)) if affinity is not None else os.cpu_count() or 1


def offer(wanted: str, ready: Ready, thread_count: int) -> tuple[Place, ...]:
    """What the node offers, numbered from 0; one device for now.

    Memory of the CPU, and of MPS which shares it, is the machine's; an accelerator's is what the
    child could tell.

    Raises:
        UsageError: as :func:`choose`.
    """
    kind = choose(wanted, ready)
    memory = ready.memory_mb.get(kind, 0)
    if kind != "cuda" and not memory:
        memory = psutil.virtual_memory().total // 2**20
    name = ready.names.get(kind, "") or platform.processor() or platform.machine()
    device = Device(0, kind, name, memory, thread_count)
    return (Place(device, kind if wanted == "auto" else wanted),)
