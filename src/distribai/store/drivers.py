"""The drivers of both kinds of database, and how their connections are made and looked after."""

from __future__ import annotations

import sqlite3
import time
from collections import deque
from collections.abc import Callable
from pathlib import Path
from typing import Any

import aiosqlite
from sqlalchemy import event
from sqlalchemy.dialects.sqlite.aiosqlite import (
    AsyncAdapt_aiosqlite_connection,
    AsyncAdapt_aiosqlite_cursor,
    AsyncAdapt_aiosqlite_dbapi,
)
from sqlalchemy.engine import URL, Dialect, make_url
from sqlalchemy.exc import ArgumentError, InvalidatePoolError, NoSuchModuleError
from sqlalchemy.ext.asyncio import AsyncEngine, create_async_engine
from sqlalchemy.pool import ConnectionPoolEntry
from sqlalchemy.util import LRUCache

from distribai.errors import Unavailable, UsageError

BUSY_S = 30.0
"""Seconds that SQLite waits for a lock that another process (a backup) holds."""

PING_S = 5.0
"""Seconds without use after which a connection to PostgreSQL is asked whether it still is one."""


def driver_url(url: str) -> URL:
    """A database's URL, with the driver that is used for its kind.

    Raises:
        UsageError: ``config.invalid``: another kind of database, or its driver is not installed.
    """
    drivers = {"sqlite": "sqlite+aiosqlite", "postgresql": "postgresql+asyncpg"}
    try:
        parsed = make_url(url)
        backend = drivers[parsed.get_backend_name()]
        parsed = parsed.set(drivername=backend)
        parsed.get_dialect().import_dbapi()
    except (ArgumentError, KeyError, NoSuchModuleError) as problem:
        raise UsageError(
            "config.invalid",
            f"{url.split('@')[-1]!r} is not the URL of a database that a grid can live in.",
            "Give sqlite:///path/to/grid.sqlite3 or postgresql://user@host/name.",
            field="db",
        ) from problem
    except ImportError as problem:
        raise UsageError(
            "config.invalid",
            f"The driver for this database is not installed: {problem.name}.",
            "Install distribai[postgres].",
            field="db",
        ) from problem
    return parsed


HIDDEN = "***"
"""What stands for a password in :func:`shown`."""


def shown(url: str) -> str:
    """A database's URL as it may be shown and written down: ``***`` for a password, nothing of one
    in its query, and the whole path of a file."""
    parsed = make_url(url)
    parsed = parsed.set(query={k: v for k, v in parsed.query.items() if "pass" not in k})
    if parsed.get_backend_name() == "sqlite" and parsed.database:
        parsed = parsed.set(database=str(Path(parsed.database).absolute()))
    return parsed.render_as_string(hide_password=True)


def check_directory(url: URL) -> None:
    """Refuse an SQLite file whose directory is not there.

    Raises:
        Unavailable: ``grid.database``.
    """
    directory = Path(url.database or "").absolute().parent
    if not directory.is_dir():
        raise Unavailable(
            "grid.database",
            f"The directory of the database does not exist: {directory}.",
            "Make it, or give another path.",
        )


class _Compiled(LRUCache[Any, Any]):
    """Compiled statements of all engines of this process. Compiling one takes longer than running a
    small one, and SQLAlchemy does it once for each dialect object, of which every engine has one:
    twice for a file with readers apart, and again for each database that is opened one after the
    other. Here dialects of one kind and server version share what was compiled for either."""

    def get(self, key: Any, default: Any = None) -> Any:
        """The compiled statement."""
        return super().get(_alike(key), default)

    def __setitem__(self, key: Any, value: Any) -> None:
        super().__setitem__(_alike(key), value)


def _alike(key: tuple[Any, ...]) -> tuple[Any, ...]:
    """A key of SQLAlchemy's with what decides a dialect's SQL in the place of the dialect."""
    return tuple(
        (part.name, part.driver, part.server_version_info) if isinstance(part, Dialect) else part
        for part in key
    )


_COMPILED = _Compiled(1000)


def postgres_engine(url: URL) -> AsyncEngine:
    """A pool of connections to PostgreSQL, in which broken ones are replaced."""
    engine = create_async_engine(url, pool_size=8, execution_options={"compiled_cache": _COMPILED})
    driver = engine.dialect.loaded_dbapi

    @event.listens_for(engine.sync_engine, "checkin")
    def on_checkin(_connection: object, record: ConnectionPoolEntry) -> None:
        record.info["used_at"] = time.monotonic()

    @event.listens_for(engine.sync_engine, "checkout")
    def on_checkout(connection: Any, record: ConnectionPoolEntry, _proxy: object) -> None:
        """Take another connection in place of one that has broken meanwhile. One whose other side
        has closed it knows; whether the other side is still there is asked after a pause only,
        because asking takes as long as a statement."""
        used_at = record.info.get("used_at")
        if used_at is None:
            return
        broken = connection.driver_connection.is_closed()
        if not broken and time.monotonic() - used_at > PING_S:
            try:
                connection.ping()
            except (driver.Error, OSError):
                broken = True
        if broken:
            raise InvalidatePoolError  # the others are no better

    return engine


def sqlite_engine(url: URL, begin: str, size: int, durable: bool) -> AsyncEngine:
    """A pool of ``size`` connections to an SQLite file, whose transactions open with ``begin``."""
    engine = create_async_engine(
        url,
        module=_SqliteDriver(aiosqlite, sqlite3),
        pool_size=size,
        max_overflow=0,
        # Whoever takes a connection ends its transaction before it is given back, so the pool need
        # not undo anything: that would be one more way to the connection's thread.
        pool_reset_on_return=None,
        execution_options={"compiled_cache": _COMPILED},
        connect_args={"timeout": BUSY_S},
    )

    @event.listens_for(engine.sync_engine, "connect")
    def on_connect(connection: Any, _record: object) -> None:
        # The driver's own idea of when to begin is switched off: transactions begin below.
        connection.isolation_level = None
        cursor = connection.cursor()
        cursor.execute("PRAGMA journal_mode = WAL")
        # FULL: a commit is on disk before it is acknowledged, also across a power cut.
        cursor.execute(f"PRAGMA synchronous = {'FULL' if durable else 'OFF'}")
        cursor.execute("PRAGMA foreign_keys = ON")
        cursor.close()

    @event.listens_for(engine.sync_engine, "begin")
    def on_begin(connection: Any) -> None:
        connection.exec_driver_sql(begin)

    return engine


class _Cursor(AsyncAdapt_aiosqlite_cursor):
    """A cursor that goes to its connection's thread once: it brings the rows with it, and leaves
    nothing open. SQLAlchemy's goes four times a statement (to be made, for the statement, for its
    rows, to be closed), and what a small statement costs is these ways. Results that are streamed
    have cursors of another kind."""

    __slots__ = ()

    def _make_new_cursor(self, connection: Any) -> Any:
        """None before the first statement; each statement has one of its own."""

    def _aenter_cursor(self, cursor: Any) -> Any:
        """The same."""

    def close(self) -> None:
        """Forget the rows; the cursor was closed where it was used."""
        self._rows.clear()

    async def _async_soft_close(self) -> None:
        """Nothing is left open."""

    async def _execute_async(self, operation: Any, parameters: Any) -> Any:
        return await self._in_one_go(lambda cursor: cursor.execute(operation, parameters or ()))

    async def _executemany_async(self, operation: Any, seq_of_parameters: Any) -> Any:
        return await self._in_one_go(
            lambda cursor: cursor.executemany(operation, seq_of_parameters)
        )

    async def _in_one_go(self, execute: Callable[[sqlite3.Cursor], object]) -> None:
        connection: Any = self._connection

        def run() -> None:
            cursor = connection._conn.cursor()
            try:
                execute(cursor)
                self._rows = deque(cursor.fetchall() if cursor.description else ())
            finally:
                cursor.close()
            self._cursor = cursor  # its description and its counts outlive its end

        async with self._adapt_connection._execute_mutex:
            await connection._execute(run)


class _SqliteConnection(AsyncAdapt_aiosqlite_connection):
    """Whose cursors are those above."""

    __slots__ = ()

    _cursor_cls = _Cursor


class _SqliteDriver(AsyncAdapt_aiosqlite_dbapi):
    """Whose connections are those above."""

    def connect(self, *args: Any, **kwargs: Any) -> AsyncAdapt_aiosqlite_connection:
        """Another connection."""
        return _SqliteConnection(self, super().connect(*args, **kwargs)._connection)
