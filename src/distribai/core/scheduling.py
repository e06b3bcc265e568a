"""Which queued task goes to which free device: a pure matching that says why a task waits.

Whose turn it is, :mod:`distribai.core.turns` says. A task takes, in this order:

1. the device that its slot was meant for,
2. a device whose child is warm for the job: with the newest version up to the one the task needs,
   else with a newer one,
3. an accelerator before a CPU, and of each kind the device with the least memory that fits, one
   without warm state of other jobs first: large and warm devices stay for those who need them.

A device that was meant for a task of the same level is left to it, until somebody is overdue. A
node on which the task has just failed gets it only if no other can.

Near-linear in tasks and devices: each list of devices is sorted once, and taken ones are jumped
over with path compression. Tasks that need more than memory and a type share one list for each
combination of needs (a job has one): ten thousand tasks of a hundred such jobs meet ten thousand
devices within the second of a tick (``python -m bench schedule``).
"""

from __future__ import annotations

import math
from bisect import bisect_left
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Final, Literal

from distribai.core.devices import DeviceType
from distribai.core.needs import NOTHING, UNMEASURED, Capacity, Needs, lacks
from distribai.core.spec import Priority
from distribai.core.tasks import Phase
from distribai.core.turns import (
    Accounts,
    Tag,
    Tags,
    Turns,
    arrival_of,
    by_level,
    is_overdue,
    standing_of,
)

_TYPES: Final[tuple[DeviceType, ...]] = ("cuda", "mps", "cpu")

WARM_LOOKS: Final = 64
"""Warm devices that do not fit and are looked at before a cold one is taken: a job's tasks need
about the same, so what did not fit so often does not fit at all."""

NO_TAGS: Final[Tags] = {}


@dataclass(frozen=True, slots=True)
class QueuedTask:
    """A task that waits for a device.

    ``queued_at`` in seconds on the clock of ``now``; ``memory_mb`` and ``device`` what it needs of
    the device, ``needs`` what else; ``base_version`` the weights that it starts from; ``preferred``
    the node and device index that its slot was meant for; ``last_failed_node`` where its last
    attempt failed; ``excluded`` nodes that must not get it; ``among`` the nodes that may, if not
    all; ``only`` the one node that may, if there is such. ``organization``, ``weight`` and ``cost``
    (seconds of a device) decide its turn.
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
    among: frozenset[str] | None = None
    needs: Needs = NOTHING
    organization: str = ""
    weight: float = 1.0
    cost: float = 1.0

    @property
    def key(self) -> str:
        """Decides ties of turns."""
        return self.task_id


@dataclass(frozen=True, slots=True)
class FreeDevice:
    """A device without a task.

    ``memory_mb`` 0 means that the node could not tell: it fits anything, and is taken last.
    ``warm``: version of the weights that it holds, by job. ``has``: what else was measured.
    """

    node_id: str
    index: int
    type: DeviceType
    memory_mb: int
    warm: Mapping[str, int] = field(default_factory=dict)
    has: Capacity = UNMEASURED


@dataclass(frozen=True, slots=True)
class Match:
    """``task_id`` goes to device ``device`` of ``node_id``; ``tag`` is what ``account``, its
    organization's mostly, stands at from then on at ``level``."""

    task_id: str
    node_id: str
    device: int
    account: str = field(default="", compare=False)
    level: int = field(default=0, compare=False)
    tag: Tag = field(default=Tag(0.0, 0.0), compare=False)


def match(
    queued: Sequence[QueuedTask],
    devices: Sequence[FreeDevice],
    now: float,
    tags: Tags = NO_TAGS,
) -> tuple[list[Match], dict[str, str]]:
    """Give queued tasks to free devices, one each.

    Args:
        queued: tasks, each once.
        devices: devices, each once.
        now: on the clock of ``queued_at``.
        tags: the organizations' accounts, as earlier matches left them.

    Returns:
        The matches in the order in which tasks were served, and for each task without a device the
        reason, for people,.
    """
    fleet = _Fleet(devices)
    accounts = Accounts.of(tags)
    matches: list[Match] = []
    reasons: dict[str, str] = {}

    for level, tasks in by_level(queued, now):
        reserved = fleet.reserve(tasks)
        turns = Turns(tasks, level, now, accounts)
        for task in turns:
            device = reserved.pop(task.task_id, None)
            if device is None:
                device = fleet.choose(task)
            if device is None and is_overdue(task, now):
                device = fleet.rob(task, reserved)
            if device is None:
                reasons[task.task_id] = ""
                continue
            reasons.pop(task.task_id, None)  # asked twice, see Turns
            account, tag = turns.served(task)
            found = fleet.devices[device]
            matches.append(Match(task.task_id, found.node_id, found.index, account, level, tag))
        waiting = [t for t in tasks if t.task_id in reasons]
        # Only when nothing more is taken: who was before it is known then.
        reasons |= {t.task_id: f"{fleet.why_not(t)}; {standing_of(t, now)}" for t in waiting}
    return matches, reasons


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
        older: dict[str, list[tuple[float, int]]] = defaultdict(list)
        newer: dict[str, list[tuple[float, int]]] = defaultdict(list)
        for i, device in enumerate(self.devices):
            self._at[device.node_id, device.index] = i
            self._of_node[device.node_id].append(i)
            for job, version in device.warm.items():
                older[job].append((-version, i))
                newer[job].append((version, i))
        self._cold = self._sorted(range(len(self.devices)))
        self._older = {job: _Line(entries) for job, entries in older.items()}
        self._newer = {job: _Line(entries) for job, entries in newer.items()}
        self._by_needs: dict[tuple[Needs, frozenset[str] | None], _Choice] = {}
        self._told: dict[tuple[object, ...], str] = {}
        self._unrobbed: set[tuple[object, ...]] = set()
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
        if not self._may(task, device) or task.only not in ("", self.devices[device].node_id):
            return None
        self._taken[device] = True
        return device

    def reserve(self, tasks: Iterable[QueuedTask]) -> dict[str, int]:
        """Take the devices that tasks were meant for, each for the first of them, by task: a task
        without any wish would take them else."""
        wishing = sorted((t for t in tasks if t.preferred), key=lambda t: (arrival_of(t), t.key))
        found = {t.task_id: d for t in wishing if (d := self.preferred(t)) is not None}
        self._unrobbed.clear()
        return found

    def rob(self, task: QueuedTask, reserved: dict[str, int]) -> int | None:
        """Take a device that is reserved for another task, which then takes what it finds."""
        if task.only or _like(task) in self._unrobbed:
            return None
        for robbed, device in reserved.items():
            if self._fits(task, device) and self._open(task, device):
                del reserved[robbed]
                return device
        self._unrobbed.add(_like(task))  # reservations only ever become fewer
        return None

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
        own = self._of_node.get(node, ())
        free = (d for d in own if not self._taken[d] and self._open(task, d))
        return next((d for d in free if self._fits(task, d)), None)

    def why_not(self, task: QueuedTask) -> str:
        """Why no free device was left for the task."""
        if task.only:
            return "the node that it was meant for is not free"
        like = _like(task)
        if like not in self._told:
            self._told[like] = self._explain(task)
        return self._told[like]

    def _explain(self, task: QueuedTask) -> str:
        what = "device" if task.device == "any" else f"{task.device} device"
        kinds = [kind for kind in types_of(task) if self._sizes[kind]]
        if not kinds:
            return f"no {what} is free"
        largest = self._largest(task)
        if largest < task.memory_mb:
            return f"it needs {task.memory_mb} MB, the largest free {what} has {largest:.0f} MB"
        sized = [d for d in range(len(self.devices)) if self._holds(task, d)]
        lacking = Counter(lacks(task.needs, self.devices[d].has) for d in sized)
        fitting = lacking.pop("", 0)
        if not fitting:
            often, count = lacking.most_common(1)[0]
            others = len(sized) - count
            return often + (f"; {others} more free {what}s lack other things" if others else "")
        allowed = sum(self._fits(task, d) and self._open(task, d) for d in sized)
        if not allowed:
            return f"it must not go to any node whose {what} is free"
        return f"tasks before it take all free {what}s that fit ({allowed})"

    def _largest(self, task: QueuedTask) -> float:
        """Memory of the largest device of the task's type, before anything was taken."""
        return max((s[-1] for kind in types_of(task) if (s := self._sizes[kind])), default=0.0)

    def _search(self, task: QueuedTask) -> int | None:
        choice = self._choice(task)

        def allowed(device: int) -> bool:
            return self._may(task, device)

        def fits(device: int) -> bool:
            return self._fits(task, device) and self._may(task, device)

        for lines, key in ((self._older, -task.base_version), (self._newer, task.base_version + 1)):
            line = lines.get(task.job_id)
            if line and (found := line.first(key, self._taken, fits, WARM_LOOKS)) is not None:
                return found
        for kind in types_of(task):
            for has_warm in (False, True):
                cold = choice.get((kind, has_warm))
                if cold and (found := cold.first(task.memory_mb, self._taken, allowed)) is not None:
                    return found
        return None

    def _choice(self, task: QueuedTask) -> _Choice:
        """Devices by type and warmth, sorted by memory, of those that have what the task needs
        beside memory and type; made once for all tasks that need the same."""
        if task.needs == NOTHING and task.among is None:
            return self._cold
        key = (task.needs, task.among)
        if key not in self._by_needs:
            self._by_needs[key] = self._sorted(
                i
                for i, d in enumerate(self.devices)
                if (task.among is None or d.node_id in task.among) and not lacks(task.needs, d.has)
            )
        return self._by_needs[key]

    def _sorted(self, chosen: Iterable[int]) -> _Choice:
        kinds: dict[tuple[DeviceType, bool], list[tuple[float, int]]] = defaultdict(list)
        for i in chosen:
            device = self.devices[i]
            kinds[device.type, bool(device.warm)].append((self._memory[i], i))
        return {kind: _Line(entries) for kind, entries in kinds.items()}

    def _open(self, task: QueuedTask, device: int) -> bool:
        """Whether the task may go there at all."""
        node = self.devices[device].node_id
        return node not in task.excluded and (task.among is None or node in task.among)

    def _may(self, task: QueuedTask, device: int) -> bool:
        """Whether the task may go there as long as there are others."""
        failed = self.devices[device].node_id == task.last_failed_node
        return not failed and self._open(task, device)

    def _holds(self, task: QueuedTask, device: int) -> bool:
        return (
            task.device in ("any", self.devices[device].type)
            and self._memory[device] >= task.memory_mb
        )

    def _fits(self, task: QueuedTask, device: int) -> bool:
        enough = task.needs == NOTHING or not lacks(task.needs, self.devices[device].has)
        return enough and self._holds(task, device)


_Choice = Mapping[tuple[DeviceType, bool], _Line]


def _like(task: QueuedTask) -> tuple[object, ...]:
    """What decides which devices a task could have."""
    return task.memory_mb, task.device, task.needs, task.excluded, task.among


def types_of(task: QueuedTask) -> tuple[DeviceType, ...]:
    return _TYPES if task.device == "any" else (task.device,)
