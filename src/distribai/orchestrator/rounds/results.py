"""Taking in results: who may report what, and what is kept of it.

A result counts only under the attempt (the fence) that is leased to the very node whose session
brings it, signed with its key. It is then durable in state ``submitted``; ``rounds.verifying``
judges it. The same report again gets the same answer, however often it comes.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Any

from distribai.core.plain import fingerprint, to_plain
from distribai.core.states import JobState, RoundState, TaskState
from distribai.core.tasks import Outcome
from distribai.core.text import MAX_REASON, clean
from distribai.errors import NotAllowed
from distribai.orchestrator import events
from distribai.orchestrator.context import Grid
from distribai.orchestrator.fleet.tokens import BARRED
from distribai.orchestrator.jobs.commands import end_job
from distribai.orchestrator.rounds import late, tasks
from distribai.orchestrator.rounds.slow import UNBEGUN
from distribai.store import leases
from distribai.store.engine import AnyRow, Tx
from distribai.store.statements import fleet, jobs, work
from distribai.wire.signing import verify_outcome

_CODE = re.compile(r"[a-z0-9_]{1,32}\.[a-z0-9_]{1,32}")


@dataclass(frozen=True, slots=True)
class Answer:
    """What to tell the node: an empty ``code`` says that the result counted; ``wait`` that it is
    being checked and the answer comes later."""

    code: str = ""
    reason: str = ""
    wait: bool = False


COUNTED = Answer()
LATER = Answer(wait=True)

VERDICT_CODES = {
    TaskState.REJECTED: "task.rejected",
    TaskState.SUPERSEDED: "task.superseded",
    TaskState.CANCELLED: "task.cancelled",
    TaskState.FAILED: "task.failed",
    # Only the report of a failed attempt is known by hash after the task went on without it.
    TaskState.QUEUED: "task.failed",
    TaskState.LEASED: "task.failed",
}


def answer_of(task: AnyRow) -> Answer:
    """The answer to a result whose task has been judged."""
    state = TaskState(task.state)
    if state is TaskState.ACCEPTED:
        return COUNTED
    if state in (TaskState.SUBMITTED, TaskState.VERIFYING):
        return LATER
    return Answer(VERDICT_CODES[state], task.reason)


async def take_result(
    grid: Grid, node_id: str, public_key: bytes, outcome: Outcome, signature: bytes
) -> Answer:
    """Take in a result that came over the session of ``node_id``.

    Raises:
        NotAllowed: ``node.key``: the signature is not valid; ``auth.forbidden``: the node is
            quarantined or banned. Nothing changes.
    """
    verify_outcome(public_key, signature, outcome)
    async with grid.db.write() as tx:
        job_id = await work.job_of(tx, outcome.task_id)
        if job_id is None:
            return _not_held(outcome)
        await jobs.hold(tx, job_id)
        # Here and not only at the stream: what counts must not slip through just after a ban.
        if (standing := await fleet.standing(tx, node_id)) in BARRED:
            raise NotAllowed("auth.forbidden", f"This node is {standing}.")
        task = await work.get_task(tx, outcome.task_id)
        assert task is not None, "tasks are never deleted"
        answer = await _take(tx, task, node_id, outcome, signature)
    grid.wake.set()
    return answer


async def _take(tx: Tx, task: AnyRow, node_id: str, outcome: Outcome, signature: bytes) -> Answer:
    hashed = fingerprint(outcome)
    if not _had(task, node_id, outcome.attempt):
        return _not_held(outcome)
    # A failed attempt leaves the task to others, so its report is known by hash alone.
    if task.outcome_hash == hashed:
        return answer_of(task)
    if task.node_id != node_id or task.attempt != outcome.attempt:
        return _not_held(outcome, "another attempt holds it by now")
    if task.state != TaskState.LEASED:
        return _not_held(outcome, f"the task is {task.state}: {task.reason or 'it has ended'}")
    if outcome.status == "failed":
        return await _fail(tx, task, outcome, hashed)
    moved = await leases.leave_state(
        tx,
        task.id,
        TaskState.LEASED,
        TaskState.SUBMITTED,
        attempt=outcome.attempt,
        node_id=node_id,
        outcome=to_plain(outcome),
        outcome_hash=hashed,
        signature=signature,
        submitted_at=tx.now,
        lease_until=None,
        progress=None,
    )
    assert moved is not None, "the job's row is locked"
    await events.record(
        tx,
        "task.submitted",
        job_id=task.job_id,
        task_id=task.id,
        node_id=node_id,
        data={"phase": task.phase, "round": task.round},
    )
    return LATER


def _had(task: AnyRow, node_id: str, attempt: int) -> bool:
    """Whether the attempt is or was the node's; nobody else hears how the task stands."""
    if (task.node_id, task.attempt) == (node_id, attempt):
        return True
    return any((c["node_id"], c["attempt"]) == (node_id, attempt) for c in task.causes)


async def _fail(tx: Tx, task: AnyRow, outcome: Outcome, hashed: str) -> Answer:
    """A failed attempt: queued again, or the end of the task, and of its job if it trains."""
    # A code of a newer program is worth having; anything else is no code.
    code = outcome.error_code if _CODE.fullmatch(outcome.error_code) else "task.failed"
    reason = clean(outcome.reason, MAX_REASON) or "the node gave no reason"
    if await _round_is_over(tx, task):
        # It was told to stop because its round had closed: no failure of anybody.
        await work.change_task(tx, task.id, outcome_hash=hashed, submitted_at=tx.now)
        await tasks.end(tx, task, TaskState.CANCELLED, "its round closed before it was done")
        return Answer("task.superseded", "Its round closed before it was done.")
    state = await tasks.requeue(tx, task, f"failed: {reason}", cause=(code, reason))
    assert state is not None, "the job's row is locked"
    await work.change_task(tx, task.id, outcome_hash=hashed)
    if state is TaskState.FAILED:
        await after_failure(tx, task.id)
    return Answer("task.failed", reason)


async def _round_is_over(tx: Tx, task: AnyRow) -> bool:
    if task.phase != "train":
        return False
    row = await work.get_round(tx, task.job_id, task.round, task.take)
    return row is None or row.state != RoundState.OPEN


async def after_failure(tx: Tx, task_id: str) -> None:
    """A training task that failed for good fails its job, with all causes; others end alone."""
    task = await work.get_task(tx, task_id)
    assert task is not None, "tasks are never deleted"
    if task.phase != "train":
        return
    job = await jobs.get(tx, task.job_id)
    assert job is not None, "tasks.job_id refers to it"
    if job.state in (JobState.RUNNING, JobState.PAUSED):
        await fail_job(tx, job, tasks.failure_report(task))


async def fail_job(tx: Tx, job: AnyRow, reason: str) -> None:
    """Fail a locked job; a paused one runs again for that moment, as its states demand."""
    if job.state == JobState.PAUSED:
        await jobs.set_state(tx, job.id, JobState.RUNNING)
    running = await jobs.lock(tx, job.id)
    assert running is not None, "the row is locked"
    await end_job(tx, running, JobState.FAILED, reason)


async def lose_lease(
    tx: Tx, task: AnyRow, why: str, code: str = tasks.LOST, *, back: bool = False
) -> None:
    """Take a leased task from a node that is gone, or will not have it, or is ``back`` without it;
    the job's row is locked."""
    if await _round_is_over(tx, task):
        if code == tasks.LOST and (await late.destination(tx, task)).exists:
            await tasks.requeue(tx, task, why, code=code)  # nobody else gets it: see rounds.late
            return
        told: dict[str, Any] = {}
        if code == tasks.LET_GO and task.phase == "train" and task.progress is None:
            told["causes"] = [*task.causes, tasks.cause_of(task, UNBEGUN, why)]
        await tasks.end(tx, task, TaskState.CANCELLED, f"its round closed, and {why}", **told)
    elif await tasks.requeue(tx, task, why, code=code, back=back) is TaskState.FAILED:
        await after_failure(tx, task.id)


def _not_held(outcome: Outcome, why: str = "") -> Answer:
    """The answer to a report of what the node does not hold; a task that it never had is answered
    like one that never was."""
    told = f"Attempt {outcome.attempt} of task {outcome.task_id} is not held by this node"
    return Answer("task.not_held", f"{told}: {why}." if why else f"{told}.")
