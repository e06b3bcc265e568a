"""Reading the outbox as it grows: pages behind a cursor, and waiting for more.

However many readers wait in one process, one of them looks at the outbox's end for all: on a hint
that something has changed, and every :data:`POLL_S` in any case, because a hint of another
replica may be lost. A reader keeps no more than its cursor; what it has not read yet stays in
the database.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from distribai.core.webhooks import check_kinds
from distribai.errors import Unavailable
from distribai.orchestrator.records import EventRecord
from distribai.store import outbox
from distribai.store.engine import AnyRow

if TYPE_CHECKING:
    from distribai.orchestrator.context import Grid

POLL_S = 0.5
"""Seconds between two looks without a hint. A look is one indexed read."""

CALM_S = 0.05
"""Seconds between two looks at least, however many hints there are."""

LATEST = "latest"
"""In place of a cursor: only what comes from now on."""


@dataclass(frozen=True, slots=True)
class Wanted:
    """Which events: of a job, of a node and its tasks while it held them, of some kinds; empty:
    all."""

    job_id: str | None = None
    node_id: str | None = None
    kinds: tuple[str, ...] = ()

    @classmethod
    def of(
        cls, kinds: Sequence[str], job_id: str | None = None, node_id: str | None = None
    ) -> Wanted:
        """A checked filter.

        Raises:
            UsageError: ``usage.invalid``: a kind that is none.
        """
        return cls(job_id, node_id, check_kinds(kinds))


@dataclass(frozen=True, slots=True)
class Events:
    """Some events, and the cursor to go on from: behind the last of them, or, when these were all,
    behind everything that the filter has passed over as well."""

    items: tuple[EventRecord, ...]
    cursor: str


async def read(grid: Grid, wanted: Wanted, after: str, limit: int) -> Events:
    """Events behind the cursor ``after`` (empty: from the beginning; ``latest``: none yet), in
    commit order.

    Raises:
        UsageError: ``usage.invalid``: the cursor is not one of ours.
        Unavailable: ``grid.database``.
    """
    async with grid.db.read() as tx:
        end = await outbox.end(tx)
        if after == LATEST:
            return Events((), end)
        rows = await outbox.read(
            tx,
            outbox.parse_cursor(after),
            limit,
            wanted.job_id,
            node_id=wanted.node_id,
            kinds=wanted.kinds,
        )
    items = tuple(event_record(r) for r in rows)
    if len(items) == limit:
        return Events(items, items[-1].cursor)
    # A cursor of a grid that was restored meanwhile may lie ahead of everything: it stays.
    return Events(items, max(after, end, key=outbox.parse_cursor))


def event_record(row: AnyRow) -> EventRecord:
    """What is told of a row of the outbox."""
    return EventRecord(
        cursor=outbox.format_cursor(row),
        at=row.at,
        kind=row.kind,
        job_id=row.job_id,
        task_id=row.task_id,
        node_id=row.node_id,
        data=row.data,
        account_id=row.account_id,
        key_id=row.key_id,
    )


class Tail:
    """The outbox's end as this process last saw it, and who waits for it to move."""

    def __init__(self) -> None:
        self.closing = asyncio.Event()
        self.readers = 0
        """Open event streams of this process."""
        self._end: str | None = None
        self._moved = asyncio.Event()
        self._waiting = 0
        self._looking: asyncio.Task[None] | None = None

    async def beyond(self, grid: Grid, cursor: str, timeout_s: float) -> bool:
        """Wait until the outbox goes beyond ``cursor``, at most ``timeout_s`` seconds, and not
        when the process stops; whether it does."""
        end = grid.clock() + timeout_s
        self._waiting += 1
        try:
            if self._looking is None or self._looking.done():
                self._looking = asyncio.create_task(self._look(grid), name="outbox tail")
            while not self.closing.is_set():
                if self._end is not None and outbox.parse_cursor(self._end) > outbox.parse_cursor(
                    cursor
                ):
                    return True
                left = end - grid.clock()
                if left <= 0:
                    return False
                await self._wait(self._moved, left)
            return False
        finally:
            self._waiting -= 1
            if not self._waiting and self._looking is not None:
                looking, self._looking = self._looking, None
                looking.cancel()
                await asyncio.gather(
                    looking, return_exceptions=True
                )  # it gives its connection back

    def close(self) -> None:
        """Let every reader go: the process stops."""
        self.closing.set()
        self._moved.set()

    @staticmethod
    async def _wait(moved: asyncio.Event, timeout_s: float) -> None:
        try:
            await asyncio.wait_for(moved.wait(), timeout_s)
        except TimeoutError:
            return

    async def _look(self, grid: Grid) -> None:
        while True:
            looked = grid.wake.count
            try:
                async with grid.db.read() as tx:
                    end = await outbox.end(tx)
            except Unavailable:
                end = self._end or ""  # who reads is told; who only waits goes on waiting
            if end != self._end:
                self._end = end
                self._moved.set()
                self._moved = asyncio.Event()
            await asyncio.sleep(CALM_S)
            await grid.wake.wait(looked, POLL_S)
