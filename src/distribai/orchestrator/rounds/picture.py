"""What the scheduler sees: queued tasks that may be leased, free devices, how long each takes.

The same sight answers why something waits (``jobs.why``, ``fleet.why``).
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property
from itertools import islice
from typing import cast

from distribai.core.pace import Basis, deadline_s, expected_s
from distribai.core.paradigms import paradigm
from distribai.core.scheduling import FreeDevice, Match, QueuedTask
from distribai.core.spec import JobSpec
from distribai.core.states import JobState, RoundState
from distribai.core.tasks import Phase
from distribai.core.turns import Tags
from distribai.orchestrator.context import Grid
from distribai.orchestrator.rounds import tasks
from distribai.orchestrator.rounds.decisions import RoundView, view_round
from distribai.orchestrator.rounds.late import destination, may_come_back
from distribai.orchestrator.rounds.opening import SPEED_ROUNDS, AbleDevice, Wanted
from distribai.orchestrator.rounds.ready import Ready
from distribai.store.engine import AnyRow, Tx
from distribai.store.statements import jobs, submissions, turns, work

SAMPLE = 64
"""Nodes that fit a job and are named, before anybody asks for all of them."""


@dataclass
class Picture:
    """One look: queued tasks that may be leased, and the devices in ``ready``.

    ``hopeless`` are queued tasks of rounds in which nobody can finish them any more. ``tags`` are
    the organizations' accounts. ``paces`` says how long a task takes on a device. ``kept`` wait for
    the nodes that fell silent with them, ``resting`` failed everywhere and wait a while.
    ``declined`` are nodes that have just declined a task, a full disk say, and are left alone.
    """

    ready: Ready
    declined: Collection[str]
    now: float
    tags: Tags
    queued: list[QueuedTask] = field(default_factory=list)
    hopeless: list[AnyRow] = field(default_factory=list)
    paces: dict[str, Pace] = field(default_factory=dict)
    kept: list[AnyRow] = field(default_factory=list)
    resting: list[AnyRow] = field(default_factory=list)

    @property
    def free(self) -> list[FreeDevice]:
        """All free devices."""
        return [d for d in self.ready.free if d.node_id not in self.declined]

    def deadline(self, found: Match, usual: float) -> tuple[float, str]:
        """Seconds in which a match is to be done, and why so many."""
        expected, basis = self.paces[found.task_id].on(found.node_id, found.device)
        return deadline_s(expected, basis, usual)


@dataclass(frozen=True, slots=True)
class Pace:
    """How long one task takes: what the devices reached in its job, what they were measured at."""

    spec: JobSpec
    phase: Phase
    steps: int
    speeds: Mapping[tuple[str, int], float]
    gflops: Callable[[str, int], float]

    def on(self, node_id: str, device: int) -> tuple[float, Basis]:
        """Seconds that the task is expected to take there, and from what."""
        speed = self.speeds.get((node_id, device))
        gflops = self.gflops(node_id, device)
        return expected_s(self.spec, self.phase, self.steps, speed, gflops)


async def look(
    grid: Grid, tx: Tx, ready: Ready | None = None, speeds: Speeds | None = None
) -> Picture:
    """The scheduler's view of queued tasks and free devices; without ``ready``, as it was kept, all
    devices are read."""
    if ready is None:
        ready = Ready(grid)
        await ready.read_all(tx)
    declined = grid.fleet.declined(grid.clock())
    picture = Picture(ready, declined, tx.now, {})
    rows = await work.queued_with_job(tx)
    if not rows:
        return picture
    picture.tags = await turns.tags(tx)
    sight = _Sight(grid, ready, declined, speeds or Speeds())
    for row in rows:
        if row.phase != "generate" and row.job_state == JobState.PAUSED:
            continue
        await sight.add(tx, row, picture)
    return picture


def _last_failed_at(row: AnyRow) -> str:
    """The node at which the last attempt failed; empty when it did not."""
    failed = row.causes and row.causes[-1]["code"] not in tasks.NO_HARM
    return str(row.causes[-1]["node_id"]) if failed else ""


class Speeds:
    """The jobs' speeds. They change with every result of a round, and count by the order of
    magnitude: they are kept from look to look until :meth:`forget`."""

    def __init__(self) -> None:
        self._known: dict[
            tuple[str, int], tuple[Mapping[tuple[str, int], float], float | None]
        ] = {}

    def forget(self) -> None:
        """Read them anew."""
        self._known.clear()

    async def of(self, tx: Tx, job: AnyRow) -> tuple[Mapping[tuple[str, int], float], float | None]:
        """Tokens per second by (node, device), and the median; None when nothing is known."""
        key = (job.id, job.version)
        if key not in self._known:
            found = await submissions.speeds(tx, job.id, job.version - SPEED_ROUNDS)
            median = sorted(found.values())[len(found) // 2] if found else None
            self._known[key] = (found, median)
        return self._known[key]


@dataclass
class _JobSight:
    """What the tasks of a job share; ``typical`` is the median speed."""

    spec: JobSpec
    wanted: Wanted
    speeds: Mapping[tuple[str, int], float]
    typical: float | None
    ready: Ready
    declined: Collection[str]

    def fits(self, device: AbleDevice) -> bool:
        """Whether a task of the job could go to an able device."""
        return device.fits(self.wanted) and device.node_id not in self.declined

    def fit_on(self, node_id: str) -> bool:
        """Whether it could go to a node."""
        return any(self.fits(d) for d in self.ready.on(node_id))

    def fit_beside(self, barred: frozenset[str]) -> bool:
        """Whether it could go to a node that is not one of ``barred``."""
        if self._some - barred:
            return True
        return len(self._some) == SAMPLE and bool(self._all - barred)

    @cached_property
    def _some(self) -> frozenset[str]:
        fitting = (d.node_id for d in self.ready if self.fits(d))
        return frozenset(islice(fitting, SAMPLE))

    @cached_property
    def _all(self) -> frozenset[str]:
        return frozenset(d.node_id for d in self.ready if self.fits(d))

    def cost(self, phase: Phase, steps: int) -> float:
        """Seconds that a task takes on a usual device, for its organization's account."""
        return expected_s(self.spec, phase, steps, self.typical, 0.0)[0]


@dataclass
class _Sight:
    """One look: what several tasks of a job or round share is read once."""

    grid: Grid
    ready: Ready
    declined: Collection[str]
    speeds: Speeds
    jobs: dict[str, _JobSight] = field(default_factory=dict)
    views: dict[tuple[str, int, int], RoundView] = field(default_factory=dict)
    hopeful: dict[tuple[str, int, int, int], frozenset[str] | None] = field(default_factory=dict)

    async def add(self, tx: Tx, row: AnyRow, picture: Picture) -> None:
        """Put a queued task into the picture, if it may go to anybody now."""
        job = await self._job(tx, row)
        phase = cast(Phase, row.phase)
        steps = int(row.params["batches"]) if phase == "evaluate" else row.steps
        picture.paces[row.id] = Pace(job.spec, phase, steps, job.speeds, self.ready.gflops)
        task = QueuedTask(
            task_id=row.id,
            job_id=row.job_id,
            phase=phase,
            priority="P0" if row.phase == "generate" else job.spec.priority,
            queued_at=row.created_at,
            memory_mb=job.wanted.memory_mb,
            device=job.spec.resources.device,
            needs=job.wanted.needs,
            organization=row.organization_id,
            weight=row.weight,
            cost=job.cost(phase, steps),
            base_version=row.round,
            preferred=(row.member_id, row.member_device) if row.member_id else None,
            last_failed_node=_last_failed_at(row),
        )
        if row.member_id and job.fit_on(row.member_id):
            # Its own member will be free soon: nobody else gets the slot.
            picture.queued.append(replace(task, only=row.member_id))
            return
        # Never back to where it failed as long as another could take it, and straight back only if
        # nobody else is left, after a rest.
        failed, last = tasks.failed_at(row), frozenset({task.last_failed_node}) - {""}
        rests = row.not_before is not None and row.not_before > tx.now
        if rests and not job.fit_beside(failed):
            picture.resting.append(row)
            return
        for barred in (failed, last):
            if job.fit_beside(barred):
                task = replace(task, excluded=barred)
                break
        if row.phase == "train":
            if await self._is_kept(tx, row, job):
                picture.kept.append(row)
                return
            hopeful = await self._hopeful(tx, row, job)
            if hopeful is None:
                picture.hopeless.append(row)
                return
            task = replace(task, among=hopeful)
        picture.queued.append(task)

    async def _job(self, tx: Tx, row: AnyRow) -> _JobSight:
        if row.job_id not in self.jobs:
            job = await jobs.get(tx, row.job_id)
            assert job is not None
            spec = tasks.spec_of(job)
            known = await self.speeds.of(tx, job)
            self.jobs[row.job_id] = _JobSight(
                spec, Wanted.of(spec), *known, self.ready, self.declined
            )
        return self.jobs[row.job_id]

    async def _is_kept(self, tx: Tx, row: AnyRow, job: _JobSight) -> bool:
        """Whether it is its own node's, in this round or as late work."""
        if not may_come_back(row):
            return False
        view = await self._view(tx, (row.job_id, row.round, row.take), job.spec)
        return (await destination(tx, row)).exists if view is None else row.id in view.kept

    async def _view(self, tx: Tx, key: tuple[str, int, int], spec: JobSpec) -> RoundView | None:
        """The round ``key`` as it is now, None when it is not open."""
        if key not in self.views:
            current = await work.get_round(tx, *key)
            if current is None or current.state != RoundState.OPEN:
                return None
            self.views[key] = await view_round(tx, spec, current, self.grid.not_before)
        return self.views[key]

    async def _hopeful(self, tx: Tx, row: AnyRow, job: _JobSight) -> frozenset[str] | None:
        """Nodes that could do a dead slot's work in time; None when no free one can."""
        key = (row.job_id, row.round, row.take)
        if (*key, row.steps) not in self.hopeful:
            self.hopeful[*key, row.steps] = await self._find_hopeful(tx, key, row.steps, job)
        return self.hopeful[*key, row.steps]

    async def _find_hopeful(
        self, tx: Tx, key: tuple[str, int, int], steps: int, job: _JobSight
    ) -> frozenset[str] | None:
        spec = job.spec
        view = await self._view(tx, key, spec)
        if view is None:
            return None
        decision = view.decision
        tokens = steps * spec.batch * spec.seq_len
        how = paradigm(spec.paradigm)

        def can(device: AbleDevice | FreeDevice) -> bool:
            if device.node_id in self.declined:
                return False
            speed = job.speeds.get((device.node_id, device.index), job.typical)
            seconds = tokens / speed if speed else 0.0
            return how.can_reissue(tx.now, seconds, decision)[0]

        if decision.until is None:
            return frozenset(d.node_id for d in self.ready if can(d))
        hopeful = frozenset(d.node_id for d in self.ready.free if can(d))
        return hopeful or None
