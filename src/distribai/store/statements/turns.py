"""The organizations' accounts of the scheduler."""

from __future__ import annotations

from collections.abc import Mapping

from sqlalchemy import select

from distribai.core.turns import Tag, Tags
from distribai.store.engine import Tx
from distribai.store.tables import turns


async def tags(tx: Tx) -> Tags:
    """Each organization's last turn at each level."""
    rows = await tx.all(select(turns))
    return {(r.organization_id, r.level): Tag(r.start, r.finish) for r in rows}


async def save(tx: Tx, changed: Mapping[tuple[str, int], Tag]) -> None:
    """Write the accounts that have changed; the caller holds the scheduler's lease."""
    for (organization, level), tag in sorted(changed.items()):
        statement = tx.insert(turns).values(
            organization_id=organization, level=level, start=tag.start, finish=tag.finish
        )
        await tx.run(
            statement.on_conflict_do_update(
                index_elements=[turns.c.organization_id, turns.c.level],
                set_={"start": tag.start, "finish": tag.finish},
            )
        )
