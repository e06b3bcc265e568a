"""Every row of a grid at one moment, as lines of text, and the blobs that they name."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from sqlalchemy import MetaData, String, Table, column, select, table

from distribai.orchestrator.backup.existing import no_grid
from distribai.orchestrator.backup.format import (
    REVISION_TABLE,
    Layout,
    LineWriter,
    Part,
    Progress,
    Told,
    reflect,
    table_names,
    tables_of,
    to_line,
)
from distribai.orchestrator.backup.naming import Named
from distribai.store.engine import Database, Tx
from distribai.store.statements import facts

ROWS_AT_ONCE = 500


@dataclass(frozen=True, slots=True)
class Snapshot:
    """What the database said at one moment."""

    database: str
    grid_id: str
    revision: str
    taken_at: float
    columns: Mapping[str, tuple[str, ...]]
    tables: Mapping[str, Part]


async def dump(db: Database, layout: Layout, name: str, told: Told) -> tuple[Snapshot, Named]:
    """Write every row of one read snapshot into ``layout``, and tell the blobs that they name.

    Raises:
        NotFound: ``grid.missing``: the database holds no grid.
        Conflict: ``grid.schema``: a newer program's.
        OSError: the disk refuses.
    """
    (layout.snapshots / name).mkdir(parents=True)
    named = Named()
    async with db.read() as tx:
        return await _dump(tx, layout, name, named, told), named


async def _dump(tx: Tx, layout: Layout, name: str, named: Named, told: Told) -> Snapshot:
    if REVISION_TABLE not in await tx.conn.run_sync(table_names):
        raise no_grid("the database holds no tables of a grid")
    revision = str(
        await tx.scalar(select(column("version_num", String)).select_from(table(REVISION_TABLE)))
    )
    names = tables_of(revision)
    found: MetaData = await tx.conn.run_sync(lambda c: reflect(c, names))
    grid_id = await facts.get(tx, "grid_id")
    if grid_id is None:
        raise no_grid("no orchestrator has ever started on the database")
    tables: dict[str, Part] = {}
    rows = 0
    for one in found.sorted_tables:
        tables[one.name] = await _dump_table(tx, one, layout.lines(name, one.name), named)
        rows += tables[one.name].lines
        told(Progress("rows", rows, 0))
    return Snapshot(
        database=tx.dialect,
        grid_id=grid_id,
        revision=revision,
        taken_at=tx.now,
        columns={t.name: tuple(c.name for c in t.columns) for t in found.sorted_tables},
        tables=tables,
    )


async def _dump_table(tx: Tx, one: Table, path: Path, named: Named) -> Part:
    writer = LineWriter(path)
    try:
        result = await tx.conn.stream(
            select(one).order_by(*one.primary_key.columns),
            execution_options={"yield_per": ROWS_AT_ONCE},
        )
        async for row in result:
            values = tuple(row)
            named.add(one, values)
            writer.write(to_line(values))
        return writer.finish()
    finally:
        writer.close()
