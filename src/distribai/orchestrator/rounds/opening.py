"""Opening rounds: who takes part, and the tasks that come of it.

Round v opens as soon as the job may run, its version is v, no round is under way, and enough
devices are here. The membership that opened it is recorded, and given it the split is a pure
function (``core.paradigms``). A node that joins later waits for v + 1.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass
from itertools import islice
from typing import TYPE_CHECKING, cast

from distribai.core.devices import DeviceType
from distribai.core.needs import UNMEASURED, Capacity, Needs, capacity_of, lacks
from distribai.core.pace import UNKNOWN_COST_S
from distribai.core.paradigms import Member, paradigm
from distribai.core.plain import to_plain
from distribai.core.plan import needs_of, task_memory_mb
from distribai.core.spec import JobSpec, Priority
from distribai.core.states import JOB, JobState, RoundState, Standing, TaskState, check
from distribai.core.tasks import Phase
from distribai.core.turns import in_turn
from distribai.orchestrator import events
from distribai.orchestrator.context import Grid
from distribai.orchestrator.records import MemberRecord
from distribai.orchestrator.rounds import tasks
from distribai.orchestrator.rounds.slow import resting_devices
from distribai.store.engine import AnyRow, Tx
from distribai.store.statements import fleet, jobs, submissions, turns, work

if TYPE_CHECKING:
    from distribai.orchestrator.rounds.ready import Ready

REJOIN_HEARTBEATS = 2.0
"""Heartbeats after a start in which a round waits for nodes that were here before: opened by the
first one that comes back it would go on without the others."""

SPEED_ROUNDS = 3
"""Speeds are those of the last rounds: a machine that was busy then may be free now."""

UNDER_WAY = (RoundState.OPEN, RoundState.CLOSING)
"""States of a round that has to end before its job's next one opens."""


@dataclass(frozen=True, slots=True)
class Wanted:
    """What a job's tasks want of a device."""

    memory_mb: int
    device: str
    needs: Needs

    @classmethod
    def of(cls, spec: JobSpec) -> Wanted:
        """What the tasks of ``spec`` want."""
        return cls(task_memory_mb(spec), spec.resources.device, needs_of(spec))


@dataclass(frozen=True, slots=True)
class AbleDevice:
    """A device of a node that may be given work."""

    node_id: str
    index: int
    type: DeviceType
    memory_mb: int
    has: Capacity = UNMEASURED

    def fits(self, wanted: Wanted) -> bool:
        """Whether such a task can run here."""
        enough = not self.memory_mb or self.memory_mb >= wanted.memory_mb
        kind = wanted.device in ("any", self.type)
        return enough and kind and not lacks(wanted.needs, self.has)


async def able_devices(tx: Tx) -> list[AbleDevice]:
    """Devices of nodes that are online, willing and of good standing."""
    return [d for node in await fleet.able_nodes(tx) for d in devices_of(node)]


def devices_of(node: AnyRow) -> list[AbleDevice]:
    """The devices of a node's row, with what was measured of them."""
    trusted = node.standing == Standing.TRUSTED
    return [
        AbleDevice(
            node.id,
            d["index"],
            cast(DeviceType, d["type"]),
            d["memory_mb"],
            capacity_of(node.machine, d["index"], trusted),
        )
        for d in node.devices
    ]


def candidates(
    spec: JobSpec, devices: list[AbleDevice], training_for: dict[tuple[str, int], str], job_id: str
) -> list[AbleDevice]:
    """Devices that could take part in a round of the job now.

    One that trains for another job, or is expected to, cannot; one that finishes something of this
    job, an evaluation say, is free soon.
    """
    wanted = Wanted.of(spec)
    return [
        d
        for d in devices
        if d.fits(wanted) and training_for.get((d.node_id, d.index), job_id) == job_id
    ]


async def training_devices(
    tx: Tx, states: Collection[TaskState] = (TaskState.QUEUED, TaskState.LEASED)
) -> dict[tuple[str, int], str]:
    """The job for which a device trains or is about to, by (node, device): leased to it, or queued
    and meant for it."""
    found = {}
    for task in await work.tasks_in(tx, states):
        if task.phase != "train":
            continue
        if task.state == TaskState.LEASED:
            found[task.node_id, task.device] = task.job_id
        elif task.member_id:
            found[task.member_id, task.member_device] = task.job_id
    return found


def share_left(spec: JobSpec, row: AnyRow, now: float, speeds: Iterable[float]) -> float:
    """What is left of an open round, 0 to 1: all of it as long as no speed is known."""
    fastest = max(speeds, default=0.0)
    if not fastest:
        return 1.0
    tokens = spec.steps_of_round(row.number) * spec.batch * spec.seq_len
    done = float(now - row.opened_at) * fastest / tokens
    return max(0.0, 1.0 - done)


def waits_for(job: AnyRow, devices: list[AbleDevice], training: dict[tuple[str, int], str]) -> str:
    """Why a job that may run has no open round; empty when nothing is in its way."""
    spec = tasks.spec_of(job)
    here = candidates(spec, devices, training, job.id)
    members = [Member(d.node_id, d.index) for d in here]
    chosen, reason = paradigm(spec.paradigm).eligible(members, spec.workers_min, spec.workers_max)
    if chosen:
        return ""
    if len(here) < len(devices):
        reason += f" ({len(devices) - len(here)} more do not fit or work for other jobs)"
    return reason


async def open_rounds(grid: Grid, ready: Ready) -> bool:
    """Open every round that can open; whether any did. A job for which there are too few devices in
    ``ready``, as fresh as the caller has made it, costs nothing more."""
    async with grid.db.read() as tx:
        if await still_coming_back(grid, tx):
            return False
        under_way = await work.jobs_with_rounds_in(tx, UNDER_WAY)
        waiting = [
            job
            for job in await jobs.in_states(tx, (JobState.QUEUED, JobState.RUNNING))
            if job.version < job.rounds_total and job.id not in under_way
        ]
        queue = []
        for job in waiting:  # most jobs have a round that is open, and are not asked about it
            last = await work.latest_round(tx, job.id)
            if _enough(job, last, ready):
                queue.append(WaitingJob.of(job, last))
        tags, now = await turns.tags(tx), tx.now
    opened = False
    for waits in in_turn(queue, now, tags):
        opened |= await _open(grid, waits.key)
    return opened


def _enough(job: AnyRow, last: AnyRow | None, ready: Ready) -> bool:
    """Whether there may be enough devices for a job's next round. Without this every node that
    joins would have all of them read for a job that waits for more."""
    spec = tasks.spec_of(job)
    # What an abandoned take has brought counts in the next.
    again = last is not None and last.number == job.version
    needed = 1 if again else max(1, spec.workers_min)
    wanted = Wanted.of(spec)
    return sum(1 for _ in islice((d for d in ready if d.fits(wanted)), needed)) == needed


@dataclass(frozen=True, slots=True)
class WaitingJob:
    """A job that waits for its next round, as :mod:`distribai.core.turns` sees it."""

    key: str
    organization: str
    priority: Priority
    queued_at: float
    weight: float
    cost: float
    phase: Phase = "train"

    @classmethod
    def of(cls, job: AnyRow, last: AnyRow | None) -> WaitingJob:
        """A job's row, and its last round: it waits since that one closed."""
        since = job.decided_at or job.created_at
        if last is not None:
            since = last.closed_at or last.opened_at
        cost = UNKNOWN_COST_S * int(job.spec["workers_min"])
        return cls(job.id, job.organization_id, job.priority, since, job.weight, cost)


async def still_coming_back(grid: Grid, tx: Tx) -> bool:
    """Whether nodes that worked before this process started have not come back yet but may."""
    rejoin_s = REJOIN_HEARTBEATS * grid.settings.liveness.heartbeat_s
    if tx.now >= grid.started_at + rejoin_s:
        return False
    return await fleet.any_without_session(tx)


def _under_way(row: AnyRow | None) -> bool:
    return row is not None and row.state in UNDER_WAY


async def _open(grid: Grid, job_id: str) -> bool:
    async with grid.db.write() as tx:
        job = await jobs.lock(tx, job_id)
        assert job is not None, "jobs are never deleted"
        last = await work.latest_round(tx, job_id)
        state = JobState(job.state)
        if state not in (JobState.QUEUED, JobState.RUNNING) or _under_way(last):
            return False
        number = job.version
        spec = tasks.spec_of(job)
        here = candidates(spec, await able_devices(tx), await training_devices(tx), job_id)
        speeds = await submissions.speeds(tx, job_id, number - SPEED_ROUNDS)
        how = paradigm(spec.paradigm)
        take, carried = 0, 0
        if last is not None and last.number == number:
            take = last.take + 1
            made = await work.tasks_of_round(tx, job_id, number, last.take)
            carried = sum(t.state == TaskState.ACCEPTED for t in made)
        resting = await resting_devices(tx, job_id, number, spec.rounds.staleness)
        ready = [d for d in here if (d.node_id, d.index) not in resting]
        members: Sequence[Member] = ()
        for chosen in (ready, here):  # without the slow ones, if a round can do without them
            members, _ = how.eligible(
                [Member(d.node_id, d.index, speeds.get((d.node_id, d.index))) for d in chosen],
                max(1, spec.workers_min - carried),
                spec.workers_max,
            )
            if members:
                break
        if not members:
            return False
        slots, pool, reason = how.slots(spec, number, members, jobs.pool_of(job))
        if carried:
            reason += f"; {carried} submissions of the abandoned round count in it"
        await work.add_round(
            tx,
            job_id=job_id,
            number=number,
            take=take,
            state=RoundState.OPEN.value,
            reason=reason,
            members=[to_plain(MemberRecord(s.node_id, s.device, s.steps)) for s in slots],
            steps=spec.steps_of_round(number),
            opened_at=tx.now,
        )
        if take:
            await submissions.carry_over(tx, job_id, number, take - 1, take)
        await jobs.save_pool(tx, job_id, pool)
        await tasks.add_slots(grid, tx, job, number, take, slots)
        if state is JobState.QUEUED:
            check(JOB, state, JobState.RUNNING, f"Job {job_id}")
            await jobs.set_state(tx, job_id, JobState.RUNNING, started_at=tx.now)
            await events.record(tx, "job.running", job_id=job_id)
        await events.record(
            tx,
            "round.open",
            job_id=job_id,
            data={"round": number, "take": take, "slots": len(slots), "reason": reason},
        )
    return True
