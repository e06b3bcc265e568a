from __future__ import annotations

import pytest
from alembic.autogenerate import compare_metadata
from alembic.migration import MigrationContext
from sqlalchemy import Connection, text

from distribai.errors import Conflict
from distribai.store.engine import Database
from distribai.store.migrate import migrate
from distribai.store.tables import metadata


async def test_migrations_and_tables_agree(db: Database) -> None:
    def differences(connection: Connection) -> list[object]:
        context = MigrationContext.configure(connection, opts={"compare_type": True})
        return list(compare_metadata(context, metadata))

    async with db.read() as tx:
        assert await tx.conn.run_sync(differences) == []


async def test_the_device_rule_is_in_the_migrated_schema(db: Database) -> None:
    query = {
        "sqlite": "SELECT sql FROM sqlite_master WHERE name = 'uq_tasks_leased_device'",
        "postgresql": "SELECT indexdef FROM pg_indexes WHERE indexname = 'uq_tasks_leased_device'",
    }
    async with db.read() as tx:
        found = await tx.scalar(text(query[db.dialect]))
    assert "UNIQUE" in found
    assert "leased" in found


async def test_migrating_again_changes_nothing(db: Database) -> None:
    await migrate(db)
    await migrate(db)


async def test_the_database_of_a_newer_program_is_refused(db: Database) -> None:
    async with db.write() as tx:
        await tx.run(text("UPDATE alembic_version SET version_num = '9999'"))
    with pytest.raises(Conflict) as caught:
        await migrate(db)
    assert caught.value.code == "grid.schema"
