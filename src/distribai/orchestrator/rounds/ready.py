"""Which devices may be given work, kept in this process's memory from look to look.

The database says it; ten thousand nodes take a tenth of a second to read, though, and at a look
mostly none of them has changed. So the nodes that the news name are read anew (every node whose
state, lease or word has changed: ``orchestrator.news``), and now and then a page of all: should the
two ever differ, the database is right, and what was decided meanwhile fails at the lease's guard.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection, Iterable, Iterator

from distribai.core.scheduling import FreeDevice
from distribai.core.standby import Standby
from distribai.orchestrator.context import Grid
from distribai.orchestrator.rounds.opening import AbleDevice, devices_of
from distribai.store.engine import AnyRow, Tx
from distribai.store.statements import fleet, work

PAGE = 500
"""Nodes of a page at least."""

PAGES = 8
"""A grid of any size has been read anew after so many pages."""


def page_size(nodes: int) -> int:
    """Nodes of a page of so many."""
    return max(PAGE, -(-nodes // PAGES))


class Ready:
    """The able nodes' devices, and which of them are free."""

    def __init__(self, grid: Grid) -> None:
        self._grid = grid
        self._able: dict[str, tuple[AbleDevice, ...]] = {}
        self._leased: dict[str, frozenset[int]] = {}
        self._after: str | None = None
        self.free = Standby()

    def __iter__(self) -> Iterator[AbleDevice]:
        return (device for devices in self._able.values() for device in devices)

    def on(self, node_id: str) -> tuple[AbleDevice, ...]:
        """The devices of a node; none while it may not be given work."""
        return self._able.get(node_id, ())

    def idle(self) -> Iterator[AbleDevice]:
        """The able devices that are free."""
        for free in self.free:
            yield from (d for d in self.on(free.node_id) if d.index == free.index)

    def gflops(self, node_id: str, device: int) -> float:
        """What an able device was measured at; 0: it was not."""
        return next((d.has.gflops for d in self.on(node_id) if d.index == device), 0.0)

    def leased(self, node_id: str, device: int) -> None:
        """This process has leased something to a device."""
        self._leased[node_id] = self._leased.get(node_id, frozenset()) | {device}
        self.free.drop(node_id, device)

    @property
    def loaded(self) -> bool:
        """Whether all nodes have been read."""
        return self._after is not None

    def forget(self) -> None:
        """Read everything anew at the next look."""
        self._after = None

    async def read_all(self, tx: Tx) -> None:
        """Read every node."""
        self._write(await fleet.able_nodes(tx), await work.leased_devices(tx), None)
        self._after = ""

    async def read(self, tx: Tx, node_ids: Collection[str]) -> None:
        """Read some nodes."""
        if node_ids:
            rows = await fleet.able_nodes(tx, node_ids)
            self._write(rows, await work.leased_devices(tx, node_ids), node_ids)

    async def read_page(self, tx: Tx) -> None:
        """Read the next page of all nodes."""
        assert self._after is not None, "all were read before"
        after, limit = self._after, page_size(len(self._able))
        rows = await fleet.page_of_able_nodes(tx, after, limit)
        upto = rows[-1].id if len(rows) == limit else ""
        known = {n for n in (*self._able, *self._leased) if n > after and (not upto or n <= upto)}
        leased = await work.leased_devices(tx, after=after, upto=upto)
        self._after = upto
        self._write(rows, leased, known)

    def _write(
        self, rows: Iterable[AnyRow], leased: Iterable[AnyRow], known: Collection[str] | None
    ) -> None:
        """Take over what was read of the nodes ``known`` and of others; None: of all."""
        able = {row.id: tuple(devices_of(row)) for row in rows}
        busy: dict[str, set[int]] = defaultdict(set)
        for lease in leased:
            busy[lease.node_id].add(lease.device)
        if known is None:
            known = {*self._able, *self._leased}
        for node_id in {*known, *able, *busy}:
            self._set(node_id, able.get(node_id, ()), frozenset(busy.get(node_id, ())))

    def _set(self, node_id: str, devices: tuple[AbleDevice, ...], leased: frozenset[int]) -> None:
        for old in self._able.pop(node_id, ()):
            if old not in devices or old.index in leased:
                self.free.drop(node_id, old.index)
        self._leased.pop(node_id, None)
        if devices:
            self._able[node_id] = devices
        if leased:
            self._leased[node_id] = leased
        for device in devices:
            if device.index not in leased:
                self.free.put(self.as_free(device))

    def as_free(self, device: AbleDevice) -> FreeDevice:
        """A device as the matching sees it, warm as its node has told this process."""
        session = self._grid.fleet.of(device.node_id)
        warm = dict(session.held_versions) if session is not None else {}
        return FreeDevice(
            device.node_id, device.index, device.type, device.memory_mb, warm, device.has
        )
