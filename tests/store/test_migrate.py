from __future__ import annotations

import os
from pathlib import Path

import asyncpg
import pytest
from alembic import command
from alembic.autogenerate import compare_metadata
from alembic.migration import MigrationContext
from sqlalchemy import Connection, make_url, text

from distribai.core.people import HOME, OPERATOR
from distribai.errors import Conflict
from distribai.orchestrator.people import access, keys
from distribai.store.engine import Database
from distribai.store.migrate import alembic_config, migrate
from distribai.store.statements import invites
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


async def test_the_jobs_nodes_and_keys_of_a_grid_without_people_go_to_its_operator(
    request: pytest.FixtureRequest, url: str, tmp_path: Path
) -> None:
    db = Database(await fresh(request, url, tmp_path), durable=False)
    async with db.write() as tx:
        await tx.conn.run_sync(lambda c: command.upgrade(alembic_config(c), "0002"))
        for statement in EARLIER:
            await tx.run(text(statement))
    await migrate(db)
    assert await keys.ensure_operator_key(db, tmp_path, os.urandom) == ""
    async with db.write() as tx:
        assert await tx.scalar(text("SELECT organization_id FROM jobs")) == HOME
        assert await tx.scalar(text("SELECT account_id FROM nodes")) == OPERATOR
        assert await tx.scalar(text("SELECT account_id FROM outbox")) == ""
        holder = await access.holder_of(tx, "ab" * 32)
        assert holder is not None
        assert holder.principal.operator
        used = await invites.use_invite(tx, "cd" * 32)
        assert used is not None
        assert (used.id, used.account_id, used.trusted) == ("inv_a", OPERATOR, None)
        assert await access.holder_of(tx, "ef" * 32) is None, "it was revoked before"
    await db.close()


async def fresh(request: pytest.FixtureRequest, url: str, tmp_path: Path) -> str:
    """An empty database of the kind that ``url`` is."""
    if url.startswith("sqlite"):
        return f"sqlite:///{tmp_path / 'earlier.sqlite3'}"
    uri = make_url(request.getfixturevalue("postgres"))
    connection = await asyncpg.connect(uri.render_as_string(hide_password=False))
    await connection.execute("DROP DATABASE IF EXISTS earlier")
    await connection.execute("CREATE DATABASE earlier")
    await connection.close()
    return uri.set(database="earlier").render_as_string(hide_password=False)


EARLIER = [
    "INSERT INTO meta VALUES ('outbox_epoch', '1')",
    "INSERT INTO datasets VALUES ('d', 'd', 1, '{}', 1.0)",
    "INSERT INTO jobs (id, name, state, reason, spec, priority, created_at, created_by, version, "
    "rounds_total, parameters, manifest_hash, dataset_key, plan, pool_cursor, pool_returned, "
    "tokens) VALUES ('job_a', 'a', 'completed', '', '{}', 'P2', 1.0, 'operator', 0, 1, 1, 'm', "
    "'d', '{}', 0, '[]', 0)",
    "INSERT INTO nodes (id, public_key, name, liveness, standing, intent, software, devices, "
    "invite_id, joined_at, last_heard_at, bytes_up, bytes_down) VALUES ('node_a', '', 'a', "
    "'offline', 'trusted', 'contribute', '', '[]', 'inv_a', 1.0, 1.0, 0, 0)",
    f"INSERT INTO invites (id, secret_hash, created_at, revoked) VALUES ('inv_a', '{'cd' * 32}', "
    "1.0, false)",
    "INSERT INTO tokens (token_hash, kind, created_at, revoked) VALUES "
    f"('{'ab' * 32}', 'operator', 1.0, false), ('{'ef' * 32}', 'operator', 1.0, true)",
    "INSERT INTO outbox (epoch, xid, at, kind, job_id, task_id, node_id, data) VALUES "
    "(1, 0, 1.0, 'job.submitted', 'job_a', '', '', '{}')",
]
"""What a grid of the schema 0002 may hold."""
