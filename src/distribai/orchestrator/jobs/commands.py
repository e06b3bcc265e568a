"""What changes a job on a person's word.

Each command is one transaction that checks the transition, writes the state and its event, and then
wakes the duties. A command that finds its work done already succeeds.
"""

from __future__ import annotations

from dataclasses import dataclass

from distribai.core.people import HOME, Principal
from distribai.core.plain import Plain, to_plain
from distribai.core.ranges import SamplePool
from distribai.core.spec import JobSpec
from distribai.core.states import JOB, JobState, RoundState, TaskState, check, is_terminal
from distribai.core.text import MAX_REASON, clean
from distribai.core.turns import LEAST_WEIGHT, MOST_WEIGHT
from distribai.core.validation import validate_spec
from distribai.errors import Conflict, InvalidSpec
from distribai.orchestrator import events
from distribai.orchestrator.context import Grid
from distribai.orchestrator.idempotency import Key, SameKey, key_for, made_before, remember
from distribai.orchestrator.jobs import forecasting, preparation
from distribai.orchestrator.jobs.rows import lock_job
from distribai.orchestrator.people import admission
from distribai.orchestrator.rounds import tasks as task_rows
from distribai.store import leases
from distribai.store.engine import AnyRow, Tx
from distribai.store.statements import jobs as statements
from distribai.store.statements import records, work
from distribai.store.values import ranges_to_json


@dataclass(frozen=True, slots=True)
class Origin:
    """The job that a new one goes on from: its id, whose it is, the samples that it has left, its
    weight."""

    job_id: str
    organization_id: str
    pool: SamplePool
    weight: float


async def create_job(
    grid: Grid,
    spec: JobSpec,
    idempotency_key: str | None,
    by: str,
    *,
    organization_id: str = HOME,
    caller: Principal | None = None,
    origin: Origin | None = None,
) -> str:
    """Make a job in state ``submitted``, or ``queued`` if its organization's policy accepts it at
    once, and return its id.

    Takes as long as cutting the data into shards does. The blobs come first and the rows last, so
    that whatever fails on the way leaves no job behind.

    Args:
        grid: where.
        spec: the effective spec; it is checked again.
        idempotency_key: the same key with the same spec is the same job.
        by: who asks, for the record.
        organization_id: whose job it is; the origin's, if there is one.
        caller: who asks: idempotency keys are its own, and it may only name blobs whose bytes it
            has sent, or that its origin's job has made. None: the grid itself.
        origin: the job that it goes on from.

    Raises:
        InvalidSpec, InvalidData, Integrity: the spec, its data or its weights cannot be used.
        Conflict: ``http.idempotency``: the key was used for another spec; ``quota.*``: the
            organization may not have such a job now.
    """
    validate_spec(spec)
    asked = admission.asked_of(grid, spec)
    if origin is not None:
        organization_id = origin.organization_id
    key = _key(
        spec, idempotency_key, by if caller is None else caller.owner, origin, organization_id
    )
    async with grid.db.read() as tx:
        if (made := await made_before(tx, key)) is not None:
            return made
        # Asked again below; but nobody shall wait for data to be cut only to be refused then.
        admission.refuse(await admission.excess_of(tx, organization_id, asked))
    await preparation.check_blobs(grid, spec, caller if origin is None else None)
    data = await preparation.prepare_data(grid, spec)
    job_id = grid.new_id("job")
    first = await preparation.make_first_version(grid, job_id, spec)
    try:
        async with grid.db.write() as tx:
            name, verdict = await admission.admit(tx, organization_id, asked)
            policy = f"policy of {name}"
            decision = f"The {policy}: {verdict.reason}."
            whose = (organization_id, decision)
            await _insert(tx, job_id, spec, by, asked.parameters, data, first, origin, whose)
            await remember(tx, key, job_id)
            told = {"by": by, "organization": name}
            if origin is not None:
                told["retry_of"] = origin.job_id
            await events.record(tx, "job.submitted", job_id=job_id, data=told)
            if verdict.accepted:
                job = await lock_job(tx, job_id)
                await _queue(grid, tx, job, {"by": policy, "reason": verdict.reason})
    except SameKey:
        # The same request came twice at once; the other one was first, and this one is undone.
        async with grid.db.read() as tx:
            made = await made_before(tx, key)
        assert made is not None, "a fresh key is not forgotten"
        return made
    grid.wake.set()
    return job_id


def _key(
    spec: JobSpec, key: str | None, owner: str, origin: Origin | None, organization_id: str
) -> Key | None:
    """The idempotency key of a new job. For ``home`` the request is the spec alone, as it was in
    grids that knew no organizations."""
    if origin is not None:
        return key_for(owner, "retries", key, [origin.job_id, spec])
    return key_for(owner, "jobs", key, spec if organization_id == HOME else [organization_id, spec])


async def _insert(
    tx: Tx,
    job_id: str,
    spec: JobSpec,
    by: str,
    parameters: int,
    data: preparation.PreparedData,
    first: preparation.FirstVersion,
    origin: Origin | None,
    whose: tuple[str, str],
) -> None:
    """``whose``: the organization, and what its policy said."""
    pool = origin.pool if origin is not None else SamplePool()
    await statements.add(
        tx,
        id=job_id,
        name=spec.name,
        state=JobState.SUBMITTED.value,
        reason="",
        spec=to_plain(spec),
        priority=spec.priority,
        created_at=tx.now,
        created_by=by,
        version=0,
        rounds_total=spec.round_count,
        parameters=parameters,
        manifest_hash=first.manifest.manifest_hash,
        dataset_key=data.key,
        plan={
            **preparation.plan_figures(spec, parameters, data),
            "forecast": to_plain(await forecasting.forecast_for(tx, spec, data.figures)),
        },
        pool_cursor=pool.cursor,
        pool_returned=ranges_to_json(pool.returned),
        tokens=0,
        organization_id=whose[0],
        decision=whose[1],
        weight=origin.weight if origin is not None else 1.0,
        retry_of=origin.job_id if origin is not None else "",
    )
    await statements.add_version(
        tx,
        job_id=job_id,
        version=0,
        weights_hash=first.manifest.weights_hash,
        weights_sha=first.weights.sha256,
        weights_size=first.weights.size,
        manifest=to_plain(first.manifest),
        created_at=tx.now,
    )
    await records.add_blob(tx, first.weights, "weights", job_id)
    for file in spec.data.files:  # the next job over them need not send them again
        await records.add_blob(tx, file, "data", job_id)


async def accept_job(grid: Grid, job_id: str, by: str) -> None:
    """Queue a submitted job; accepting an accepted one changes nothing.

    Raises:
        NotFound: ``job.unknown``.
        Conflict: ``job.state``: it was declined or has ended.
    """
    async with grid.db.write() as tx:
        job = await lock_job(tx, job_id)
        if job.state in (JobState.QUEUED, JobState.RUNNING, JobState.PAUSED):
            return
        await statements.change(tx, job_id, decision="")
        await forecasting.renew(tx, job)
        await _queue(grid, tx, job, {"by": by})
    grid.wake.set()


async def _queue(grid: Grid, tx: Tx, job: AnyRow, data: dict[str, Plain]) -> None:
    """Accept a job whose row is locked; ``data`` says who or what has."""
    _check(job, JobState.QUEUED, "accepted")
    await statements.set_state(tx, job.id, JobState.QUEUED, decided_at=tx.now)
    await task_rows.add_evaluation(grid, tx, job, 0)
    await events.record(tx, "job.queued", job_id=job.id, data=data)


async def decline_job(grid: Grid, job_id: str, why: str, by: str) -> None:
    """Refuse a submitted job, with the reason; declining a declined one changes nothing.

    Raises:
        NotFound: ``job.unknown``.
        Conflict: ``job.state``: it was accepted or has ended.
    """
    why = clean(why, MAX_REASON)
    async with grid.db.write() as tx:
        job = await lock_job(tx, job_id)
        if job.state == JobState.DECLINED:
            return
        _check(job, JobState.DECLINED, "declined")
        await statements.set_state(
            tx, job_id, JobState.DECLINED, reason=why, decided_at=tx.now, ended_at=tx.now
        )
        await events.record(tx, "job.declined", job_id=job_id, data={"by": by, "reason": why})


async def cancel_job(grid: Grid, job_id: str, why: str, by: str) -> None:
    """End an open job; its open rounds and tasks end with it.

    Raises:
        NotFound: ``job.unknown``.
        Conflict: ``job.state``: it has ended otherwise.
    """
    why = clean(why, MAX_REASON)
    async with grid.db.write() as tx:
        job = await lock_job(tx, job_id)
        if job.state == JobState.CANCELLED:
            return
        _check(job, JobState.CANCELLED, "cancelled")
        await end_job(tx, job, JobState.CANCELLED, why or f"cancelled by {by}")
    grid.wake.set()


async def pause_job(grid: Grid, job_id: str, by: str) -> None:
    """Let a running job rest: what is leased goes on, nothing new is leased.

    Raises:
        NotFound: ``job.unknown``.
        Conflict: ``job.state``: it does not run.
    """
    await _switch(grid, job_id, JobState.PAUSED, "paused", by)


async def resume_job(grid: Grid, job_id: str, by: str) -> None:
    """Let a paused job go on.

    Raises:
        NotFound: ``job.unknown``.
        Conflict: ``job.state``: it is not paused.
    """
    await _switch(grid, job_id, JobState.RUNNING, "resumed", by)


async def set_weight(grid: Grid, job_id: str, weight: float, by: str) -> None:
    """Let an open job weigh more or less than others of its tier (``core.turns``).

    Raises:
        NotFound: ``job.unknown``.
        InvalidSpec: ``spec.invalid``: the weight is out of bounds.
        Conflict: ``job.state``: it has ended.
    """
    if not LEAST_WEIGHT <= weight <= MOST_WEIGHT:
        raise InvalidSpec(
            "spec.invalid",
            f"A job cannot weigh {weight}.",
            f"Weights lie between {LEAST_WEIGHT:g} and {MOST_WEIGHT:g}; 1 is usual.",
            field="weight",
        )
    async with grid.db.write() as tx:
        job = await lock_job(tx, job_id)
        if is_terminal(JOB, JobState(job.state)):
            raise _wrong_state(job, "weighed")
        if job.weight == weight:
            return
        await statements.change(tx, job_id, weight=weight)
        await events.record(tx, "job.weighed", job_id=job_id, data={"by": by, "weight": weight})
    grid.wake.set()


async def _switch(grid: Grid, job_id: str, new: JobState, verb: str, by: str) -> None:
    async with grid.db.write() as tx:
        job = await lock_job(tx, job_id)
        if job.state == new:
            return
        if new is JobState.RUNNING and job.state != JobState.PAUSED:
            raise _wrong_state(job, verb)
        _check(job, new, verb)
        await statements.set_state(tx, job_id, new, reason="")
        await events.record(tx, f"job.{new.value}", job_id=job_id, data={"by": by})
    grid.wake.set()


async def end_job(tx: Tx, job: AnyRow, new: JobState, reason: str) -> None:
    """End a job whose row is locked: its open rounds are abandoned, its open tasks cancelled.

    Raises:
        Conflict: ``state.transition``.
    """
    check(JOB, JobState(job.state), new, f"Job {job.id}")
    await statements.set_state(tx, job.id, new, reason=reason, ended_at=tx.now)
    for row in await work.rounds_of(tx, job.id):
        if row.state in (RoundState.OPEN, RoundState.CLOSING):
            await work.leave_round(tx, row, RoundState.ABANDONED, reason=reason, closed_at=tx.now)
    left = await work.tasks_in(tx, work.OPEN_TASKS, job_id=job.id)
    await leases.lock_tasks(tx, [task.id for task in left])
    for task in left:
        # A sample that somebody asked for is worth having whatever became of the job.
        if task.phase != "generate":
            await task_rows.end(tx, task, TaskState.CANCELLED, reason)
    await events.record(tx, f"job.{new.value}", job_id=job.id, data={"reason": reason})


def _check(job: AnyRow, new: JobState, verb: str) -> None:
    if new not in JOB[JobState(job.state)]:
        raise _wrong_state(job, verb)


def _wrong_state(job: AnyRow, verb: str) -> Conflict:
    return Conflict(
        "job.state",
        f"Job {job.name} is {job.state}: it cannot be {verb}.",
        _instead(job, verb),
    )


def _instead(job: AnyRow, verb: str) -> str:
    """What may be done with the job instead, or why nothing may."""
    if job.state == JobState.SUBMITTED:
        return f"An operator accepts it first: distribai job accept {job.id}"
    if is_terminal(JOB, JobState(job.state)):
        return f"It is {job.state} because: {job.reason}" if job.reason else "It has ended."
    if verb == "declined":
        return f"An accepted job is cancelled: distribai job cancel {job.id}"
    return "It has no nodes yet." if job.state == JobState.QUEUED else ""
