"""Giving queued tasks to free devices: the pure matching, fed from rows, and the leases.

What the matching decides becomes true when the lease is written: a guarded update that fails if
anything has changed meanwhile, and is then tried again at the next look.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Sequence
from typing import TypeVar

from distribai.core.scheduling import Match, match
from distribai.core.states import TASK, TaskState, check
from distribai.orchestrator.context import Grid
from distribai.orchestrator.news import Changes
from distribai.orchestrator.rounds import tasks
from distribai.orchestrator.rounds.picture import Picture, Speeds, look
from distribai.orchestrator.rounds.ready import Ready
from distribai.sections import LivenessSettings
from distribai.store import leases
from distribai.store.engine import AnyRow, Tx
from distribai.store.statements import jobs, turns

T = TypeVar("T")


class Scheduler:
    """The duty's memory: devices and speeds from look to look (``rounds.ready``)."""

    def __init__(self, grid: Grid) -> None:
        self._grid = grid
        self.ready = Ready(grid)
        self._speeds = Speeds()
        self._paged_at = grid.clock()

    def forget(self) -> None:
        """Another replica has the duty: what is known here grows old."""
        self.ready.forget()

    async def refresh(self, changes: Changes) -> None:
        """Read what ``changes`` name, for who wants to know of free devices before tasks are
        leased; they need not be given to :meth:`schedule` then."""
        await self._reading(lambda tx: self._refresh(tx, changes))

    async def schedule(self, changes: Changes) -> tuple[bool, set[str]]:
        """Lease queued tasks to free devices, after ``changes``; whether anything changed, and the
        nodes that have got something."""
        grid = self._grid

        async def look_again(tx: Tx) -> Picture:
            await self._refresh(tx, changes)
            return await look(grid, tx, self.ready, self._speeds)

        picture = await self._reading(look_again)
        short = self.ready.free.shortlist(picture.queued, picture.declined)
        matches, _ = match(picture.queued, short, picture.now, picture.tags)
        if not matches and not picture.hopeless:
            return False, set()
        made: list[AnyRow] = []
        if matches:
            async with grid.db.write() as tx:
                made = await _lease(tx, picture, matches, grid.settings.liveness)
        for row in made:
            self.ready.leased(row.node_id, row.device)
        for task in picture.hopeless:
            async with grid.db.write() as tx:
                await jobs.hold(tx, task.job_id)
                await tasks.end(
                    tx, task, TaskState.CANCELLED, "nobody could finish it before its round merges"
                )
        return True, {row.node_id for row in made}

    async def _reading(self, what: Callable[[Tx], Awaitable[T]]) -> T:
        try:
            async with self._grid.db.read() as tx:
                return await what(tx)
        except BaseException:
            self.forget()  # what had changed was read half at best
            raise

    async def _refresh(self, tx: Tx, changes: Changes) -> None:
        now, tick_s = self._grid.clock(), self._grid.settings.liveness.tick_s
        if changes.everything or not self.ready.loaded:
            await self.ready.read_all(tx)
            self._speeds.forget()
            return
        await self.ready.read(tx, changes.nodes)
        if now - self._paged_at >= tick_s:
            self._paged_at = now
            self._speeds.forget()
            await self.ready.read_page(tx)


async def _lease(
    tx: Tx, picture: Picture, matches: Sequence[Match], liveness: LivenessSettings
) -> list[AnyRow]:
    """Write the leases, and the accounts of those that came about; their rows."""
    by_id = {t.task_id: t for t in picture.queued}
    for job_id in sorted({by_id[m.task_id].job_id for m in matches}):
        await jobs.hold(tx, job_id)
    wanted = []
    for found in matches:
        check(TASK, TaskState.QUEUED, TaskState.LEASED, f"Task {found.task_id}")
        deadline, _ = picture.deadline(found, liveness.task_deadline_s)
        wanted.append(leases.Wanted(found.task_id, found.node_id, found.device, deadline))
    rows = {r.id: r for r in await leases.lease_tasks(tx, wanted, liveness.offline_s)}
    made = [m for m in matches if m.task_id in rows]
    leased = [rows[m.task_id] for m in made]
    await tasks.record_leases(tx, leased)
    await turns.save(tx, {(m.account, m.level): m.tag for m in made})
    return leased
