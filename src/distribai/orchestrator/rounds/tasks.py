"""Making, requeueing and ending tasks: the only place where a task's state is written.

All functions work on a job whose row the transaction has locked. Whatever way a training task ends
without having been accepted, its samples go back to the job's pool in the same transaction, from
where they go into new tasks.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from functools import lru_cache
from typing import Any

from distribai.core.paradigms import Slot
from distribai.core.plain import Plain, canonical_json, from_plain
from distribai.core.plan import evaluation_batches
from distribai.core.ranges import Ranges
from distribai.core.spec import JobSpec
from distribai.core.states import TASK, TaskState, check
from distribai.core.tasks import works_on
from distribai.orchestrator import events
from distribai.orchestrator.context import Grid
from distribai.store import leases
from distribai.store.engine import AnyRow, Tx
from distribai.store.outbox import Change
from distribai.store.statements import fleet, jobs, work
from distribai.store.values import ranges_from_json, ranges_to_json

LOST, LET_GO, DECLINED = "task.lost", "task.let_go", "task.declined"
"""Causes that are no failed attempt: the node fell silent and may come back with the task, it has
the task no longer, or it would not take it."""

NO_HARM = frozenset({LOST, LET_GO})
"""Causes after which the same node may have the task again at once; one that has let the same task
go before has to wait as if the task had failed there (:data:`REST_S`)."""

REST_S, MAX_REST_S = 5.0, 300.0
"""Seconds that a task is kept from the nodes at which it failed, or whose results of it were
rejected; each further failure doubles them. A node whose disk is full, or whose memory is broken,
would use up all attempts in the time of a few messages."""

LOST_LEASES_PER_ATTEMPT = 4
"""A task may lose so many times ``max_attempts`` leases before it counts as the machines' killer:
nodes come and go, which is not the job's fault; a task that takes every machine down with it is.
"""


async def add(
    tx: Tx,
    task_id: str,
    job: AnyRow,
    number: int,
    phase: str,
    *,
    params: Mapping[str, Plain] | None = None,
    take: int = 0,
    **values: Any,
) -> None:
    """Queue a task of ``job`` on version ``number``."""
    row = {
        "id": task_id,
        "round": number,
        "take": take,
        "phase": phase,
        "params": dict(params or {}),
        "samples": [],
        **values,
    }
    await _add_all(tx, job, [row])


async def _add_all(tx: Tx, job: AnyRow, rows: Sequence[Mapping[str, Any]]) -> None:
    await work.add_tasks(tx, job.id, rows)
    told = [
        Change("task.queued", job.id, r["id"], data={"phase": r["phase"], "round": r["round"]})
        for r in rows
    ]
    await events.record_all(tx, told)


async def add_slots(
    grid: Grid, tx: Tx, job: AnyRow, number: int, take: int, slots: Iterable[Slot]
) -> None:
    """Queue slots of a round, each meant for its member."""
    rows = [
        {
            "id": grid.new_id("task"),
            "round": number,
            "take": take,
            "phase": "train",
            "slot": slot.rank,
            "member_id": slot.node_id,
            "member_device": slot.device,
            "samples": ranges_to_json(slot.samples),
            "steps": slot.steps,
            "inner_step_offset": slot.inner_step_offset,
            "params": {"world_size": slot.world_size},
        }
        for slot in slots
    ]
    await _add_all(tx, job, rows)


async def add_evaluation(grid: Grid, tx: Tx, job: AnyRow, version: int) -> None:
    """Queue the held-out loss of a version, over the same sequences for every version."""
    data = await jobs.dataset(tx, job.dataset_key)
    assert data is not None, "jobs.dataset_key refers to it"
    batch, inner = int(job.spec["batch"]), int(job.spec["rounds"]["inner_steps"])
    batches = evaluation_batches(batch, inner, int(data.figures["held_out_sequences"]))
    await add(tx, grid.new_id("task"), job, version, "evaluate", params={"batches": batches})


async def add_replacement(tx: Tx, task_id: str, job: AnyRow, old: AnyRow) -> None:
    """Queue a new task in the place of ``old``, which was rejected, with samples from the pool. It
    knows where it failed, and rests as a failed one does: see :data:`REST_S`."""
    spec_batch = int(job.spec["batch"])
    pool = jobs.pool_of(await _fresh(tx, job))
    samples, pool = pool.take(old.steps * spec_batch)
    await jobs.save_pool(tx, job.id, pool)
    await add(
        tx,
        task_id,
        job,
        old.round,
        "train",
        take=old.take,
        slot=old.slot,
        samples=ranges_to_json(samples),
        steps=old.steps,
        inner_step_offset=old.inner_step_offset,
        params=old.params,
        failures=old.failures,
        causes=old.causes,
        not_before=tx.now + rest_s(old.failures),
    )


async def add_again(tx: Tx, task_id: str, job: AnyRow, old: AnyRow) -> None:
    """Queue a new evaluate or generate task in the place of ``old``, which was rejected; it rests,
    too."""
    await add(
        tx,
        task_id,
        job,
        old.round,
        old.phase,
        params=old.params,
        failures=old.failures,
        causes=old.causes,
        not_before=tx.now + rest_s(old.failures),
    )


async def give_back(tx: Tx, job: AnyRow, ranges: Ranges) -> None:
    """Return samples to the pool of a locked job."""
    if ranges:
        pool = jobs.pool_of(await _fresh(tx, job))
        await jobs.save_pool(tx, job.id, pool.give_back(ranges))


async def _fresh(tx: Tx, job: AnyRow) -> AnyRow:
    # The row at hand may be older than a change of the pool in this same transaction.
    row = await jobs.get(tx, job.id)
    assert row is not None, "the row is locked"
    return row


async def end(tx: Tx, task: AnyRow, new: TaskState, reason: str, **values: Any) -> AnyRow | None:
    """Let a task end other than accepted; its samples go back to the pool.

    Returns the row as it is now, None when the task was no longer in the state of ``task``.

    Raises:
        Conflict: ``state.transition``.
    """
    check(TASK, TaskState(task.state), new, f"Task {task.id}")
    ended = await leases.leave_state(
        tx,
        task.id,
        TaskState(task.state),
        new,
        attempt=task.attempt,
        reason=reason,
        ended_at=tx.now,
        lease_until=None,
        progress=None,
        **values,
    )
    if ended is None:
        return None
    job = await jobs.get(tx, task.job_id)
    assert job is not None, "tasks.job_id refers to it"
    await give_back(tx, job, ranges_from_json(task.samples))
    await events.record(
        tx,
        f"task.{new.value}",
        job_id=task.job_id,
        task_id=task.id,
        node_id=task.node_id,
        data={"phase": task.phase, "round": task.round, "reason": reason},
    )
    return ended


async def requeue(
    tx: Tx,
    task: AnyRow,
    why: str,
    *,
    cause: tuple[str, str] | None = None,
    code: str = LOST,
    back: bool = False,
) -> TaskState | None:
    """Take a leased task back: queued again, or failed when its attempts are used up.

    ``cause`` (code, reason) is a failed attempt; without it the lease was lost, which is not
    a failure of the task; ``code`` then says how. Returns the new state, None when the task is no
    longer leased under the attempt of ``task``. After a failure it rests: see :data:`REST_S`.
    ``back``: its node is there and only has it not, as when the orchestrator died between the
    lease and the message: the slot stays the member's, or two members might change places.
    """
    job = await jobs.get(tx, task.job_id)
    assert job is not None, "tasks.job_id refers to it"
    attempts = int(job.spec["max_attempts"])
    failures, causes = task.failures, list(task.causes)
    code, reason = cause or (code, why)
    causes.append(cause_of(task, code, reason))
    if cause is not None:
        failures += 1
        await fleet.add_failure(tx, task.node_id, task.job_id, task.id, code, reason)
    # Who declines a task has not come to harm by it, and who lets it go again and again is one
    # strange node, not a task that takes machines down.
    again = _let_go_again(causes)
    tried = task.attempt - sum(c["code"] == DECLINED for c in causes) - sum(again.values())
    strange = again.get(task.node_id, 0) if code == LET_GO else 0
    if failures >= attempts or tried >= attempts * LOST_LEASES_PER_ATTEMPT:
        failed = await end(tx, task, TaskState.FAILED, why, failures=failures, causes=causes)
        return None if failed is None else TaskState.FAILED
    check(TASK, TaskState(task.state), TaskState.QUEUED, f"Task {task.id}")
    moved = await leases.leave_state(
        tx,
        task.id,
        TaskState.LEASED,
        TaskState.QUEUED,
        attempt=task.attempt,
        node_id=task.node_id,
        reason=why,
        lease_until=None,
        # Of what it may come back with, if it may.
        progress=task.progress if code == LOST else None,
        member_id=task.member_id if back and not strange else "",
        failures=failures,
        causes=causes,
        not_before=tx.now + rest_s(failures if cause is not None else strange)
        if cause is not None or strange
        else task.not_before,
    )
    if moved is None:
        return None
    await events.record(
        tx,
        "task.requeued",
        job_id=task.job_id,
        task_id=task.id,
        node_id=task.node_id,
        data={"phase": task.phase, "round": task.round, "code": code, "reason": reason},
    )
    return TaskState.QUEUED


def cause_of(task: AnyRow, code: str, reason: str) -> dict[str, Plain]:
    """Why the node that a task is leased to has it no longer, as ``tasks.causes`` keeps it."""
    return {"node_id": task.node_id, "attempt": task.attempt, "code": code, "reason": reason}


def rest_s(failures: int) -> float:
    """Seconds for which a task that has failed so often is kept from where it failed."""
    return float(min(MAX_REST_S, REST_S * 2.0 ** min(failures - 1, 16)))


def failed_at(task: AnyRow) -> frozenset[str]:
    """The nodes at which an attempt of the task has failed, or that let it go more than once."""
    return frozenset(
        str(c["node_id"]) for c in task.causes if c["code"] not in (*NO_HARM, DECLINED)
    ) | frozenset(_let_go_again(task.causes))


def _let_go_again(causes: Iterable[Mapping[str, Plain]]) -> Mapping[str, int]:
    """How often a node has let a task go beyond the first time, of those that have."""
    times = Counter(str(c["node_id"]) for c in causes if c["code"] == LET_GO)
    return {node: count - 1 for node, count in times.items() if count > 1}


async def record_leases(tx: Tx, leased: Iterable[AnyRow]) -> None:
    """Write the events of leases that this transaction makes."""
    told = [
        Change(
            "task.leased",
            t.job_id,
            t.id,
            t.node_id,
            {"phase": t.phase, "round": t.round, "attempt": t.attempt},
        )
        for t in leased
    ]
    await events.record_all(tx, told)


def spec_of(job: AnyRow) -> JobSpec:
    """The frozen spec of a job's row."""
    return _read_spec(canonical_json(job.spec))


@lru_cache(maxsize=256)
def _read_spec(text: str) -> JobSpec:
    # Duties ask for the same few specs all the time, and reading one strictly takes milliseconds.
    return from_plain(JobSpec, json.loads(text))


def failure_report(task: AnyRow) -> str:
    """The collected causes of a task that failed for good."""
    last: dict[str, str] = {}
    for cause in task.causes:
        last[cause["node_id"]] = f"{cause['reason']} [{cause['code']}]"
    told = "; ".join(f"{node}: {text}" for node, text in last.items())
    where = works_on(task.phase, task.round)
    return f"task {task.id} ({task.phase}, {where}) failed on every attempt: {told}"
