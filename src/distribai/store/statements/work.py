"""Rounds and tasks."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import Any

from sqlalchemy import ColumnElement, and_, func, insert, or_, select, update

from distribai.core.states import RoundState, TaskState
from distribai.store.engine import AnyRow, Tx
from distribai.store.listed import among
from distribai.store.tables import jobs, rounds, tasks

OPEN_TASKS = (TaskState.QUEUED, TaskState.LEASED, TaskState.SUBMITTED, TaskState.VERIFYING)
"""States of a task that has not ended."""

_CONTENT = frozenset({"samples", "params", "outcome", "signature"})
"""Columns of a task that what decides about its round does not need."""


def values_of(states: Iterable[TaskState | RoundState]) -> list[str]:
    """States as they stand in the database."""
    return [s.value for s in states]


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
    found = await tx.all(select(rounds.c.job_id).where(rounds.c.state.in_(values_of(states))))
    return {row.job_id for row in found}


def _is(row: AnyRow) -> ColumnElement[bool]:
    """Whether a round is that of ``row``."""
    return and_(
        rounds.c.job_id == row.job_id, rounds.c.number == row.number, rounds.c.take == row.take
    )


async def leave_round(tx: Tx, row: AnyRow, new: RoundState, **values: Any) -> bool:
    """Move a round to ``new`` if it still is in the state that ``row`` says."""
    moved = await tx.first(
        update(rounds)
        .where(_is(row), rounds.c.state == row.state)
        .values(state=new.value, **values)
        .returning(rounds.c.number)
    )
    return moved is not None


async def add_member(tx: Tx, row: AnyRow, member: Any) -> None:
    """Record one more member of a round that is open; the caller has locked the job."""
    members = await tx.scalar(select(rounds.c.members).where(_is(row)))
    await tx.run(update(rounds).where(_is(row)).values(members=[*members, member]))


async def set_deadline(tx: Tx, row: AnyRow, deadline: float | None) -> None:
    """Write when an open round merges at the latest."""
    await tx.run(update(rounds).where(_is(row)).values(deadline_at=deadline))


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
    query = select(tasks).where(tasks.c.state.in_(values_of(states)))
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
        .where(tasks.c.state.in_(values_of(states)))
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


async def ended_late(tx: Tx, job_id: str, since: int, before: int) -> Sequence[AnyRow]:
    """Node, device, round, state, causes and progress of a job's training tasks from round
    ``since`` on that were cancelled after a node had them, or that are leased yet, of rounds before
    ``before``."""
    leased = and_(tasks.c.state == TaskState.LEASED.value, tasks.c.round < before)
    columns = ("node_id", "device", "round", "state", "causes", "progress")
    return await tx.all(
        select(*(tasks.c[name] for name in columns)).where(
            tasks.c.job_id == job_id,
            tasks.c.round >= since,
            tasks.c.phase == "train",
            or_(tasks.c.state == TaskState.CANCELLED.value, leased),
            tasks.c.node_id != "",
        )
    )


async def last_delivered(
    tx: Tx, job_id: str, since_round: int, nodes: Collection[str]
) -> dict[tuple[str, int], int]:
    """The last round, from ``since_round`` on, for which a device of ``nodes`` handed in training
    of a job, by (node, device)."""
    rows = await tx.all(
        select(tasks.c.node_id, tasks.c.device, func.max(tasks.c.round))
        .where(
            tasks.c.job_id == job_id,
            tasks.c.round >= since_round,
            tasks.c.phase == "train",
            tasks.c.submitted_at.is_not(None),
            tasks.c.state != TaskState.CANCELLED.value,
            among(tx, tasks.c.node_id, nodes),
        )
        .group_by(tasks.c.node_id, tasks.c.device)
    )
    return {(row[0], row[1]): row[2] for row in rows}
