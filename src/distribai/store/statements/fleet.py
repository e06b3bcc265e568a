"""Nodes: how they are, and what of theirs failed.

Who changes several nodes at once locks them by their ids' order, or PostgreSQL would undo one of
two replicas that wait for each other.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from typing import Any

from sqlalchemy import ColumnElement, and_, delete, exists, func, insert, or_, select, update

from distribai.core.states import Liveness, Standing
from distribai.store.engine import AnyRow, Tx
from distribai.store.listed import BIG, TEXT, among, rows
from distribai.store.tables import failures, nodes, sessions, submissions


async def lock_node(tx: Tx, node_id: str) -> AnyRow | None:
    """One node, its row locked until the end of the transaction."""
    # Not against the keys that refer to it: work of the node is accepted meanwhile.
    locked = select(nodes).where(nodes.c.id == node_id).with_for_update(key_share=True)
    return await tx.first(locked)


def _in_order(*conditions: ColumnElement[bool]) -> ColumnElement[bool]:
    """Nodes that fulfil ``conditions``, locked one after the other by their ids."""
    found = select(nodes.c.id).where(*conditions).order_by(nodes.c.id)
    return and_(nodes.c.id.in_(found.with_for_update(key_share=True)), *conditions)


async def add_node(tx: Tx, **values: Any) -> None:
    """Insert a node; one that registers twice at once is inserted once."""
    await tx.run(tx.insert(nodes).values(**values).on_conflict_do_nothing())


async def change_node(tx: Tx, node_id: str, **values: Any) -> None:
    """Write columns of a node."""
    await tx.run(update(nodes).where(nodes.c.id == node_id).values(**values))


async def all_nodes(tx: Tx) -> Sequence[AnyRow]:
    """All nodes, the one heard last first."""
    return await tx.all(select(nodes).order_by(nodes.c.last_heard_at.desc(), nodes.c.id))


ABLE = (
    exists().where(sessions.c.node_id == nodes.c.id, sessions.c.ended_at.is_(None)),
    nodes.c.liveness == Liveness.ONLINE.value,
    nodes.c.intent == "contribute",
    nodes.c.ordered == "contribute",
    nodes.c.standing.in_([Standing.PROBATION.value, Standing.TRUSTED.value]),
)
"""Nodes that may be given work: online, in a session, willing, and of good standing.

A node without an open session counts as heard for a while after a start, but nobody could tell it
of work."""

WHAT_FOR = (nodes.c.id, nodes.c.standing, nodes.c.devices, nodes.c.machine)
"""What decides which work a node may be given."""


async def able_nodes(tx: Tx, ids: Collection[str] | None = None) -> Sequence[AnyRow]:
    """Nodes that may be given work, by id: all, or those of ``ids``."""
    query = select(*WHAT_FOR).where(*ABLE).order_by(nodes.c.id)
    return await tx.all(query if ids is None else query.where(among(tx, nodes.c.id, ids)))


async def page_of_able_nodes(tx: Tx, after: str, limit: int) -> Sequence[AnyRow]:
    """At most ``limit`` nodes behind the id ``after`` that may be given work, by id."""
    query = select(*WHAT_FOR).where(*ABLE, nodes.c.id > after).order_by(nodes.c.id).limit(limit)
    return await tx.all(query)


async def any_without_session(tx: Tx) -> bool:
    """Whether a node counts as online and willing that has no open session."""
    there = exists().where(sessions.c.node_id == nodes.c.id, sessions.c.ended_at.is_(None))
    row = await tx.first(
        select(nodes.c.id)
        .where(nodes.c.liveness == Liveness.ONLINE.value, nodes.c.intent == "contribute", ~there)
        .limit(1)
    )
    return row is not None


async def barred_nodes(tx: Tx, ids: Collection[str]) -> Sequence[AnyRow]:
    """Id, standing and its reason of those nodes that may have no session."""
    return await tx.all(
        select(nodes.c.id, nodes.c.standing, nodes.c.standing_reason).where(
            among(tx, nodes.c.id, ids),
            nodes.c.standing.in_([Standing.QUARANTINED.value, Standing.BANNED.value]),
        )
    )


async def nodes_by_id(tx: Tx, ids: Collection[str]) -> Sequence[AnyRow]:
    """Nodes by id, in no order."""
    if not ids:
        return []
    return await tx.all(select(nodes).where(among(tx, nodes.c.id, ids)))


_HEARD = {"node_id": TEXT, "up": BIG, "down": BIG}


async def heard(tx: Tx, values: Sequence[Mapping[str, Any]]) -> None:
    """Write a batch of ``{"node_id", "up", "down"}``: heard now, with more bytes moved."""
    found = rows(tx, "heard", _HEARD, values)
    if tx.dialect == "postgresql":
        # In one order: two that write the same nodes would wait for each other.
        ids = among(tx, nodes.c.id, [row["node_id"] for row in values])
        locked = select(nodes.c.id).where(ids).order_by(nodes.c.id).with_for_update(key_share=True)
        await tx.run(select(func.count()).select_from(locked.subquery()))
    await tx.run(
        update(nodes)
        .where(nodes.c.id == found.c.node_id)
        .values(
            last_heard_at=tx.now,
            bytes_up=nodes.c.bytes_up + found.c.up,
            bytes_down=nodes.c.bytes_down + found.c.down,
        )
    )


async def orders(tx: Tx, ids: Collection[str]) -> dict[str, str]:
    """What the operator wants of nodes, of those of ``ids`` that shall not simply contribute."""
    query = select(nodes.c.id, nodes.c.ordered).where(nodes.c.ordered != "contribute")
    return {row.id: row.ordered for row in await tx.all(query.where(among(tx, nodes.c.id, ids)))}


async def add_failure(
    tx: Tx, node_id: str, job_id: str, task_id: str, code: str, reason: str
) -> None:
    """Remember that an attempt failed on its node, or that its result was refused."""
    await tx.run(
        insert(failures).values(
            node_id=node_id, job_id=job_id, task_id=task_id, code=code, reason=reason, at=tx.now
        )
    )


def _counted(since: float) -> ColumnElement[bool]:
    """Failures behind ``since`` of nodes that may work, since their standing was set last."""
    return and_(
        failures.c.at > since,
        or_(nodes.c.standing_at.is_(None), failures.c.at > nodes.c.standing_at),
        nodes.c.standing.in_([Standing.PROBATION.value, Standing.TRUSTED.value]),
    )


async def suspects(tx: Tx, since: float, jobs: int) -> Sequence[str]:
    """Nodes that failed in at least so many different jobs behind ``since``, and since their
    standing was set last."""
    found = await tx.all(
        select(failures.c.node_id)
        .join(nodes, nodes.c.id == failures.c.node_id)
        .where(_counted(since))
        .group_by(failures.c.node_id)
        .having(func.count(failures.c.job_id.distinct()) >= jobs)
        .order_by(failures.c.node_id)
    )
    return [row.node_id for row in found]


async def failures_since(tx: Tx, since: float, node_id: str) -> Sequence[AnyRow]:
    """Those failures of one node, oldest first."""
    return await tx.all(
        select(failures)
        .join(nodes, nodes.c.id == failures.c.node_id)
        .where(_counted(since), failures.c.node_id == node_id)
        .order_by(failures.c.id)
    )


async def any_failure_before(tx: Tx, moment: float) -> bool:
    """Whether there are failures that old."""
    row = await tx.first(select(failures.c.id).where(failures.c.at <= moment).limit(1))
    return row is not None


async def forget_failures(tx: Tx, before: float) -> None:
    """Remove failures that nobody asks about any more."""
    await tx.run(delete(failures).where(failures.c.at <= before))


async def others_could(tx: Tx, job_ids: Collection[str], node_id: str) -> set[str]:
    """Of ``job_ids`` those in which another node's work was accepted."""
    if not job_ids:
        return set()
    found = await tx.all(
        select(submissions.c.job_id)
        .where(submissions.c.job_id.in_(list(job_ids)), submissions.c.node_id != node_id)
        .distinct()
    )
    return {row.job_id for row in found}


async def set_liveness(
    tx: Tx, old: Collection[Liveness], new: Liveness, silent_since: float
) -> Sequence[AnyRow]:
    """Nodes in one of ``old`` that were last heard at or before ``silent_since`` become ``new``."""
    return await tx.all(
        update(nodes)
        .where(
            _in_order(
                nodes.c.liveness.in_([state.value for state in old]),
                nodes.c.last_heard_at <= silent_since,
            )
        )
        .values(liveness=new.value)
        .returning(nodes.c.id)
    )


async def silent_since(tx: Tx, moment: float) -> Sequence[AnyRow]:
    """Ids of nodes that count as online and were last heard at or before ``moment``, and of
    degraded ones."""
    return await tx.all(
        select(nodes.c.id).where(
            or_(
                and_(nodes.c.liveness == Liveness.ONLINE.value, nodes.c.last_heard_at <= moment),
                nodes.c.liveness == Liveness.DEGRADED.value,
            )
        )
    )


async def set_online(tx: Tx, ids: Collection[str]) -> Sequence[AnyRow]:
    """Nodes of ``ids`` that were not online are; their ids."""
    if not ids:
        return []
    return await tx.all(
        update(nodes)
        .where(among(tx, nodes.c.id, ids), nodes.c.liveness != Liveness.ONLINE.value)
        .values(liveness=Liveness.ONLINE.value)
        .returning(nodes.c.id)
    )


async def hear_all(tx: Tx) -> None:
    """After a start: whoever was not given up counts as heard now."""
    await tx.run(
        update(nodes)
        .where(_in_order(nodes.c.liveness != Liveness.OFFLINE.value))
        .values(last_heard_at=tx.now)
    )


async def standing(tx: Tx, node_id: str) -> str | None:
    """A node's standing; None: there is no such node."""
    found = await tx.scalar(select(nodes.c.standing).where(nodes.c.id == node_id))
    return None if found is None else str(found)
