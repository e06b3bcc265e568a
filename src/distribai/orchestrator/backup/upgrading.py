"""``distribai grid migrate``: the schema of a grid that is there, brought to this program's."""

from __future__ import annotations

from distribai.orchestrator.backup.existing import closed, existing, no_grid
from distribai.sections import OrchestratorSettings
from distribai.store.migrate import Schema, migrate, schema_of


async def upgrade_schema(settings: OrchestratorSettings, *, check: bool) -> Schema:
    """Do what every start of an orchestrator does to the schema, and nothing else; where the
    database stood. All steps are one transaction: interrupted, none is done.

    Args:
        check: change nothing.

    Raises:
        NotFound: ``grid.missing``: there is no grid where the settings say.
        Conflict: ``grid.locked``: an orchestrator runs on the SQLite file; ``grid.schema``: a newer
            program has been here.
        Unavailable: ``grid.database``.
    """
    async with existing(settings) as db:
        async with db.read() as tx:
            before = await schema_of(tx)
        if not before.revision:
            raise no_grid("the database holds no tables of a grid")
        if before.steps and not check:
            with closed(db):
                await migrate(db)
        return before
