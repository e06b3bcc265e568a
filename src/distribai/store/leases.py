"""Leases: who may work on what until when, the same on both databases.

A lease is a few columns of the row itself and a *fence* that grows whenever the row is leased
anew: whoever comes back late holds an old fence, and every statement that counts names the fence.
Each function here is one guarded ``UPDATE ... RETURNING``: it changes the row only if the row still
is as the caller believes, and says whether it did. Times are database time.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from sqlalchemy import (
    and_,
    bindparam,
    case,
    delete,
    exists,
    func,
    literal,
    or_,
    select,
    text,
    update,
)

from distribai.core.states import TaskState
from distribai.store import listed
from distribai.store.engine import AnyRow, Tx
from distribai.store.tables import duties, tasks


async def take_duty(tx: Tx, name: str, holder: str, seconds: float) -> int | None:
    """Lease a duty to ``holder``, or prolong its lease; the fence, None while another holds it."""
    statement = tx.insert(duties).values(
        name=name, holder=holder, fence=1, lease_until=tx.now + seconds
    )
    statement = statement.on_conflict_do_update(
        index_elements=[duties.c.name],
        set_={
            "holder": holder,
            "fence": case((duties.c.holder == holder, duties.c.fence), else_=duties.c.fence + 1),
            "lease_until": tx.now + seconds,
        },
        where=or_(duties.c.holder == holder, duties.c.lease_until <= tx.now),
    )
    fence = await tx.scalar(statement.returning(duties.c.fence))
    return None if fence is None else int(fence)


async def duty_holder(tx: Tx, name: str) -> str | None:
    """Who holds a duty; None: nobody does, its lease has run out."""
    found = await tx.scalar(
        select(duties.c.holder).where(duties.c.name == name, duties.c.lease_until > tx.now)
    )
    return None if found is None else str(found)


async def has_run_out(tx: Tx, name: str) -> bool:
    """Whether somebody held the duty, and nobody does now."""
    ended = select(duties.c.name).where(duties.c.name == name, duties.c.lease_until <= tx.now)
    return await tx.first(ended) is not None


async def held_by_others(tx: Tx, holder: str) -> set[str]:
    """The duties that others than ``holder`` hold now, by name. For :meth:`Database.glance`, too:
    every replica asks for it all the time."""
    now = func.extract("epoch", func.clock_timestamp()) if math.isnan(tx.now) else literal(tx.now)
    found = await tx.all(
        select(duties.c.name).where(
            duties.c.holder != holder, ~_IS_REPLICA, duties.c.lease_until > now
        )
    )
    return {row.name for row in found}


async def drop_duties(tx: Tx, holder: str | None) -> None:
    """Let others have the duties of ``holder`` at once; None: those of every holder, for who
    knows that all of them are dead."""
    statement = update(duties).values(lease_until=tx.now)
    await tx.run(statement if holder is None else statement.where(duties.c.holder == holder))


async def lock_duties(tx: Tx) -> None:
    """Let nobody else take or prolong a lease on a duty until this transaction ends. An embedded
    database has one writer anyway."""
    if tx.dialect == "postgresql":
        await tx.run(text("LOCK TABLE duties IN SHARE ROW EXCLUSIVE MODE"))


async def held_until(tx: Tx) -> float:
    """When the last lease of a duty ends or has ended; 0 when there never was one."""
    return float(await tx.scalar(select(func.max(duties.c.lease_until))) or 0.0)


_REPLICA = "replica."
_IS_REPLICA = duties.c.name.startswith(_REPLICA, autoescape=True)
_TOLD = 0
"""The fence of a replica that is known to be gone."""


def _row_of(replica: str) -> str:
    return f"{_REPLICA}{replica}"[:64]


async def be_here(tx: Tx, name: str, holder: str, seconds: float) -> bool:
    """Prolong the lease with which a replica says that it is here; whether it was not, or was
    another process. Two that run at once under one name take turns."""
    row_name = _row_of(name)
    query = select(duties.c.holder).where(duties.c.name == row_name, duties.c.fence > _TOLD)
    before = await tx.scalar(query)
    values = {"holder": holder, "fence": 1, "lease_until": tx.now + seconds}
    statement = tx.insert(duties).values(name=row_name, **values)
    await tx.run(statement.on_conflict_do_update(index_elements=[duties.c.name], set_=values))
    return bool(before != holder)


async def replicas(tx: Tx) -> Sequence[tuple[str, float]]:
    """The replicas that there were lately, by name, each with the end of its lease."""
    rows = await tx.all(select(duties).where(_IS_REPLICA).order_by(duties.c.name))
    return [(row.name.removeprefix(_REPLICA), row.lease_until) for row in rows]


async def gone_replicas(tx: Tx, seconds: float) -> bool:
    """Whether a lease has run out that nobody was told of, or did so ``seconds`` ago."""
    news = or_(duties.c.fence > _TOLD, duties.c.lease_until <= tx.now - seconds)
    gone = select(duties.c.name).where(_IS_REPLICA, duties.c.lease_until <= tx.now, news).limit(1)
    return await tx.first(gone) is not None


async def mark_gone(tx: Tx) -> Sequence[str]:
    """Replicas whose lease has run out since the last call, by name."""
    rows = await tx.all(
        update(duties)
        .where(_IS_REPLICA, duties.c.lease_until <= tx.now, duties.c.fence > _TOLD)
        .values(fence=_TOLD)
        .returning(duties.c.name)
    )
    return sorted(row.name.removeprefix(_REPLICA) for row in rows)


async def forget_gone(tx: Tx, seconds: float) -> None:
    """Forget replicas that are gone for so long."""
    await tx.run(delete(duties).where(_IS_REPLICA, duties.c.lease_until <= tx.now - seconds))


async def forget_replica(tx: Tx, name: str, holder: str) -> bool:
    """A replica leaves in order; whether it was here."""
    is_it = and_(duties.c.name == _row_of(name), duties.c.holder == holder)
    return await tx.first(delete(duties).where(is_it).returning(duties.c.name)) is not None


@dataclass(frozen=True, slots=True)
class Wanted:
    """A queued task that shall go to a device, to be done within ``deadline_s`` seconds."""

    task_id: str
    node_id: str
    device: int
    deadline_s: float


_WANTED = {
    "task_id": listed.TEXT,
    "node_id": listed.TEXT,
    "device": listed.INTEGER,
    "deadline_s": listed.DOUBLE,
}


async def lease_tasks(tx: Tx, wanted: Sequence[Wanted], lease_s: float) -> Sequence[AnyRow]:
    """Lease queued tasks to free devices, each under its next attempt; no device is wanted twice.

    Returns the rows of those that were leased, in no order: not of those that are no longer queued
    or whose device is no longer free.
    """
    found = listed.rows(tx, "wanted", _WANTED, [asdict(w) for w in wanted])
    taken = tasks.alias("taken")
    busy = exists().where(
        taken.c.node_id == found.c.node_id,
        taken.c.device == found.c.device,
        taken.c.state == TaskState.LEASED.value,
    )
    seconds = found.c.deadline_s
    return await tx.all(
        update(tasks)
        .where(tasks.c.id == found.c.task_id, tasks.c.state == TaskState.QUEUED.value, ~busy)
        .values(
            state=TaskState.LEASED.value,
            attempt=tasks.c.attempt + 1,
            node_id=found.c.node_id,
            device=found.c.device,
            leased_at=tx.now,
            lease_until=tx.now + case((seconds < lease_s, seconds), else_=lease_s),
            deadline_at=tx.now + seconds,
            progress=None,
        )
        .returning(tasks)
    )


async def take_up_again(
    tx: Tx, task_id: str, node_id: str, attempt: int, lease_s: float
) -> AnyRow | None:
    """Lease a queued task to the node that lost it, under the same attempt: nobody has had it
    meanwhile, so the fence need not move, and what the node has done of it counts.

    Returns the task's row, or None when it is no longer queued or the device no longer free.
    """
    taken = tasks.alias("taken")
    busy = exists().where(
        taken.c.node_id == tasks.c.node_id,
        taken.c.device == tasks.c.device,
        taken.c.state == TaskState.LEASED.value,
    )
    return await tx.first(
        update(tasks)
        .where(
            tasks.c.id == task_id,
            tasks.c.state == TaskState.QUEUED.value,
            tasks.c.node_id == node_id,
            tasks.c.attempt == attempt,
            tasks.c.deadline_at > tx.now,
            ~busy,
        )
        .values(state=TaskState.LEASED.value, lease_until=tx.now + lease_s)
        .returning(tasks)
    )


async def lock_tasks(tx: Tx, ids: Collection[str]) -> None:
    """Lock tasks by their ids' order, for who is going to change several in another one: two of
    these would wait for each other. An embedded database has one writer anyway."""
    if ids and tx.dialect == "postgresql":
        wanted = select(tasks.c.id).where(listed.among(tx, tasks.c.id, ids)).order_by(tasks.c.id)
        await tx.run(wanted.with_for_update(key_share=True))


_HELD = {"node_id": listed.TEXT, "task_id": listed.TEXT, "attempt": listed.INTEGER}


async def extend_leases(
    tx: Tx, held: Iterable[tuple[str, str, int]], lease_s: float
) -> set[tuple[str, int]]:
    """Prolong leases, each a node's on a task under an attempt, never beyond the hard deadline.

    Returns task and attempt of those that are still held.
    """
    values = [{"node_id": n, "task_id": t, "attempt": a} for n, t, a in held]
    if not values:
        return set()
    until = tx.now + lease_s
    found = listed.rows(tx, "held", _HELD, values)
    rows = await tx.all(
        update(tasks)
        .where(
            tasks.c.id == found.c.task_id,
            tasks.c.node_id == found.c.node_id,
            tasks.c.attempt == found.c.attempt,
            tasks.c.state == TaskState.LEASED.value,
        )
        .values(lease_until=case((tasks.c.deadline_at < until, tasks.c.deadline_at), else_=until))
        .returning(tasks.c.id, tasks.c.attempt)
    )
    return {(row.id, row.attempt) for row in rows}


async def expired_tasks(tx: Tx) -> Sequence[AnyRow]:
    """Leased tasks whose lease has run out."""
    return await tx.all(
        select(tasks)
        .where(tasks.c.state == TaskState.LEASED.value, tasks.c.lease_until <= tx.now)
        .order_by(tasks.c.job_id, tasks.c.seq)
    )


async def write_progress(tx: Tx, reports: Sequence[Mapping[str, Any]]) -> None:
    """Note how far attempts that hold a lease are: ``{"task", "node", "under", "report"}``, with
    the attempt under which the node holds it."""
    await tx.run_many(
        update(tasks)
        .where(
            tasks.c.id == bindparam("task"),
            tasks.c.node_id == bindparam("node"),
            tasks.c.attempt == bindparam("under"),
            tasks.c.state == TaskState.LEASED.value,
        )
        .values(progress=bindparam("report")),
        reports,
    )


async def grant_grace(tx: Tx, seconds: float, deadline_s: float) -> None:
    """After a start: let every lease run for ``seconds`` from now, whatever its own end is, and
    every hard deadline as long as it was given, ``deadline_s`` at least. Neither time without an
    orchestrator nor a clock that was set meanwhile counts against a node."""
    least = max(seconds, deadline_s)
    given = tasks.c.deadline_at - tasks.c.leased_at
    is_leased = tasks.c.state == TaskState.LEASED.value
    leased = select(tasks.c.id).where(is_leased).order_by(tasks.c.id)
    await tx.run(
        update(tasks)
        .where(is_leased, tasks.c.id.in_(leased.with_for_update(key_share=True)))
        .values(
            lease_until=tx.now + seconds,
            deadline_at=tx.now + case((given > least, given), else_=least),
        )
    )


async def leave_state(
    tx: Tx,
    task_id: str,
    old: TaskState,
    new: TaskState,
    *,
    attempt: int | None = None,
    node_id: str | None = None,
    **values: Any,
) -> AnyRow | None:
    """Move a task from ``old`` to ``new`` if it still is there, under that attempt and node.

    Returns the task's row after the change, or None when nothing was changed. The caller has
    checked the transition with ``core.states``.
    """
    guard = [tasks.c.id == task_id, tasks.c.state == old.value]
    if attempt is not None:
        guard.append(tasks.c.attempt == attempt)
    if node_id is not None:
        guard.append(tasks.c.node_id == node_id)
    return await tx.first(
        update(tasks).where(*guard).values(state=new.value, **values).returning(tasks)
    )
