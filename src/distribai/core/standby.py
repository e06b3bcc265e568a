"""The free devices, kept in the orders in which tasks look for them.

Matching looks at all free devices anew (:func:`distribai.core.scheduling.match`), which takes a
tenth of a second for ten thousand of them, and mostly for one task. It can only ever take devices
that are early in some task's order, though: of k tasks none gets further than the k-th device that
would do. :meth:`Standby.shortlist` picks those, so that the matching of the short list is the
matching of all; what it says of tasks that got nothing is not.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections import defaultdict
from collections.abc import Collection, Iterable, Iterator, Sequence
from math import inf

from distribai.core.devices import DeviceType
from distribai.core.needs import lacks
from distribai.core.scheduling import WARM_LOOKS, FreeDevice, QueuedTask, types_of

Key = tuple[str, int]
"""A device: its node, and its index there."""

_Entry = tuple[float, str, int]
"""A device in an order: what it is sorted by, then its key."""


class Standby:
    """Free devices, each once."""

    def __init__(self) -> None:
        self._devices: dict[Key, FreeDevice] = {}
        self._of_node: dict[str, set[int]] = {}
        self._cold: dict[tuple[DeviceType, bool], list[_Entry]] = defaultdict(list)
        self._older: dict[str, list[_Entry]] = defaultdict(list)
        self._newer: dict[str, list[_Entry]] = defaultdict(list)

    def __len__(self) -> int:
        return len(self._devices)

    def __iter__(self) -> Iterator[FreeDevice]:
        return iter(self._devices.values())

    def on(self, node_id: str) -> list[FreeDevice]:
        """The free devices of a node."""
        return [self._devices[node_id, index] for index in sorted(self._of_node.get(node_id, ()))]

    def put(self, device: FreeDevice) -> None:
        """Add a device, in place of what was known of it."""
        key = device.node_id, device.index
        known = self._devices.get(key)
        if known == device:
            return
        if known is not None:
            self.drop(*key)
        self._devices[key] = device
        self._of_node.setdefault(device.node_id, set()).add(device.index)
        for order, entry in self._places(device):
            insort(order, entry)

    def drop(self, node_id: str, index: int) -> None:
        """Remove a device, if it is there."""
        device = self._devices.pop((node_id, index), None)
        if device is None:
            return
        of_node = self._of_node[node_id]
        of_node.discard(index)
        if not of_node:
            del self._of_node[node_id]
        for order, entry in self._places(device):
            del order[bisect_left(order, entry)]

    def _places(self, device: FreeDevice) -> Iterator[tuple[list[_Entry], _Entry]]:
        key = device.node_id, device.index
        yield self._cold[device.type, bool(device.warm)], (device.memory_mb or inf, *key)
        for job, version in device.warm.items():
            yield self._older[job], (-version, *key)
            yield self._newer[job], (version, *key)

    def shortlist(
        self, tasks: Sequence[QueuedTask], but: Collection[str] = frozenset()
    ) -> list[FreeDevice]:
        """Devices among which ``tasks`` are matched as among all of them, but those of the nodes
        ``but``, which get nothing now."""
        groups: dict[tuple[object, ...], QueuedTask] = {}
        chosen: set[Key] = set()
        for task in tasks:
            named = {task.only, task.last_failed_node, task.preferred[0] if task.preferred else ""}
            for node in named - {""}:
                chosen |= self._keys_on(node)
            if not task.only:
                groups.setdefault(_group(task), task)
        if len(groups) * len(tasks) >= len(self._devices):
            return [d for d in self._devices.values() if d.node_id not in but]
        for task in groups.values():
            chosen.update(self._first(task, len(tasks), but))
        return [self._devices[key] for key in chosen if key[0] not in but]

    def _keys_on(self, node_id: str) -> set[Key]:
        return {(node_id, index) for index in self._of_node.get(node_id, ())}

    def _first(self, task: QueuedTask, count: int, but: Collection[str]) -> Iterator[Key]:
        """The first ``count`` devices that the task could take, in each of its orders."""
        if task.among is not None:
            for node in task.among:
                yield from self._keys_on(node)
            return
        for orders, least in (
            (self._older, -task.base_version),
            (self._newer, task.base_version + 1),
        ):
            order = orders.get(task.job_id, [])
            # The matching gives up on warm devices after some that do not fit: it shall see them.
            yield from _take(order, least, count + WARM_LOOKS, but)
        for kind in types_of(task):
            for has_warm in (False, True):
                for _, node, index in _from(self._cold.get((kind, has_warm), []), task.memory_mb):
                    if count <= 0:
                        return
                    if node not in but and self._fits(task, (node, index)):
                        count -= 1
                        yield node, index

    def _fits(self, task: QueuedTask, key: Key) -> bool:
        allowed = key[0] not in task.excluded and key[0] != task.last_failed_node
        return allowed and not lacks(task.needs, self._devices[key].has)


def _group(task: QueuedTask) -> tuple[object, ...]:
    """Tasks that look for devices in the same orders."""
    return (
        task.job_id,
        task.base_version,
        task.device,
        task.memory_mb,
        task.needs,
        task.excluded,
        task.among,
        task.last_failed_node,
    )


def _from(order: list[_Entry], least: float) -> Iterable[_Entry]:
    for place in range(bisect_left(order, (least,)), len(order)):
        yield order[place]


def _take(order: list[_Entry], least: float, count: int, but: Collection[str]) -> Iterator[Key]:
    for _, node, index in _from(order, least):
        if count <= 0:
            return
        if node not in but:
            count -= 1
            yield node, index
