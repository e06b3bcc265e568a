"""What people and monitors ask of the tables and no duty does: nodes by name, counts by state."""

from __future__ import annotations

from collections.abc import Collection, Sequence

from sqlalchemy import Select, exists, func, select

from distribai.core.states import Liveness, TaskState
from distribai.store.engine import AnyRow, Tx
from distribai.store.tables import jobs, nodes, rounds, sessions, tasks

_CONNECTED = (
    exists()
    .where(sessions.c.node_id == nodes.c.id, sessions.c.ended_at.is_(None))
    .label("connected")
)


def _with_connection() -> Select[*tuple[object, ...]]:
    return select(nodes, _CONNECTED)


async def node(tx: Tx, node_id: str) -> AnyRow | None:
    """One node, and as ``connected`` whether it has an open session."""
    return await tx.first(_with_connection().where(nodes.c.id == node_id))


async def nodes_page(
    tx: Tx, after: str, limit: int, account_id: str | None = None
) -> Sequence[AnyRow]:
    """Nodes behind an id, by id; of an account, or all."""
    query = select(nodes).where(nodes.c.id > after).order_by(nodes.c.id).limit(limit)
    if account_id is not None:
        query = query.where(nodes.c.account_id == account_id)
    return await tx.all(query)


async def leased_to(tx: Tx, ids: Collection[str]) -> Sequence[AnyRow]:
    """Id and node of the tasks that these nodes hold, by id."""
    return await tx.all(
        select(tasks.c.id, tasks.c.node_id)
        .where(tasks.c.node_id.in_(list(ids)), tasks.c.state == TaskState.LEASED.value)
        .order_by(tasks.c.id)
    )


async def nodes_for_why(tx: Tx) -> Sequence[AnyRow]:
    """All nodes that are not given up, each with ``connected``, by id."""
    return await tx.all(
        _with_connection().where(nodes.c.liveness != Liveness.OFFLINE.value).order_by(nodes.c.id)
    )


async def nodes_named(tx: Tx, name: str) -> Sequence[AnyRow]:
    """Id, name, liveness and account of the nodes of that name, by id."""
    return await tx.all(
        select(nodes.c.id, nodes.c.name, nodes.c.liveness, nodes.c.account_id)
        .where(nodes.c.name == name)
        .order_by(nodes.c.id)
    )


async def nodes_beginning(tx: Tx, prefix: str) -> Sequence[AnyRow]:
    """Id, name, liveness and account of the nodes whose id begins like that, by id."""
    return await tx.all(
        select(nodes.c.id, nodes.c.name, nodes.c.liveness, nodes.c.account_id)
        .where(func.substr(nodes.c.id, 1, len(prefix)) == prefix)
        .order_by(nodes.c.id)
    )


async def count_nodes(tx: Tx) -> Sequence[AnyRow]:
    """(liveness, standing, number)."""
    return await tx.all(
        select(nodes.c.liveness, nodes.c.standing, func.count().label("number")).group_by(
            nodes.c.liveness, nodes.c.standing
        )
    )


async def count_jobs(tx: Tx) -> Sequence[AnyRow]:
    """(state, number, accepted tokens)."""
    return await tx.all(
        select(
            jobs.c.state,
            func.count().label("number"),
            func.coalesce(func.sum(jobs.c.tokens), 0).label("tokens"),
        ).group_by(jobs.c.state)
    )


async def count_tasks(tx: Tx) -> Sequence[AnyRow]:
    """(state, phase, number)."""
    return await tx.all(
        select(tasks.c.state, tasks.c.phase, func.count().label("number")).group_by(
            tasks.c.state, tasks.c.phase
        )
    )


async def count_rounds(tx: Tx) -> Sequence[AnyRow]:
    """(state, number)."""
    return await tx.all(
        select(rounds.c.state, func.count().label("number")).group_by(rounds.c.state)
    )
