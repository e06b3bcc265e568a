"""Work for devices that an open round has none for: a share of what is left of the round.

A machine that comes back as a stranger because its disk was lost, one that was away when the round
opened: each would idle until the next round opens. While a round's quorum is open it gets a slot of
its own instead, sized to end with the others; what it cannot do by then, it hands in as far as it
got (ADR 0005). A device that has had a task in the round gets no other one.
"""

from __future__ import annotations

from dataclasses import replace

from distribai.core.paradigms import Member, paradigm
from distribai.core.plain import to_plain
from distribai.core.states import JobState, RoundState, TaskState
from distribai.orchestrator import events
from distribai.orchestrator.context import Grid
from distribai.orchestrator.records import MemberRecord
from distribai.orchestrator.rounds import late, tasks
from distribai.orchestrator.rounds.decisions import EXPECTED, lock_round, view_round
from distribai.orchestrator.rounds.opening import (
    SPEED_ROUNDS,
    AbleDevice,
    candidates,
    devices_of,
    share_left,
    training_devices,
)
from distribai.orchestrator.rounds.ready import Ready
from distribai.orchestrator.rounds.slow import resting_devices
from distribai.store.engine import AnyRow, Tx
from distribai.store.statements import fleet, jobs, submissions, work

WORTH_JOINING = 0.05
"""Share of a round that must be left: an update's bytes are the same, however little it holds."""


async def join_rounds(grid: Grid, ready: Ready) -> bool:
    """Give idle devices a share of every open round whose quorum is open; whether any got one.

    Which devices are idle is known in ``ready``, as fresh as the caller has made it: as long as all
    are busy nothing is read, and those that get a share are asked after in the database.
    """
    if not len(ready.free):
        return False
    async with grid.db.read() as tx:
        found = [
            row
            for row in await work.rounds_in(tx, RoundState.OPEN)
            if row.deadline_at is None and await _idle(tx, row, ready)
        ]
    joined = False
    for row in found:
        joined |= await _join(grid, row, ready)
    return joined


async def _idle(tx: Tx, row: AnyRow, ready: Ready) -> list[AbleDevice]:
    """Devices that could work for the round and have nothing to do in it, beyond those that its
    slots without a node will take."""
    job = await jobs.get(tx, row.job_id)
    assert job is not None, "rounds.job_id refers to it"
    if job.state != JobState.RUNNING:
        return []
    rows = await work.tasks_of_round(tx, row.job_id, row.number, row.take)
    spec = tasks.spec_of(job)
    room = spec.workers_max - sum(t.state in EXPECTED for t in rows)
    if room <= 0:
        return []
    kept = await late.kept_for_their_nodes(tx, spec, row, rows)
    waiting = [t for t in rows if t.state == TaskState.QUEUED and t.id not in kept]
    busy = {(t.member_id, t.member_device) for t in waiting}
    busy |= {(t.node_id, t.device) for t in rows}
    free = [d for d in ready.idle() if (d.node_id, d.index) not in busy]
    idle = candidates(spec, free, await training_devices(tx, (TaskState.QUEUED,)), row.job_id)
    if idle:
        resting = await resting_devices(tx, row.job_id, row.number, spec.rounds.staleness)
        idle = [d for d in idle if (d.node_id, d.index) not in resting]
    orphans = sum(not t.member_id for t in waiting)
    return sorted(idle, key=lambda d: (d.node_id, d.index))[orphans:][:room]


async def _still_idle(tx: Tx, devices: list[AbleDevice]) -> list[AbleDevice]:
    """Of ``devices`` those that are able and free in the database, too."""
    ids = {d.node_id for d in devices}
    able = {d for node in await fleet.able_nodes(tx, ids) for d in devices_of(node)}
    leased = {(t.node_id, t.device) for t in await work.leased_devices(tx, ids)}
    return [d for d in devices if d in able and (d.node_id, d.index) not in leased]


async def _join(grid: Grid, row: AnyRow, ready: Ready) -> bool:
    async with grid.db.write() as tx:
        locked = await lock_round(tx, row, RoundState.OPEN)
        if locked is None:
            return False
        job, current = locked
        spec = tasks.spec_of(job)
        view = await view_round(tx, spec, current, grid.not_before)
        speeds = await submissions.speeds(tx, job.id, row.number - SPEED_ROUNDS)
        share = share_left(spec, current, tx.now, speeds.values())
        idle = await _still_idle(tx, await _idle(tx, current, ready))
        still_open = view.decision.action == "wait" and view.decision.until is None
        if not (still_open and idle and share >= WORTH_JOINING):
            return False
        members = [Member(d.node_id, d.index, speeds.get((d.node_id, d.index))) for d in idle]
        full = spec.steps_of_round(row.number)
        rank = max((t.slot for t in view.tasks), default=-1) + 1
        how = paradigm(spec.paradigm)
        pool = jobs.pool_of(job)
        for slot in how.slots(spec, row.number, members, pool)[0]:
            steps = max(1, min(slot.steps, round(full * share)))
            samples, pool = pool.take(steps * spec.batch)
            slot = replace(
                slot,
                steps=steps,
                samples=samples,
                rank=rank + slot.rank,
                world_size=rank + len(members),
            )
            await tasks.add_slots(grid, tx, job, row.number, row.take, [slot])
            record = MemberRecord(slot.node_id, slot.device, slot.steps)
            await work.add_member(tx, current, to_plain(record))
        await jobs.save_pool(tx, job.id, pool)
        await events.record(
            tx,
            "round.joined",
            job_id=job.id,
            data={"round": row.number, "take": row.take, "slots": len(members)},
        )
    return True
