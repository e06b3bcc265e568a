"""What has changed in the grid, told to whoever in this process acts on it.

Every change has its row in the outbox, whichever replica made it. One reader a process reads each
row once, as soon as it is visible, and puts what it is about into the :class:`Box` of everybody who
wants that kind. A box says where to look, never what is there: who opens it asks the database. So a
row may be told twice, and rows are told before everything before them is settled; the cursor alone
waits for that (``store.outbox``), which is why no late commit is lost. Another process may have
read a row before and say so (``orchestrator.hints``): then it is told at once, and once more when
it is read here, for what was said may have been wrong, or said before there was anything to see.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from itertools import chain
from typing import TYPE_CHECKING, NamedTuple

from distribai.core.states import TASK, TaskState, is_terminal
from distribai.store import outbox
from distribai.store.outbox import Cursor

if TYPE_CHECKING:
    from distribai.orchestrator.context import Grid

PAGE = 20_000
"""Rows that are read at once."""

MAX_NAMED = 20_000
"""Names that a box holds; what would be more is :attr:`Changes.everything`."""


class Told(NamedTuple):
    """What is told of a row of the outbox; ``phase`` is a task's, else empty."""

    kind: str
    job_id: str = ""
    task_id: str = ""
    node_id: str = ""
    phase: str = ""


Wanted = Callable[[Told], bool]
"""Whether a row of the outbox is worth telling."""


@dataclass(slots=True)
class Changes:
    """Nodes that something has happened to, or to a task that they hold or held, and jobs to which
    or to whose rounds it has; ``some``: whether there is any; ``everything``: nobody knows of what.
    """

    everything: bool = False
    some: bool = False
    nodes: set[str] = field(default_factory=set)
    jobs: set[str] = field(default_factory=set)

    def __bool__(self) -> bool:
        return self.everything or self.some


class Box:
    """What one reader has not dealt with yet. At first that is everything."""

    def __init__(self, wanted: Wanted) -> None:
        self._wanted = wanted
        self._changes = Changes(everything=True)
        self._event = asyncio.Event()
        self._event.set()

    def put(self, row: Told) -> None:
        """Take note of a row, if it is wanted."""
        if not self._wanted(row):
            return
        changes = self._changes
        changes.some = True
        if not changes.everything:
            if row.node_id:
                changes.nodes.add(row.node_id)
            if row.job_id and not row.kind.startswith("task."):
                changes.jobs.add(row.job_id)
            if len(changes.nodes) + len(changes.jobs) > MAX_NAMED:
                self._changes = Changes(everything=True)
        self._event.set()

    def look_at(self, node_id: str) -> None:
        """Have a node looked at, whatever the outbox says."""
        self._changes.nodes.add(node_id)
        self._changes.some = True
        self._event.set()

    def put_back(self, changes: Changes) -> None:
        """Give back what could not be dealt with."""
        self._changes.everything |= changes.everything
        self._changes.some |= changes.some
        self._changes.nodes |= changes.nodes
        self._changes.jobs |= changes.jobs
        self._event.set()

    def take(self) -> Changes:
        """All there is; the box is empty then."""
        taken, self._changes = self._changes, Changes()
        self._event.clear()
        return taken

    def ring(self) -> None:
        """Let who waits look, though there may be nothing."""
        self._event.set()

    async def wait(self, timeout_s: float) -> None:
        """Return at once when there is something, else as soon as there is, and after ``timeout_s``
        seconds in any case."""
        if not self._event.is_set():
            with suppress(TimeoutError):
                await asyncio.wait_for(self._event.wait(), timeout_s)


class News:
    """The one reader of this process."""

    def __init__(self) -> None:
        self._boxes: list[Box] = []
        self._of_nodes: list[Box] = []
        self._of_task: dict[str, list[Box]] = {}
        self._cursor: Cursor | None = None
        self._told: set[Cursor] = set()  # read here, and not behind the cursor yet
        self.listener: Callable[[Cursor, Told], None] | None = None
        """Called with each row that is read here for the first time."""
        self._lock = asyncio.Lock()

    def box(self, wanted: Wanted, *, of_nodes: bool = False) -> Box:
        """A new box for the rows that are ``wanted``, and with ``of_nodes`` for nodes whose
        sessions in this process have changed (:meth:`look_at`)."""
        box = Box(wanted)
        self._boxes.append(box)
        if of_nodes:
            self._of_nodes.append(box)
        return box

    def look_at(self, node_id: str) -> None:
        """Something about a node has changed in this process's memory."""
        for box in self._of_nodes:
            box.look_at(node_id)

    async def catch_up(self, grid: Grid) -> None:
        """Tell of everything that is visible now.

        Raises:
            Unavailable: ``grid.database``.
        """
        async with self._lock:
            while await self._page(grid):
                pass

    async def _page(self, grid: Grid) -> bool:
        """Tell of a page; whether there is more."""
        async with grid.db.glance() as tx:
            if self._cursor is None:
                self._cursor = outbox.parse_cursor(await outbox.end(tx))
                for box in self._boxes:  # whatever was before
                    box.put_back(Changes(everything=True))
            rows = await outbox.visible(tx, self._cursor, PAGE)
        for row in rows:
            key = (row.epoch, row.xid, row.id)
            told = Told(row.kind, row.job_id, row.task_id, row.node_id, row.phase)
            if key not in self._told:
                self._told.add(key)
                self._tell(told)
                if self.listener is not None:
                    self.listener(key, told)
            if row.settled:
                self._cursor = key
        self._told = {key for key in self._told if key > self._cursor}
        return len(rows) == PAGE and bool(rows[-1].settled)

    def relayed(self, key: Cursor, told: Told) -> None:
        """Another process has read a row of the outbox; so it says. Nothing of it is kept. Until
        the first page is read everything is told of anyway."""
        if self._cursor is not None and key > self._cursor and key not in self._told:
            self._tell(told)

    def _tell(self, row: Told) -> None:
        for box in (*self._boxes, *self._of_task.get(row.task_id, ())):
            box.put(row)

    def ring(self) -> None:
        """Let everybody who waits look: the process stops."""
        for box in chain(self._boxes, *self._of_task.values()):
            box.ring()

    @contextmanager
    def of_task(self, task_id: str) -> Iterator[Box]:
        """A box for the end of one task, as long as the block lasts."""
        box = Box(_ends)
        boxes = self._of_task.setdefault(task_id, [])
        boxes.append(box)
        try:
            yield box
        finally:
            boxes.remove(box)
            if not boxes:
                del self._of_task[task_id]


def _ends(row: Told) -> bool:
    state = row.kind.removeprefix("task.")
    return state in TASK and is_terminal(TASK, TaskState(state))


def tells(row: Told) -> bool:
    """What a node may have to be told of: not its own report, nor what nobody has yet."""
    return row.kind not in ("task.queued", "task.submitted")
