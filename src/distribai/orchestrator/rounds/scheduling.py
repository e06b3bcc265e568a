"""Giving queued tasks to free devices: the pure matching, fed from rows, and the leases.

What the matching decides becomes true when the lease is written: a guarded update that fails if
anything has changed meanwhile, and is then tried again at the next look.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import cast

from distribai.core.pace import Basis, deadline_s, expected_s
from distribai.core.paradigms import paradigm
from distribai.core.scheduling import FreeDevice, Match, QueuedTask, match
from distribai.core.spec import JobSpec
from distribai.core.states import TASK, JobState, RoundState, TaskState, check
from distribai.core.tasks import Phase
from distribai.core.turns import Tag, Tags
from distribai.orchestrator.context import Grid
from distribai.orchestrator.rounds import tasks
from distribai.orchestrator.rounds.decisions import RoundView, view_round
from distribai.orchestrator.rounds.late import destination, may_come_back
from distribai.orchestrator.rounds.opening import SPEED_ROUNDS, AbleDevice, Wanted, able_devices
from distribai.store import leases
from distribai.store.engine import AnyRow, Tx
from distribai.store.statements import jobs, turns, work


@dataclass
class Picture:
    """What the scheduler sees: queued tasks that may be leased, and the free devices.

    ``hopeless`` are queued tasks of rounds in which nobody can finish them any more. ``tags`` are
    the organizations' accounts. ``paces`` says how long a task takes on a device. ``kept`` wait for
    the nodes that fell silent with them, ``resting`` failed everywhere and wait a while.
    """

    queued: list[QueuedTask]
    free: list[FreeDevice]
    hopeless: list[AnyRow]
    now: float
    tags: Tags
    paces: dict[str, Pace]
    kept: list[AnyRow] = field(default_factory=list)
    resting: list[AnyRow] = field(default_factory=list)

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
    gflops: Mapping[tuple[str, int], float]

    def on(self, node_id: str, device: int) -> tuple[float, Basis]:
        """Seconds that the task is expected to take there, and from what."""
        key = (node_id, device)
        return expected_s(
            self.spec, self.phase, self.steps, self.speeds.get(key), self.gflops.get(key, 0.0)
        )


async def schedule(grid: Grid) -> bool:
    """Lease queued tasks to free devices; whether anything changed."""
    async with grid.db.read() as tx:
        picture = await look(grid, tx)
    matches, _ = match(picture.queued, picture.free, picture.now, picture.tags)
    if not matches and not picture.hopeless:
        return False
    liveness = grid.settings.liveness
    async with grid.db.write() as tx:
        by_id = {t.task_id: t for t in picture.queued}
        for job_id in sorted({by_id[m.task_id].job_id for m in matches}):
            await jobs.lock(tx, job_id)
        tags: dict[tuple[str, int], Tag] = {}
        for found in matches:
            deadline, _ = picture.deadline(found, liveness.task_deadline_s)
            if await _lease(tx, found, liveness.offline_s, deadline):
                tags[found.account, found.level] = found.tag
        await turns.save(tx, tags)
    for task in picture.hopeless:
        async with grid.db.write() as tx:
            await jobs.lock(tx, task.job_id)
            await tasks.end(
                tx, task, TaskState.CANCELLED, "nobody could finish it before its round merges"
            )
    return True


async def _lease(tx: Tx, found: Match, lease_s: float, deadline_s: float) -> bool:
    check(TASK, TaskState.QUEUED, TaskState.LEASED, f"Task {found.task_id}")
    row = await leases.lease_task(
        tx, found.task_id, found.node_id, found.device, lease_s, deadline_s
    )
    if row is None:
        return False
    await tasks.record_lease(tx, row)
    return True


async def look(grid: Grid, tx: Tx) -> Picture:
    """The scheduler's view of queued tasks and free devices."""
    able = [d for d in await able_devices(tx) if not _refuses(grid, d)]
    busy = {(t.node_id, t.device) for t in await work.tasks_in(tx, (TaskState.LEASED,))}
    free = [d for d in able if (d.node_id, d.index) not in busy]
    sight = _Sight(grid, able, free, {}, {}, {})
    picture = Picture([], [_free(grid, d) for d in free], [], tx.now, await turns.tags(tx), {})
    for row in await work.queued_with_job(tx):
        if row.phase != "generate" and row.job_state == JobState.PAUSED:
            continue
        await sight.add(tx, row, picture)
    return picture


def _refuses(grid: Grid, device: AbleDevice) -> bool:
    """Whether its node has just declined a task, a full disk say, and is left alone for a while."""
    session = grid.fleet.of(device.node_id)
    return session is not None and grid.clock() < session.refused_until


def _free(grid: Grid, device: AbleDevice) -> FreeDevice:
    session = grid.fleet.of(device.node_id)
    warm = dict(session.held_versions) if session is not None else {}
    return FreeDevice(device.node_id, device.index, device.type, device.memory_mb, warm, device.has)


def _last_failed_at(row: AnyRow) -> str:
    """The node at which the last attempt failed; empty when it did not."""
    failed = row.causes and row.causes[-1]["code"] not in tasks.NO_HARM
    return str(row.causes[-1]["node_id"]) if failed else ""


@dataclass(frozen=True, slots=True)
class _JobSight:
    """What the tasks of a job share: ``fitting`` are the nodes with a device for them, ``typical``
    the median speed."""

    spec: JobSpec
    wanted: Wanted
    speeds: dict[tuple[str, int], float]
    fitting: frozenset[str]
    typical: float | None

    def cost(self, phase: Phase, steps: int) -> float:
        """Seconds that a task takes on a usual device, for its organization's account."""
        return expected_s(self.spec, phase, steps, self.typical, 0.0)[0]


@dataclass
class _Sight:
    """One look: what several tasks of a job or round share is read once."""

    grid: Grid
    able: Sequence[AbleDevice]
    free: Sequence[AbleDevice]
    jobs: dict[str, _JobSight]
    views: dict[tuple[str, int, int], RoundView]
    hopeful: dict[tuple[str, int, int, int], frozenset[str] | None]

    def __post_init__(self) -> None:
        self.gflops = {(d.node_id, d.index): d.has.gflops for d in self.able}

    async def add(self, tx: Tx, row: AnyRow, picture: Picture) -> None:
        """Put a queued task into the picture, if it may go to anybody now."""
        job = await self._job(tx, row)
        phase = cast(Phase, row.phase)
        steps = int(row.params["batches"]) if phase == "evaluate" else row.steps
        picture.paces[row.id] = Pace(job.spec, phase, steps, job.speeds, self.gflops)
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
        if row.member_id in job.fitting:
            # Its own member will be free soon: nobody else gets the slot.
            picture.queued.append(replace(task, only=row.member_id))
            return
        # Never back to where it failed as long as another could take it, and straight back only if
        # nobody else is left, after a rest.
        failed, last = tasks.failed_at(row), frozenset({task.last_failed_node}) - {""}
        rests = row.not_before is not None and row.not_before > tx.now
        if rests and not job.fitting - failed:
            picture.resting.append(row)
            return
        for barred in (failed, last):
            if job.fitting - barred:
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
            wanted = Wanted.of(spec)
            speeds = await work.speeds(tx, row.job_id, job.version - SPEED_ROUNDS)
            self.jobs[row.job_id] = _JobSight(
                spec,
                wanted,
                speeds,
                frozenset(d.node_id for d in self.able if d.fits(wanted)),
                sorted(speeds.values())[len(speeds) // 2] if speeds else None,
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

        def can(device: AbleDevice) -> bool:
            speed = job.speeds.get((device.node_id, device.index), job.typical)
            seconds = tokens / speed if speed else 0.0
            return how.can_reissue(tx.now, seconds, decision)[0]

        if decision.until is None:
            return frozenset(d.node_id for d in self.able if can(d))
        hopeful = frozenset(d.node_id for d in self.free if can(d))
        return hopeful or None
