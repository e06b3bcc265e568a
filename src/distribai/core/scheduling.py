"""Which queued task goes to which free device: a pure matching that says why a task waits.

Tasks are served by tier (P0 first), then by phase, then by age. Inside a tier a sample that a
person waits for comes first, then training, then evaluation: a loss may come later, while a round
waits for its slowest slot. Ties go by task id, so equal inputs give equal matches.

A task takes, in this order:

1. the device that its slot was meant for,
2. a device whose child is warm for the job: with the newest version up to the one the task needs,
   else with a newer one,
3. an accelerator before a CPU, and of each kind the device with the least memory that fits, one
   without warm state of other jobs first: large and warm devices stay for those who need them.

A node on which the task has just failed gets it only if no other can.

Near-linear in tasks and devices: each list of devices is sorted once, and taken ones are jumped
over with path compression.
"""

from __future__ import annotations

import math
from bisect import bisect_left
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import groupby
from typing import Final, Literal

from distribai.core.devices import DeviceType
from distribai.core.spec import Priority
from distribai.core.tasks import Phase

_PHASES: Final[tuple[Phase, ...]] = ("generate", "train", "evaluate")
_TYPES: Final[tuple[DeviceType, ...]] = ("cuda", "mps", "cpu")

_WARM_LOOKS: Final = 64
"""Warm devices that do not fit and are looked at before a cold one is taken: a job's tasks need
about the same, so what did not fit so often does not fit at all."""


@dataclass(frozen=True, slots=True)
class QueuedTask:
    """A task that waits for a device.

    ``queued_at`` in seconds on the clock of ``now``; ``memory_mb`` and ``device`` what it needs;
    ``base_version`` the weights that it starts from; ``preferred`` the node and device index that
    its slot was meant for; ``last_failed_node`` where its last attempt failed; ``excluded`` nodes
    that must not get it; ``only`` the one node that may, if there is such.
    """

    task_id: str
    job_id: str
    phase: Phase
    priority: Priority
    queued_at: float
    memory_mb: int = 0
    device: Literal["any", "cuda", "mps", "cpu"] = "any"
    base_version: int = 0
    preferred: tuple[str, int] | None = None
    last_failed_node: str = ""
    excluded: frozenset[str] = frozenset()
    only: str = ""


@dataclass(frozen=True, slots=True)
class FreeDevice:
    """A device without a task.

    ``memory_mb`` 0 means that the node could not tell: it fits anything, and is taken last.
    ``warm``: version of the weights that it holds, by job.
    """

    node_id: str
    index: int
    type: DeviceType
    memory_mb: int
    warm: Mapping[str, int] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Match:
    """``task_id`` goes to device ``device`` of ``node_id``."""

    task_id: str
    node_id: str
    device: int


def match(
    queued: Sequence[QueuedTask], devices: Sequence[FreeDevice], now: float
) -> tuple[list[Match], dict[str, str]]:
    """Give queued tasks to free devices, one each.

    Returns:
        The matches in the order in which tasks were served, and for each task without a device the
        reason, for people.
    """
    fleet = _Fleet(devices)
    found: dict[str, int] = {}
    ordered = sorted(queued, key=_order)
    for _, group in groupby(ordered, key=_class):
        tasks = list(group)
        # First those that were meant for a certain device, or an older task without any wish
        # would take it from them.
        for task in tasks:
            device = fleet.preferred(task)
            if device is not None:
                found[task.task_id] = device
        for task in tasks:
            if task.task_id not in found and (device := fleet.choose(task)) is not None:
                found[task.task_id] = device
    matches = [
        Match(t.task_id, fleet.devices[d].node_id, fleet.devices[d].index)
        for t in ordered
        if (d := found.get(t.task_id)) is not None
    ]
    reasons = {
        t.task_id: f"{fleet.why_not(t)}; it has waited {max(0.0, now - t.queued_at):.0f} s"
        for t in ordered
        if t.task_id not in found
    }
    return matches, reasons


def _class(task: QueuedTask) -> tuple[str, int]:
    return task.priority, _PHASES.index(task.phase)


def _order(task: QueuedTask) -> tuple[str, int, float, str]:
    return *_class(task), task.queued_at, task.task_id


class _Line:
    """Devices sorted by a key; finds the first free one from a key on."""

    def __init__(self, entries: Iterable[tuple[float, int]]) -> None:
        ordered = sorted(entries)
        self._keys = [key for key, _ in ordered]
        self._devices = [device for _, device in ordered]
        self._next = list(range(len(ordered) + 1))

    def first(
        self,
        key: float,
        taken: bytearray,
        fits: Callable[[int], bool],
        looks: float = math.inf,
    ) -> int | None:
        """The first free device with at least ``key`` that fits, within ``looks`` that do not."""
        place = self._live(bisect_left(self._keys, key))
        while place < len(self._devices) and looks > 0:
            device = self._devices[place]
            if taken[device]:
                self._next[place] = place + 1
            elif fits(device):
                return device
            else:
                looks -= 1
                place += 1
            place = self._live(place)
        return None

    def _live(self, place: int) -> int:
        """The first place from ``place`` on that was not found taken; compresses the path."""
        end = place
        while self._next[end] != end:
            end = self._next[end]
        while self._next[place] != end:
            self._next[place], place = end, self._next[place]
        return end


class _Fleet:
    """The free devices, indexed for every way in which a task looks for one."""

    def __init__(self, devices: Sequence[FreeDevice]) -> None:
        self.devices = sorted(devices, key=lambda d: (d.node_id, d.index))
        self._taken = bytearray(len(self.devices))
        self._memory = [d.memory_mb or math.inf for d in self.devices]
        self._at: dict[tuple[str, int], int] = {}
        self._of_node: dict[str, list[int]] = defaultdict(list)
        cold: dict[tuple[DeviceType, bool], list[tuple[float, int]]] = defaultdict(list)
        older: dict[str, list[tuple[float, int]]] = defaultdict(list)
        newer: dict[str, list[tuple[float, int]]] = defaultdict(list)
        for i, device in enumerate(self.devices):
            self._at[device.node_id, device.index] = i
            self._of_node[device.node_id].append(i)
            cold[device.type, bool(device.warm)].append((self._memory[i], i))
            for job, version in device.warm.items():
                older[job].append((-version, i))
                newer[job].append((version, i))
        self._cold = {kind: _Line(entries) for kind, entries in cold.items()}
        self._older = {job: _Line(entries) for job, entries in older.items()}
        self._newer = {job: _Line(entries) for job, entries in newer.items()}
        self._sizes = {
            kind: sorted(
                m for d, m in zip(self.devices, self._memory, strict=True) if d.type == kind
            )
            for kind in _TYPES
        }

    def preferred(self, task: QueuedTask) -> int | None:
        """Take the device that the task was meant for, if it can have it."""
        device = None if task.preferred is None else self._at.get(task.preferred)
        if device is None or self._taken[device] or not self._fits(task, device):
            return None
        node = self.devices[device].node_id
        barred = node in task.excluded or node == task.last_failed_node
        if barred or task.only not in ("", node):
            return None
        self._taken[device] = True
        return device

    def choose(self, task: QueuedTask) -> int | None:
        """Take the best device for the task, if there is one."""
        if task.only:
            device = self._on_node(task, task.only)
        elif self._largest(task) < task.memory_mb:
            device = None
        else:
            device = self._search(task)
            if device is None:
                device = self._on_node(task, task.last_failed_node)
        if device is not None:
            self._taken[device] = True
        return device

    def _on_node(self, task: QueuedTask, node: str) -> int | None:
        if node in task.excluded:
            return None
        own = self._of_node.get(node, ())
        return next((d for d in own if not self._taken[d] and self._fits(task, d)), None)

    def why_not(self, task: QueuedTask) -> str:
        """Why no free device was left for the task."""
        if task.only:
            return "the node that it was meant for is not free"
        kinds = _types(task)
        sizes = [self._sizes[kind] for kind in kinds if self._sizes[kind]]
        what = "device" if task.device == "any" else f"{task.device} device"
        if not sizes:
            return f"no {what} is free"
        largest = self._largest(task)
        if largest < task.memory_mb:
            return f"it needs {task.memory_mb} MB, the largest free {what} has {largest:.0f} MB"
        fitting = sum(len(s) - bisect_left(s, task.memory_mb) for s in sizes)
        excluded = sum(
            self._fits(task, device)
            for node in task.excluded
            for device in self._of_node.get(node, ())
        )
        if excluded == fitting:
            return f"it must not go to any node whose {what} is free"
        return f"tasks before it take all free {what}s that fit ({fitting - excluded})"

    def _largest(self, task: QueuedTask) -> float:
        """Memory of the largest device of the task's type, before anything was taken."""
        return max((s[-1] for kind in _types(task) if (s := self._sizes[kind])), default=0.0)

    def _search(self, task: QueuedTask) -> int | None:
        def allowed(device: int) -> bool:
            node = self.devices[device].node_id
            return node not in task.excluded and node != task.last_failed_node

        def fits(device: int) -> bool:
            return self._fits(task, device) and allowed(device)

        for lines, key in ((self._older, -task.base_version), (self._newer, task.base_version + 1)):
            line = lines.get(task.job_id)
            if line and (found := line.first(key, self._taken, fits, _WARM_LOOKS)) is not None:
                return found
        for kind in _types(task):
            for has_warm in (False, True):
                line = self._cold.get((kind, has_warm))
                if line and (found := line.first(task.memory_mb, self._taken, allowed)) is not None:
                    return found
        return None

    def _fits(self, task: QueuedTask, device: int) -> bool:
        return (
            task.device in ("any", self.devices[device].type)
            and self._memory[device] >= task.memory_mb
        )


def _types(task: QueuedTask) -> tuple[DeviceType, ...]:
    return _TYPES if task.device == "any" else (task.device,)
