"""Late work: what a round closed without, and a later one takes (A2, A6, ADR 0006).

A node that cannot be reached when its round closes may come back with a checkpoint or a finished
result. Until the last round that would take it freezes, its task stays what it is: leased while the
lease lives, then queued for nobody but this node, with its samples. When the node is heard it is
asked to finish at once, and what it hands in is accepted into the round that is open then, or opens
next. Such work never counts towards a quorum or a minimum: no version is made of it alone.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from distribai.core.paradigms import paradigm
from distribai.core.spec import JobSpec
from distribai.core.states import JOB, JobState, RoundState, TaskState, is_terminal
from distribai.orchestrator.rounds import tasks
from distribai.orchestrator.rounds.opening import SPEED_ROUNDS, share_left
from distribai.store.engine import AnyRow, Tx
from distribai.store.statements import jobs, submissions, work


@dataclass(frozen=True, slots=True)
class Destination:
    """Where work on a task is merged: round ``number``, opened for the ``take``-th time. Without
    one (``number`` is None) it comes too late, and ``reason`` says why."""

    number: int | None
    take: int
    reason: str

    @property
    def exists(self) -> bool:
        """Whether there is one."""
        return self.number is not None


async def destination(tx: Tx, task: AnyRow) -> Destination:
    """Where a training task's work would be merged if it were accepted now.

    That is its own round while it is open. Afterwards it is the round that is open or was abandoned
    and opens again, else the next one, if the paradigm takes work so late.
    """
    job = await jobs.get(tx, task.job_id)
    last = await work.latest_round(tx, task.job_id)
    assert job is not None, "tasks.job_id refers to it"
    assert last is not None, "a training task is made for a round"
    if is_terminal(JOB, JobState(job.state)):
        return Destination(None, 0, f"the job is {job.state}")
    number, take = last.number, last.take
    if (task.round, task.take) == (number, take) and last.state == RoundState.OPEN:
        return Destination(number, take, "its round is open")
    if last.state in (RoundState.CLOSING, RoundState.MERGED):
        number, take = number + 1, 0
    if number >= job.rounds_total:
        return Destination(None, 0, "it was the job's last round")
    spec = tasks.spec_of(job)
    taken, reason = paradigm(spec.paradigm).takes_late(task.round, number, spec.rounds)
    return Destination(number if taken else None, take, reason)


def may_come_back(task: AnyRow) -> bool:
    """Whether the node that a queued task was leased to fell silent with it and may have it yet."""
    return (
        task.state == TaskState.QUEUED
        and bool(task.causes)
        and task.causes[-1]["code"] == tasks.LOST
    )


async def kept_for_their_nodes(
    tx: Tx, spec: JobSpec, row: AnyRow, rows: Iterable[AnyRow]
) -> frozenset[str]:
    """Ids of an open round's tasks that nobody else gets, and that the round does not wait for.

    Their nodes fell silent and may come back, and a later round takes what they bring then. As long
    as another device could do more of such a task in what is left of the round than had been done,
    it is better off there; from then on it belongs to its node.
    """
    lost = [t for t in rows if may_come_back(t)]
    how = paradigm(spec.paradigm)
    number = row.number + 1
    if not lost or number >= spec.round_count:
        return frozenset()
    if not how.takes_late(row.number, number, spec.rounds)[0]:
        return frozenset()
    speeds = await submissions.speeds(tx, row.job_id, row.number - SPEED_ROUNDS)
    possible = share_left(spec, row, tx.now, speeds.values()) * spec.steps_of_round(row.number)
    return frozenset(t.id for t in lost if (t.progress or {}).get("step", 0) >= possible)


async def carried_over(tx: Tx, row: AnyRow) -> str:
    """What a round merges beside the submissions that it waited for, as the end of its reason."""
    taken = await submissions.submissions_of_round(tx, row.job_id, row.number, row.take)
    late = sum(s.base_version != row.number for s in taken)
    kept = sum(s.base_version == row.number and s.submitted_at < row.opened_at for s in taken)
    told = ""
    if late:
        told += f"; besides, {late} of earlier rounds that came late"
    if kept:
        told += f"; besides, {kept} that the try before had accepted"
    return told


async def end_expired(tx: Tx, job: AnyRow) -> None:
    """After a round was closed: end the queued training tasks that nobody will bring any more."""
    for task in await work.tasks_in(tx, (TaskState.QUEUED,), job_id=job.id):
        if task.phase != "train":
            continue
        where = await destination(tx, task)
        if may_come_back(task) and where.exists:
            continue
        why = f"its node did not bring it in time: {where.reason}"
        if not may_come_back(task):
            why = "its round closed before it was leased"
        await tasks.end(tx, task, TaskState.CANCELLED, why)
