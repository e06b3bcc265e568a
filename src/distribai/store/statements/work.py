"""Rounds, tasks and accepted submissions."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import Any

from sqlalchemy import ColumnElement, Table, and_, func, insert, or_, select, update

from distribai.core.states import RoundState, TaskState
from distribai.store.engine import AnyRow, Tx
from distribai.store.listed import among
from distribai.store.tables import jobs, rounds, submissions, tasks

OPEN_TASKS = (TaskState.QUEUED, TaskState.LEASED, TaskState.SUBMITTED, TaskState.VERIFYING)
"""States of a task that has not ended."""

_CONTENT = frozenset({"samples", "params", "outcome", "signature"})
"""Columns of a task that what decides about its round does not need."""

LEAST_SECONDS = 1e-6
"""No task takes less."""


def _values(states: Iterable[TaskState | RoundState]) -> list[str]:
    return [s.value for s in states]


def _is_round_of(table: Table) -> ColumnElement[bool]:
    """Whether a round is that of a task or submission."""
    return and_(
        rounds.c.job_id == table.c.job_id,
        rounds.c.number == table.c.round,
        rounds.c.take == table.c.take,
    )


# ------------------------------------------------------------------ rounds


async def add_round(tx: Tx, **values: Any) -> None:
    """Insert a round."""
    await tx.run(insert(rounds).values(**values))


async def rounds_of(
    tx: Tx, job_id: str, after: tuple[int, int] = (-1, -1), limit: int | None = None
) -> Sequence[AnyRow]:
    """Rounds of a job behind (number, take), oldest first, without their manifests."""
    columns = [c for c in rounds.c if c.name != "manifest"]
    number, take = after
    later = or_(rounds.c.number > number, and_(rounds.c.number == number, rounds.c.take > take))
    return await tx.all(
        select(*columns)
        .where(rounds.c.job_id == job_id, later)
        .order_by(rounds.c.number, rounds.c.take)
        .limit(limit)
    )


async def get_round(tx: Tx, job_id: str, number: int, take: int) -> AnyRow | None:
    """One round."""
    return await tx.first(
        select(rounds).where(
            rounds.c.job_id == job_id, rounds.c.number == number, rounds.c.take == take
        )
    )


async def latest_round(tx: Tx, job_id: str) -> AnyRow | None:
    """The round that was opened last."""
    return await tx.first(
        select(rounds)
        .where(rounds.c.job_id == job_id)
        .order_by(rounds.c.number.desc(), rounds.c.take.desc())
        .limit(1)
    )


async def rounds_in(tx: Tx, state: RoundState) -> Sequence[AnyRow]:
    """All rounds in ``state``, by job."""
    return await tx.all(
        select(rounds)
        .where(rounds.c.state == state.value)
        .order_by(rounds.c.job_id, rounds.c.number)
    )


async def jobs_with_rounds_in(tx: Tx, states: Collection[RoundState]) -> set[str]:
    """Ids of the jobs that have a round in any of ``states``."""
    found = await tx.all(select(rounds.c.job_id).where(rounds.c.state.in_(_values(states))))
    return {row.job_id for row in found}


async def leave_round(
    tx: Tx, job_id: str, number: int, take: int, old: RoundState, new: RoundState, **values: Any
) -> bool:
    """Move a round from ``old`` to ``new`` if it still is there."""
    moved = await tx.first(
        update(rounds)
        .where(
            rounds.c.job_id == job_id,
            rounds.c.number == number,
            rounds.c.take == take,
            rounds.c.state == old.value,
        )
        .values(state=new.value, **values)
        .returning(rounds.c.number)
    )
    return moved is not None


async def add_member(tx: Tx, row: AnyRow, member: Any) -> None:
    """Record one more member of a round that is open; the caller has locked the job."""
    key = (rounds.c.job_id == row.job_id, rounds.c.number == row.number, rounds.c.take == row.take)
    members = await tx.scalar(select(rounds.c.members).where(*key))
    await tx.run(update(rounds).where(*key).values(members=[*members, member]))


async def set_deadline(tx: Tx, job_id: str, number: int, take: int, deadline: float | None) -> None:
    """Write when an open round merges at the latest."""
    await tx.run(
        update(rounds)
        .where(rounds.c.job_id == job_id, rounds.c.number == number, rounds.c.take == take)
        .values(deadline_at=deadline)
    )


# ------------------------------------------------------------------ tasks


async def add_tasks(tx: Tx, job_id: str, rows: Sequence[Mapping[str, Any]]) -> None:
    """Insert tasks of a job under its next numbers, in this order; the caller has locked the job.
    All rows have the same columns."""
    last = await tx.scalar(select(func.max(tasks.c.seq)).where(tasks.c.job_id == job_id)) or 0
    defaults = {
        "job_id": job_id,
        "state": TaskState.QUEUED.value,
        "causes": [],
        "params": {},
        "created_at": tx.now,
    }
    numbered = enumerate(rows, start=last + 1)
    await tx.run_many(insert(tasks), [{**defaults, "seq": seq, **row} for seq, row in numbered])


async def get_task(tx: Tx, task_id: str) -> AnyRow | None:
    """One task."""
    return await tx.first(select(tasks).where(tasks.c.id == task_id))


async def job_of(tx: Tx, task_id: str) -> str | None:
    """The job that a task is of."""
    found = await tx.scalar(select(tasks.c.job_id).where(tasks.c.id == task_id))
    return None if found is None else str(found)


async def change_task(tx: Tx, task_id: str, **values: Any) -> None:
    """Write columns of a task other than its state."""
    await tx.run(update(tasks).where(tasks.c.id == task_id).values(**values))


async def tasks_of_round(
    tx: Tx, job_id: str, number: int, take: int, *, outcomes: bool = False
) -> Sequence[AnyRow]:
    """The training tasks of a round, by number, without what they hold and, but with ``outcomes``,
    what they brought: duties look at whole rounds again and again."""
    columns = [c for c in tasks.c if c.name not in _CONTENT]
    return await tx.all(
        select(*columns, *([tasks.c.outcome] if outcomes else []))
        .where(
            tasks.c.job_id == job_id,
            tasks.c.round == number,
            tasks.c.take == take,
            tasks.c.phase == "train",
        )
        .order_by(tasks.c.seq)
    )


async def tasks_page(tx: Tx, job_id: str, limit: int, after: int) -> Sequence[AnyRow]:
    """Tasks of a job behind number ``after``."""
    return await tx.all(
        select(tasks)
        .where(tasks.c.job_id == job_id, tasks.c.seq > after)
        .order_by(tasks.c.seq)
        .limit(limit)
    )


async def tasks_in(
    tx: Tx,
    states: Collection[TaskState],
    *,
    job_id: str | None = None,
    node_id: str | None = None,
) -> Sequence[AnyRow]:
    """Tasks in any of ``states``, by job and number."""
    query = select(tasks).where(tasks.c.state.in_(_values(states)))
    if job_id is not None:
        query = query.where(tasks.c.job_id == job_id)
    if node_id is not None:
        query = query.where(tasks.c.node_id == node_id)
    return await tx.all(query.order_by(tasks.c.job_id, tasks.c.seq))


async def leased_devices(
    tx: Tx, ids: Collection[str] | None = None, *, after: str = "", upto: str = ""
) -> Sequence[AnyRow]:
    """Node and device of every leased task: of the nodes ``ids``, or of those whose ids lie behind
    ``after``, up to ``upto`` unless that is empty."""
    query = select(tasks.c.node_id, tasks.c.device).where(tasks.c.state == TaskState.LEASED.value)
    if ids is not None:
        return await tx.all(query.where(among(tx, tasks.c.node_id, ids)))
    if upto:
        query = query.where(tasks.c.node_id <= upto)
    return await tx.all(query.where(tasks.c.node_id > after))


async def leased_to(tx: Tx, ids: Collection[str]) -> Sequence[AnyRow]:
    """Leased tasks of the nodes ``ids``, by job and number."""
    query = select(tasks).where(tasks.c.state == TaskState.LEASED.value)
    query = query.where(among(tx, tasks.c.node_id, ids))
    return await tx.all(query.order_by(tasks.c.job_id, tasks.c.seq))


async def tasks_by_id(tx: Tx, ids: Collection[str]) -> Sequence[AnyRow]:
    """Tasks by id, in no order."""
    if not ids:
        return []
    return await tx.all(select(tasks).where(among(tx, tasks.c.id, ids)))


async def queued_with_job(tx: Tx) -> Sequence[AnyRow]:
    """Queued tasks, each with its job's state, priority, organization and weight."""
    return await tx.all(
        select(
            tasks,
            jobs.c.state.label("job_state"),
            jobs.c.priority.label("job_priority"),
            jobs.c.version.label("job_version"),
            jobs.c.organization_id,
            jobs.c.weight,
        )
        .join(jobs, jobs.c.id == tasks.c.job_id)
        .where(tasks.c.state == TaskState.QUEUED.value)
        .order_by(tasks.c.created_at, tasks.c.job_id, tasks.c.seq)
    )


async def count_tasks(tx: Tx, states: Collection[TaskState]) -> dict[str, int]:
    """Tasks by state, for ``states``."""
    rows = await tx.all(
        select(tasks.c.state, func.count())
        .where(tasks.c.state.in_(_values(states)))
        .group_by(tasks.c.state)
    )
    return {row[0]: row[1] for row in rows}


async def working_nodes(tx: Tx) -> Mapping[str, int]:
    """How many nodes hold a lease, by job."""
    rows = await tx.all(
        select(tasks.c.job_id, func.count(tasks.c.node_id.distinct()))
        .where(tasks.c.state == TaskState.LEASED.value)
        .group_by(tasks.c.job_id)
    )
    return {row[0]: row[1] for row in rows}


# ------------------------------------------------------------------ submissions


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
            tasks.c.state.in_(_values(OPEN_TASKS)),
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
