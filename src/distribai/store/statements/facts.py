"""Single facts of the grid, as texts: its id, its mode, its keys."""

from __future__ import annotations

from sqlalchemy import delete, select

from distribai.store.engine import Tx
from distribai.store.tables import meta


async def get(tx: Tx, key: str) -> str | None:
    """A single fact of the grid."""
    found = await tx.scalar(select(meta.c.value).where(meta.c.key == key))
    return None if found is None else str(found)


async def locked(tx: Tx, key: str) -> str | None:
    """A single fact of the grid, which nobody else changes until the transaction ends."""
    query = select(meta.c.value).where(meta.c.key == key).with_for_update()
    found = await tx.scalar(query)
    return None if found is None else str(found)


async def beginning(tx: Tx, prefix: str) -> list[tuple[str, str]]:
    """All facts whose keys begin with ``prefix``."""
    found = await tx.all(
        select(meta.c.key, meta.c.value).where(meta.c.key.startswith(prefix, autoescape=True))
    )
    return [(str(row.key), str(row.value)) for row in found]


async def drop(tx: Tx, key: str) -> None:
    """Remove a fact."""
    await tx.run(delete(meta).where(meta.c.key == key))


async def put(tx: Tx, key: str, value: str) -> None:
    """Write a fact, in place of an earlier one."""
    statement = tx.insert(meta).values(key=key, value=value)
    await tx.run(statement.on_conflict_do_update(index_elements=["key"], set_={"value": value}))


async def put_once(tx: Tx, key: str, value: str) -> None:
    """Write a fact that is not there yet."""
    await tx.run(tx.insert(meta).values(key=key, value=value).on_conflict_do_nothing())
