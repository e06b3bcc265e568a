"""The orchestrator's standing duties: each repeatable, run on a hint and every tick.

Five loops, so that a long merge or a slow receiver holds up no heartbeat: *control* (write what was
heard, notice silence, open rounds, lease tasks, complete jobs, tell the nodes), *verify*, *merge*,
*webhooks* (send events out), and now and then *clean* (delete what nothing needs any more). What
decides is done under a lease on the duty's row, so that of several replicas one does it, and
another takes over when that one dies. What concerns this process's own streams needs no lease.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field

import structlog

from distribai.errors import Unavailable
from distribai.orchestrator.context import Grid
from distribai.orchestrator.fleet import replicas
from distribai.orchestrator.fleet.delivery import deliver
from distribai.orchestrator.fleet.liveness import LEADER, flush, sweep, wait_for_nodes
from distribai.orchestrator.fleet.standing import judge
from distribai.orchestrator.jobs.completion import complete_jobs
from distribai.orchestrator.retention import collect
from distribai.orchestrator.rounds.joining import join_rounds
from distribai.orchestrator.rounds.merging import merge_all
from distribai.orchestrator.rounds.opening import open_rounds
from distribai.orchestrator.rounds.scheduling import schedule
from distribai.orchestrator.rounds.verifying import verify_all
from distribai.orchestrator.webhooks.duties import Deliverer
from distribai.store import leases

log = structlog.get_logger(__name__)

RENEW = 1 / 3
"""A duty's lease (``liveness.replica_s``) is prolonged when this share of it has passed."""

CLEAN_S = 3600.0
"""Seconds between two looks for what nothing needs any more."""

STOP_S = 5.0
"""Seconds that duties have to finish what they are at when the process stops."""


@dataclass
class DutyLease:
    """This process's lease on one duty; ``renewed_at`` on the process's clock."""

    grid: Grid
    name: str
    renewed_at: float | None = None

    async def held(self) -> bool:
        """Whether the duty is ours now, after prolonging the lease if it is time.

        Whoever leads after a while in which nobody did (the leader died or was frozen, the database
        was away) first gives the nodes time to come back.
        """
        now, seconds = self.grid.clock(), self.grid.settings.liveness.replica_s
        if self.renewed_at is not None and now - self.renewed_at < RENEW * seconds:
            return True
        async with self.grid.db.write() as tx:
            had_run_out = await leases.has_run_out(tx, self.name)
            fence = await leases.take_duty(tx, self.name, self.grid.holder, seconds)
            if fence is not None and had_run_out and self.name == LEADER:
                await wait_for_nodes(self.grid, tx)
        self.renewed_at = now if fence is not None else None
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
        self._leases = {n: DutyLease(self.grid, n) for n in (LEADER, "verify", "merge", "clean")}
        self._deliverer = Deliverer(self.grid)
        # Not at the start, which has enough to do.
        self._cleaned_at = self.grid.clock()

    async def control(self) -> bool:
        """One look at everything but submissions and merges; whether anything changed."""
        changed = False
        await flush(self.grid)
        await self._be_here()
        if await self._leases[LEADER].held():
            changed |= await replicas.notice(self.grid)
            changed |= await sweep(self.grid)
            changed |= await judge(self.grid)
            changed |= await open_rounds(self.grid)
            changed |= await join_rounds(self.grid)
            changed |= await schedule(self.grid)
            changed |= await complete_jobs(self.grid)
        await deliver(self.grid)
        return changed

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
        lease = self._leases.setdefault(name, DutyLease(self.grid, name))
        return await lease.held() and await self._deliverer.look()

    async def settle(self, rounds: int = 50) -> None:
        """Run the grid's own duties in turn until none has anything left to do (for tests and
        simulations); what leaves the grid is left alone.

        Raises:
            RuntimeError: they still have after ``rounds`` turns: two duties undo each other.
        """
        for _ in range(rounds):
            if not any([await self.control(), await self.verify(), await self.merge()]):
                return
        raise RuntimeError("the duties do not come to rest")

    def start(self) -> None:
        """Run the loops in the background."""
        for name, duty in (
            ("control", self.control),
            ("verify", self.verify),
            ("merge", self.merge),
            ("clean", self.clean),
            ("webhooks", self.webhooks),
        ):
            self._tasks.append(asyncio.create_task(self._loop(name, duty), name=f"duty {name}"))

    async def stop(self) -> None:
        """End the loops after what they are at; what takes longer is cut off, and done again by the
        next start."""
        self._stopping = True
        self.grid.wake.set()
        if self._tasks:
            await asyncio.wait(self._tasks, timeout=STOP_S)
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        self._tasks.clear()

    async def watch(self) -> None:
        """Wait until a loop ends by itself, and raise what ended it: a defect."""
        done, _ = await asyncio.wait(self._tasks, return_when=asyncio.FIRST_COMPLETED)
        for task in done:
            task.result()

    async def _loop(self, name: str, duty: Callable[[], Awaitable[bool]]) -> None:
        tick = self.grid.settings.liveness.tick_s
        while not self._stopping:
            looked, began = self.grid.wake.count, self.grid.clock()
            try:
                if await duty():
                    self.grid.wake.set()
                    continue
            except (Unavailable, OSError) as problem:
                # The database, the blob store or the disk is away or full: everything is
                # repeatable, so try again.
                log.warning("duty.unavailable", duty=name, problem=str(problem))
            finally:
                self.grid.metrics.looked(name, self.grid.clock() - began)
            wait = tick
            if name == "merge" and self._next_grace is not None:
                wait = min(tick, max(0.0, self._next_grace))
            await self.grid.wake.wait(looked, wait)
