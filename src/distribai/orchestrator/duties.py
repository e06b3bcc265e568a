"""The orchestrator's standing duties: each repeatable, run on news and every tick.

Loops of their own, so that a long merge or a slow receiver holds up no heartbeat: *news* (read the
outbox, and wake whom it concerns), *hear* (write what was heard), *assign* (open rounds, lease
tasks, tell the nodes), *control* (notice silence and harm, complete jobs), *verify*, *merge*,
*webhooks* (send events out), and now and then *clean* (delete what nothing needs any more). What
decides is done under a lease on the duty's row, so that of several replicas one does it, and
another takes over when that one dies. What concerns this process's own streams needs no lease.
"""

from __future__ import annotations

import asyncio
import math
from collections.abc import Awaitable, Callable, Collection
from dataclasses import dataclass, field

import structlog

from distribai.errors import Unavailable
from distribai.orchestrator import places
from distribai.orchestrator.context import Grid
from distribai.orchestrator.fleet import replicas
from distribai.orchestrator.fleet.delivery import Delivery
from distribai.orchestrator.fleet.liveness import LEADER, flush, sweep, wait_for_nodes
from distribai.orchestrator.fleet.standing import judge
from distribai.orchestrator.hints import Hints
from distribai.orchestrator.jobs.completion import complete_jobs
from distribai.orchestrator.news import Box, Changes, Told, tells
from distribai.orchestrator.retention import CLEAN_S, collect
from distribai.orchestrator.rounds.joining import join_rounds
from distribai.orchestrator.rounds.merging import merge_all
from distribai.orchestrator.rounds.opening import open_rounds
from distribai.orchestrator.rounds.scheduling import Scheduler
from distribai.orchestrator.rounds.verifying import verify_all
from distribai.orchestrator.webhooks.duties import Deliverer
from distribai.store import leases

log = structlog.get_logger(__name__)

RENEW = 1 / 3
"""A duty's lease (``liveness.replica_s``) is prolonged when this share of it has passed."""

ASK_S = 1.0
"""Seconds between two looks at what others hold: a lease that is another's is not asked for."""

FLUSH_S = 1.0
"""Seconds between two times at which what was heard is written, unless it is pressing."""

CALM_S = 0.05
"""A duty that has looked rests as long as the look took, and this long at most: news that come
meanwhile are dealt with together, and duties never take more than about half of a core."""

NEWS_S = 0.015
"""Seconds between two looks at the outbox at least, for who holds a duty; who holds none is told
what is in it (``orchestrator.hints``)."""

PROMPT = (LEADER, "verify", "merge")
"""The duties whose holders read the outbox at every hint."""

STOP_S = 5.0
"""Seconds that duties have to finish what they are at when the process stops."""


@dataclass
class Others:
    """The duties that other replicas hold: one statement each :data:`ASK_S` tells of all."""

    grid: Grid
    _names: Collection[str] = frozenset()
    _asked_at: float = -math.inf

    async def hold(self, name: str) -> bool:
        """Whether another replica holds a duty, as far as was seen lately."""
        now = self.grid.clock()
        if now - self._asked_at >= ASK_S:
            self._asked_at = now
            async with self.grid.db.glance() as tx:
                self._names = await leases.held_by_others(tx, self.grid.holder)
        return name in self._names


@dataclass
class DutyLease:
    """This process's lease on one duty; ``renewed_at`` on the process's clock."""

    grid: Grid
    name: str
    others: Others
    renewed_at: float | None = None
    refused_at: float = -math.inf

    @property
    def ours(self) -> bool:
        """Whether it was ours when we last looked, and may still be."""
        at, seconds = self.renewed_at, self.grid.settings.liveness.replica_s
        return at is not None and self.grid.clock() - at < seconds

    async def held(self) -> bool:
        """Whether the duty is ours now, after prolonging the lease if it is time.

        Whoever leads after a while in which nobody did (the leader died or was frozen, the database
        was away) first gives the nodes time to come back.

        Raises:
            Conflict: ``grid.moved``: the grid is here no more.
            Unavailable: ``grid.database``.
        """
        now, seconds = self.grid.clock(), self.grid.settings.liveness.replica_s
        if self.renewed_at is not None and now - self.renewed_at < RENEW * seconds:
            return True
        if now - self.refused_at < ASK_S:
            return False
        if self.renewed_at is None and await self.others.hold(self.name):
            return False
        async with self.grid.db.write() as tx:
            had_run_out = await leases.has_run_out(tx, self.name)
            fence = await leases.take_duty(tx, self.name, self.grid.holder, seconds)
            await places.check_here(tx)  # behind the lease: see ``backup.existing.lock_resting``
            if fence is not None and had_run_out and self.name == LEADER:
                await wait_for_nodes(self.grid, tx)
        self.renewed_at = now if fence is not None else None
        self.refused_at = now if fence is None else -math.inf
        return fence is not None


@dataclass
class Duties:
    """All duties of one process."""

    grid: Grid
    _next_grace: float | None = None
    _here_at: float | None = None
    _stopping: bool = False
    _tasks: list[asyncio.Task[None]] = field(default_factory=list)

    def __post_init__(self) -> None:
        self._others = Others(self.grid)
        self._leases = {n: self._lease(n) for n in (*PROMPT, "clean")}
        self._hints = Hints(
            self.grid,
            leads=lambda: self._leases[LEADER].ours,
            shares=lambda: not all(self._leases[n].ours for n in PROMPT),
        )
        news = self.grid.news
        self._boxes = {
            "assign": news.box(anything, of_nodes=True),
            "tell": news.box(tells, of_nodes=True),
            "rounds": news.box(of_rounds, of_nodes=True),
            "control": news.box(of_rounds),
            "verify": news.box(submitted),
            "merge": news.box(of_rounds),
            "webhooks": news.box(anything),
        }
        self._scheduler, self._delivery = Scheduler(self.grid), Delivery(self.grid)
        self._deliverer = Deliverer(self.grid)
        # Not at the start, which has enough to do.
        self._cleaned_at = self._opened_at = self.grid.clock()

    def _lease(self, name: str) -> DutyLease:
        return DutyLease(self.grid, name, self._others)

    async def news(self) -> bool:
        """Tell whom it concerns what has changed; nothing changes by it."""
        await self.grid.news.catch_up(self.grid)
        return False

    async def hear(self) -> bool:
        """Write what was heard; nothing has to be looked at again for it."""
        await flush(self.grid)
        return False

    async def assign(self) -> bool:
        """Lease what is queued, and tell this process's nodes what is new; whether anything
        changed."""
        box, tell = self._boxes["assign"], self._boxes["tell"]
        changes, told, changed = box.take(), tell.take(), False
        try:
            if await self._leases[LEADER].held():
                # First: what a round needs is not given to a task that can wait.
                changed, left = await self._open(changes)
                leased, given = await self._scheduler.schedule(left)
                changed |= leased
                told.nodes |= given
            else:
                self._scheduler.forget()
            await self._delivery.deliver(told)
        except BaseException:
            box.put_back(changes)
            tell.put_back(told)
            raise
        return changed

    async def _open(self, changes: Changes) -> tuple[bool, Changes]:
        """Open rounds and let idle devices join them, if there is news of rounds or nodes, and
        every tick; whether anything changed, and what of ``changes`` the scheduler has yet to
        read."""
        box, now = self._boxes["rounds"], self.grid.clock()
        news = box.take()
        if not news and now - self._opened_at < self.grid.settings.liveness.tick_s:
            return False, changes
        try:
            await self._scheduler.refresh(changes)
            changed = await open_rounds(self.grid, self._scheduler.ready)
            changed |= await join_rounds(self.grid, self._scheduler.ready)
        except BaseException:
            box.put_back(news)
            raise
        self._opened_at = now
        return changed, Changes()

    async def control(self) -> bool:
        """Notice silence and harm, and complete jobs; whether anything changed."""
        await self._be_here()
        if not await self._leases[LEADER].held():
            return False
        changed = await replicas.notice(self.grid)
        changed |= await sweep(self.grid)
        changed |= await judge(self.grid)
        return changed | await complete_jobs(self.grid)

    async def _be_here(self) -> None:
        now = self.grid.clock()
        if (
            self._here_at is None
            or now - self._here_at >= self.grid.settings.liveness.replica_s * RENEW
        ):
            await replicas.be_here(self.grid)
            self._here_at = now

    async def verify(self) -> bool:
        """Judge what was submitted; whether anything was."""
        return await self._leases["verify"].held() and await verify_all(self.grid)

    async def merge(self) -> bool:
        """Freeze and merge what is ready; whether anything changed."""
        if not await self._leases["merge"].held():
            return False
        changed, self._next_grace = await merge_all(self.grid)
        return changed

    async def clean(self) -> bool:
        """Delete what nothing needs, if it is time again; whether any blob was."""
        now = self.grid.clock()
        if now - self._cleaned_at < CLEAN_S:
            return False
        if not await self._leases["clean"].held():
            return False
        self._cleaned_at = now
        return bool((await collect(self.grid)).blobs)

    async def webhooks(self) -> bool:
        """Deliver events to webhooks; whether anything was sent."""
        name = await self._deliverer.duty()
        if not name:
            return False
        lease = self._leases.setdefault(name, self._lease(name))
        return await lease.held() and await self._deliverer.look()

    async def settle(self, rounds: int = 50) -> None:
        """Run the grid's own duties in turn until none has anything left to do (for tests and
        simulations); what leaves the grid is left alone.

        Raises:
            RuntimeError: they still have after ``rounds`` turns: two duties undo each other.
        """
        for _ in range(rounds):
            await self.hear()
            changed = [await self.control()]
            await self.news()
            changed += [await self.assign(), await self.verify(), await self.merge()]
            if not any(changed):
                return
        raise RuntimeError("the duties do not come to rest")

    def start(self) -> None:
        """Run the loops in the background."""
        for name, duty in (
            ("news", self.news),
            ("hear", self.hear),
            ("assign", self.assign),
            ("control", self.control),
            ("verify", self.verify),
            ("merge", self.merge),
            ("clean", self.clean),
            ("webhooks", self.webhooks),
        ):
            self._tasks.append(asyncio.create_task(self._loop(name, duty), name=f"duty {name}"))
        if self.grid.db.dialect == "postgresql":
            self._tasks.append(asyncio.create_task(self._hints.run(), name="hints"))

    async def stop(self) -> None:
        """End the loops after what they are at; what takes longer is cut off, and done again by the
        next start."""
        self._stopping = True
        self._hints.stop()
        self.grid.wake.set()
        self.grid.news.ring()
        if self._tasks:
            await asyncio.wait(self._tasks, timeout=STOP_S)
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        self._tasks.clear()

    async def watch(self) -> None:
        """Wait until a loop ends by itself, and raise what ended it: a defect, or that the grid was
        moved away.

        Raises:
            Conflict: ``grid.moved``.
        """
        done, _ = await asyncio.wait(self._tasks, return_when=asyncio.FIRST_COMPLETED)
        for task in done:
            task.result()

    async def _loop(self, name: str, duty: Callable[[], Awaitable[bool]]) -> None:
        box = self._boxes.get(name)
        while not self._stopping:
            looked, began, failed = self.grid.wake.count, self.grid.clock(), False
            if box is not None and duty != self.assign:  # which opens its box itself
                box.take()
            try:
                changed = await duty()
                self.grid.troubles.pop(name, None)
                if changed:
                    self.grid.wake.set()
                    if duty != self.assign:  # whose doing is in its box
                        continue
            except (Unavailable, OSError) as problem:
                # The database, the blob store or the disk is away or full: everything is
                # repeatable, so try again.
                log.warning("duty.unavailable", duty=name, problem=str(problem))
                self.grid.troubles[name] = str(problem)
                failed = True
            finally:
                took = self.grid.clock() - began
                self.grid.metrics.looked(name, took)
            await self._calm(name, took)
            await self._rest(name, None if failed else box, looked)
            if failed and box is not None:
                box.ring()

    async def _calm(self, name: str, took: float) -> None:
        """Rest after a look that took so long, whatever there is to do."""
        if name != "news":
            await asyncio.sleep(min(CALM_S, took))
        elif self._hints.connected and not any(self._leases[n].ours for n in PROMPT):
            await self._hints.pause(NEWS_S)
        else:
            await asyncio.sleep(NEWS_S)

    async def _rest(self, name: str, box: Box | None, looked: int) -> None:
        """Wait until there may be something to do again."""
        wait = self.grid.settings.liveness.tick_s
        if name == "merge" and self._next_grace is not None:
            wait = min(wait, max(0.0, self._next_grace))
        if box is not None:
            await box.wait(wait)
            return
        if name != "hear":
            await self.grid.wake.wait(looked, wait)
            return
        # Hints are for others, unless what was heard is pressing.
        end, wake = self.grid.clock() + min(wait, FLUSH_S), self.grid.wake
        while not self._stopping and not self.grid.fleet.pressing:
            looked = wake.count
            await wake.wait(looked, end - self.grid.clock())
            if wake.count == looked:
                return


def anything(_row: Told) -> bool:
    """What may be of use to whoever assigns tasks or tells of events: all of it."""
    return True


def of_rounds(row: Told) -> bool:
    """What may let a round or a job go on: all but samples, and what assigning does."""
    if row.kind in ("task.queued", "task.leased", "round.deadline"):
        return False
    return not (row.kind.startswith("task.") and row.phase == "generate")


def submitted(row: Told) -> bool:
    """What waits to be judged."""
    return bool(row.kind == "task.submitted")
