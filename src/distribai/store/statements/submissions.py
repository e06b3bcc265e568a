"""What tasks brought: accepted submissions, and how fast and when results came."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from sqlalchemy import ColumnElement, Table, and_, func, or_, select, update

from distribai.core.states import RoundState, TaskState
from distribai.store.engine import AnyRow, Tx
from distribai.store.statements.work import OPEN_TASKS, values_of
from distribai.store.tables import rounds, submissions, tasks

LEAST_SECONDS = 1e-6
"""No task takes less."""


def _is_round_of(table: Table) -> ColumnElement[bool]:
    """Whether a round is that of a task or submission."""
    return and_(
        rounds.c.job_id == table.c.job_id,
        rounds.c.number == table.c.round,
        rounds.c.take == table.c.take,
    )


async def add_submission(tx: Tx, **values: Any) -> bool:
    """Insert accepted work; False when the task's work was accepted before."""
    statement = tx.insert(submissions).values(**values).on_conflict_do_nothing()
    return await tx.scalar(statement.returning(submissions.c.task_id)) is not None


async def has_submission(tx: Tx, task_id: str) -> bool:
    """Whether the task's work was accepted."""
    query = select(submissions.c.task_id).where(submissions.c.task_id == task_id)
    return await tx.first(query) is not None


async def submissions_of_round(tx: Tx, job_id: str, number: int, take: int) -> Sequence[AnyRow]:
    """Accepted training work that is merged in a round, late work of earlier ones included, each
    with its task's slot."""
    return await tx.all(
        select(submissions, tasks.c.slot, tasks.c.device, tasks.c.submitted_at)
        .join(tasks, tasks.c.id == submissions.c.task_id)
        .where(
            submissions.c.job_id == job_id,
            submissions.c.round == number,
            submissions.c.take == take,
            submissions.c.phase == "train",
        )
        .order_by(submissions.c.task_id)
    )


async def own_work(tx: Tx, job_id: str, node_id: str, limit: int) -> dict[tuple[str, int], bool]:
    """What became of a node's training for a job, by task and attempt: True, it is merged; False,
    it may be merged yet. Of accepted work the newest ``limit``; what is not here came to nothing.
    """
    unjudged = await tx.all(
        select(tasks.c.id, tasks.c.attempt).where(
            tasks.c.job_id == job_id,
            tasks.c.node_id == node_id,
            tasks.c.phase == "train",
            tasks.c.state.in_(values_of(OPEN_TASKS)),
        )
    )
    accepted = await tx.all(
        select(submissions.c.task_id, submissions.c.attempt, rounds.c.state)
        .join(
            rounds,
            _is_round_of(submissions),
            isouter=True,  # late work may wait for a round that is not open yet
        )
        .where(
            submissions.c.job_id == job_id,
            submissions.c.node_id == node_id,
            submissions.c.phase == "train",
        )
        .order_by(submissions.c.accepted_at.desc(), submissions.c.task_id)
        .limit(limit)
    )
    found = {(row.id, row.attempt): False for row in unjudged}
    found |= {(row.task_id, row.attempt): row.state == RoundState.MERGED for row in accepted}
    return found


async def speeds(tx: Tx, job_id: str, since_round: int) -> dict[tuple[str, int], float]:
    """Tokens per second of (node, device) in a job: the best since ``since_round``.

    From the assignment to the report, on the grid's clock: fetching and sending are part of what a
    round waits for, and nobody can claim another speed. Results that came too late count: who sends
    slowly must not be taken for unknown. The best, because a machine that was away or busy for one
    round may be back, and one that is not hands in what it has.
    """
    rows = await tx.all(
        select(
            tasks.c.node_id,
            tasks.c.device,
            tasks.c.outcome,
            (tasks.c.submitted_at - tasks.c.leased_at).label("seconds"),
        ).where(
            tasks.c.job_id == job_id,
            tasks.c.phase == "train",
            tasks.c.round >= since_round,
            tasks.c.submitted_at.is_not(None),
            tasks.c.outcome.is_not(None),
        )
    )
    best: dict[tuple[str, int], float] = {}
    for row in rows:
        tokens = row.outcome["tokens"]
        if tokens > 0:
            speed = tokens / max(row.seconds, LEAST_SECONDS)
            key = (row.node_id, row.device)
            best[key] = max(best.get(key, 0.0), speed)
    return best


async def accepted_since(tx: Tx, job_id: str, number: int) -> Sequence[AnyRow]:
    """Round, node, device and outcome of a job's accepted training tasks, from round ``number``
    on."""
    return await tx.all(
        select(tasks.c.round, tasks.c.node_id, tasks.c.device, tasks.c.outcome)
        .where(
            tasks.c.job_id == job_id,
            tasks.c.round >= number,
            tasks.c.phase == "train",
            tasks.c.state == TaskState.ACCEPTED.value,
        )
        .order_by(tasks.c.round, tasks.c.seq)
    )


async def accepted_by_round(tx: Tx, job_id: str) -> dict[tuple[int, int], tuple[int, int]]:
    """Accepted submissions and their tokens by (round, take)."""
    rows = await tx.all(
        select(
            submissions.c.round,
            submissions.c.take,
            func.count(),
            func.sum(submissions.c.tokens),
        )
        .where(submissions.c.job_id == job_id, submissions.c.phase == "train")
        .group_by(submissions.c.round, submissions.c.take)
    )
    return {(row[0], row[1]): (row[2], int(row[3])) for row in rows}


async def arrivals(tx: Tx, job_id: str, before: tuple[int, int], limit: int) -> Sequence[AnyRow]:
    """The last ``limit`` arrivals of a job's training results in rounds before ``(number, take)``,
    late ones included, oldest round first; without work that was carried into its round."""
    rows = await tx.all(
        select(tasks.c.round, tasks.c.take, tasks.c.submitted_at)
        .join(
            rounds,
            _is_round_of(tasks),
        )
        .where(
            tasks.c.job_id == job_id,
            tasks.c.phase == "train",
            tasks.c.submitted_at >= rounds.c.opened_at,
            or_(
                tasks.c.round < before[0],
                and_(tasks.c.round == before[0], tasks.c.take < before[1]),
            ),
        )
        .order_by(tasks.c.round.desc(), tasks.c.take.desc(), tasks.c.submitted_at.desc())
        .limit(limit)
    )
    return rows[::-1]


async def carry_over(tx: Tx, job_id: str, number: int, old: int, new: int) -> Sequence[str]:
    """Move the accepted training work of an abandoned take of a round into the next one, which
    starts from the same version; the ids of the tasks that were made for it. Late work goes along,
    but its tasks stay in the round that they were made for."""
    carried = [
        row.task_id
        for row in await tx.all(
            update(submissions)
            .where(
                submissions.c.job_id == job_id,
                submissions.c.round == number,
                submissions.c.take == old,
                submissions.c.phase == "train",
            )
            .values(take=new)
            .returning(submissions.c.task_id)
        )
    ]
    if not carried:
        return []
    moved = await tx.all(
        update(tasks)
        .where(tasks.c.id.in_(carried), tasks.c.round == number, tasks.c.take == old)
        .values(take=new)
        .returning(tasks.c.id)
    )
    return [row.id for row in moved]
