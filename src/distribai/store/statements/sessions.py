"""Nodes' sessions: one that is open makes its token good."""

from __future__ import annotations

from collections.abc import Collection

from sqlalchemy import exists, insert, select, update

from distribai.store.engine import AnyRow, Tx
from distribai.store.listed import TEXT, among, rows
from distribai.store.tables import nodes, sessions


async def open_session(tx: Tx, session_id: str, node_id: str, token_hash: str, holder: str) -> None:
    """Open a session; all earlier ones of the node end, and their tokens with them."""
    await end_sessions(tx, node_id)
    await tx.run(
        insert(sessions).values(
            id=session_id,
            node_id=node_id,
            token_hash=token_hash,
            holder=holder,
            created_at=tx.now,
        )
    )


async def renew_session(tx: Tx, session_id: str, token_hash: str) -> None:
    """Give a session that goes on a fresh token; it counts as begun now."""
    await tx.run(
        update(sessions)
        .where(sessions.c.id == session_id)
        .values(token_hash=token_hash, created_at=tx.now)
    )


async def registered_since(tx: Tx, node_id: str, moment: float) -> bool:
    """Whether a session of the node is open that began, or was taken up again, behind ``moment``.
    The node's row is locked, so that nobody else begins one now."""
    found = await tx.first(
        select(sessions.c.id)
        .where(
            sessions.c.node_id == node_id,
            sessions.c.ended_at.is_(None),
            sessions.c.created_at > moment,
        )
        .limit(1)
    )
    return found is not None


async def end_sessions(tx: Tx, node_id: str | None) -> None:
    """End all sessions of a node; None: of every node."""
    statement = update(sessions).where(sessions.c.ended_at.is_(None)).values(ended_at=tx.now)
    await tx.run(statement if node_id is None else statement.where(sessions.c.node_id == node_id))


async def end_session(tx: Tx, session_id: str) -> bool:
    """End one session; whether it was open."""
    statement = update(sessions).where(sessions.c.id == session_id, sessions.c.ended_at.is_(None))
    ended = await tx.first(statement.values(ended_at=tx.now).returning(sessions.c.id))
    return ended is not None


async def open_sessions(tx: Tx, ids: Collection[str]) -> set[str]:
    """Which of the sessions ``ids`` have not been ended."""
    if not ids:
        return set()
    found = await tx.all(
        select(sessions.c.id).where(among(tx, sessions.c.id, ids), sessions.c.ended_at.is_(None))
    )
    return {row.id for row in found}


async def ended_sessions(tx: Tx, ids: Collection[str]) -> set[str]:
    """Which of the sessions ``ids`` are open no more."""
    asked = rows(tx, "asked", {"id": TEXT}, [{"id": i} for i in ids])
    is_open = exists().where(sessions.c.id == asked.c.id, sessions.c.ended_at.is_(None))
    return {row.id for row in await tx.all(select(asked.c.id).where(~is_open))}


async def node_of_session(tx: Tx, session_id: str, node_id: str) -> AnyRow | None:
    """Id and standing of a node whose session ``session_id`` is open."""
    return await tx.first(
        select(nodes.c.id, nodes.c.standing)
        .join(sessions, sessions.c.node_id == nodes.c.id)
        .where(
            sessions.c.id == session_id,
            sessions.c.ended_at.is_(None),
            nodes.c.id == node_id,
        )
    )


async def node_of_token(tx: Tx, token_hash: str) -> AnyRow | None:
    """Id and standing of the node whose open session has this token."""
    return await tx.first(
        select(nodes.c.id, nodes.c.standing)
        .join(sessions, sessions.c.node_id == nodes.c.id)
        .where(sessions.c.token_hash == token_hash, sessions.c.ended_at.is_(None))
    )
