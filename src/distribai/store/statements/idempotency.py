"""Idempotency keys: what a caller's key made."""

from __future__ import annotations

from sqlalchemy import delete, select, update

from distribai.store.engine import AnyRow, Tx
from distribai.store.tables import idempotency


async def get(tx: Tx, owner: str, scope: str, key: str) -> AnyRow | None:
    """What was made under a key."""
    return await tx.first(
        select(idempotency).where(
            idempotency.c.owner == owner, idempotency.c.scope == scope, idempotency.c.key == key
        )
    )


async def add(tx: Tx, owner: str, scope: str, key: str, fingerprint: str, object_id: str) -> bool:
    """Remember a key; False when somebody else has just used it."""
    statement = tx.insert(idempotency).values(
        owner=owner,
        scope=scope,
        key=key,
        fingerprint=fingerprint,
        object_id=object_id,
        created_at=tx.now,
    )
    statement = statement.on_conflict_do_nothing()
    return await tx.scalar(statement.returning(idempotency.c.key)) is not None


async def replace(tx: Tx, owner: str, scope: str, key: str, old: str, new: str) -> bool:
    """Let a key stand for another object than ``old``, which is gone; whether it still stood for
    that one."""
    statement = (
        update(idempotency)
        .where(
            idempotency.c.owner == owner,
            idempotency.c.scope == scope,
            idempotency.c.key == key,
            idempotency.c.object_id == old,
        )
        .values(object_id=new)
        .returning(idempotency.c.key)
    )
    return await tx.scalar(statement) is not None


async def prune(tx: Tx, older_s: float) -> int:
    """Forget keys that were first used more than ``older_s`` seconds ago; how many."""
    statement = delete(idempotency).where(idempotency.c.created_at < tx.now - older_s)
    return (await tx.run(statement)).rowcount
