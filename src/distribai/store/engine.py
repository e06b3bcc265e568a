"""Databases: the embedded SQLite and PostgreSQL, behind one small face.

SQLite runs in WAL mode with one writer connection, whose transactions begin IMMEDIATE (so that
none fails half-way for want of the write lock), and readers apart, each on the snapshot at which it
began. PostgreSQL writes at READ COMMITTED with guarded updates and row locks, and reads
at REPEATABLE READ. All statements are the same on both; what differs is behind :class:`Tx`.

Everything stored is dated with *database time*, read once at the start of each transaction.
PostgreSQL has its own; an SQLite file is served by one process, whose :class:`AnchoredTime` it is.

Every commit of a transaction that writes is a point (:mod:`distribai.points`), named after the
function that opened it: ``commit.orchestrator.rounds.merging._publish.before`` and ``.after``.
"""

from __future__ import annotations

import asyncio
import math
import sys
import time
from collections.abc import (
    AsyncIterator,
    Awaitable,
    Callable,
    Coroutine,
    Iterator,
    Mapping,
    Sequence,
)
from contextlib import asynccontextmanager, contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, TypeVar

from sqlalchemy import Executable, Row, Table, text
from sqlalchemy.dialects import postgresql, sqlite
from sqlalchemy.engine import CursorResult
from sqlalchemy.exc import DBAPIError, InterfaceError, OperationalError
from sqlalchemy.exc import TimeoutError as PoolTimeout
from sqlalchemy.ext.asyncio import AsyncConnection, AsyncEngine

from distribai import points
from distribai.errors import Unavailable
from distribai.store.drivers import check_directory, driver_url, postgres_engine, sqlite_engine

T = TypeVar("T")

Dialect = Literal["sqlite", "postgresql"]

AnyRow = Row[*tuple[Any, ...]]
"""A row, whatever its columns."""

AnyResult = CursorResult[*tuple[Any, ...]]
"""A result, whatever its columns."""

NOW = text("SELECT extract(epoch FROM clock_timestamp())::double precision")
"""PostgreSQL's time, seconds since 1970."""

CHANNEL = "distribai"
"""The channel of hints between processes on one PostgreSQL database."""

PASSING = ("08", "40001", "40P01", "53", "55P03", "57", "58", "25006")
"""Beginnings of PostgreSQL's SQLSTATE codes for what passes: connections; transactions that were
undone because of others; no disk, memory or connections left; a lock not had in time; an operator's
intervention, a restart among them; its system's errors; and that it only reads, as a standby does
until a failover is over (PostgreSQL's documentation, appendix A)."""

READERS = 4
"""Reader connections of the embedded database; each has its thread."""


@dataclass(frozen=True, slots=True)
class Tx:
    """One transaction. ``now`` is database time at its start."""

    conn: AsyncConnection
    dialect: Dialect
    now: float

    async def run(
        self, statement: Executable, values: Mapping[str, Any] | None = None
    ) -> AnyResult:
        """Execute one statement."""
        return await whole(self.conn.execute(statement, values))

    async def run_many(self, statement: Executable, rows: Sequence[Mapping[str, Any]]) -> None:
        """Execute one statement for each of ``rows``; none is no error."""
        if rows:
            await whole(self.conn.execute(statement, rows))

    async def all(
        self, statement: Executable, values: Mapping[str, Any] | None = None
    ) -> Sequence[AnyRow]:
        """All rows."""
        return (await self.run(statement, values)).all()

    async def first(
        self, statement: Executable, values: Mapping[str, Any] | None = None
    ) -> AnyRow | None:
        """The first row, or None."""
        return (await self.run(statement, values)).first()

    async def scalar(self, statement: Executable, values: Mapping[str, Any] | None = None) -> Any:
        """The first column of the first row, or None."""
        return (await self.run(statement, values)).scalar()

    def insert(self, table: Table) -> sqlite.Insert | postgresql.Insert:
        """An INSERT that knows ON CONFLICT, which both databases spell alike."""
        if self.dialect == "sqlite":
            return sqlite.insert(table)
        return postgresql.insert(table)


class AnchoredTime:
    """Seconds since 1970 that never jump: the host's clock is read once, and from then on only the
    monotonic clock counts.

    A step of the host's clock (NTP, a person, a virtual machine that slept) hence changes nothing
    that is stored while this process runs; a system that is suspended stops this clock as well.
    """

    def __init__(
        self,
        wall: Callable[[], float] | None = None,
        monotonic: Callable[[], float] = time.monotonic,
    ) -> None:
        self._monotonic = monotonic
        # Looked up now and not when this module was imported, so that a test may put another one.
        self._offset = (wall or time.time)() - monotonic()

    def __call__(self) -> float:
        """Now."""
        return self._offset + self._monotonic()

    def not_before(self, at: float) -> None:
        """Go on from ``at`` where that is later: the host's clock has been set back since."""
        self._offset = max(self._offset, at - self._monotonic())


class Database:
    """One database; :meth:`write` and :meth:`read` give transactions.

    Args:
        url: ``sqlite:///path`` or ``postgresql://...`` (the drivers are ours to choose).
        clock: put in place of database time, by tests and simulations alone.
        durable: whether a commit survives a power cut; False is for tests (a killed process loses
            nothing either way).

    Raises:
        UsageError: ``config.invalid``: another kind of database, or its driver is not installed.
        Unavailable: ``grid.database``: the SQLite file's directory does not exist.
    """

    def __init__(
        self, url: str, clock: Callable[[], float] | None = None, *, durable: bool = True
    ) -> None:
        self.url = driver_url(url)
        self.dialect: Dialect = (
            "sqlite" if self.url.get_backend_name() == "sqlite" else "postgresql"
        )
        self._anchored = AnchoredTime() if clock is None and self.dialect == "sqlite" else None
        self._clock = clock or self._anchored
        self.observe: Callable[[str, float, float], None] | None = None
        """Told of every transaction: ``read`` or ``write``, the seconds from asking for it to its
        beginning, and from there to its end."""
        self._writing = asyncio.Lock()
        self._writer: AsyncEngine
        self._reader: AsyncEngine
        self._glancer: AsyncEngine
        if self.dialect == "sqlite":
            check_directory(self.url)
            self._writer = sqlite_engine(self.url, "BEGIN IMMEDIATE", 1, durable)
            self._reader = self._glancer = sqlite_engine(self.url, "BEGIN", READERS, durable)
        else:
            self._writer = postgres_engine(self.url)
            self._reader = self._writer.execution_options(
                isolation_level="REPEATABLE READ", postgresql_readonly=True
            )
            self._glancer = self._writer.execution_options(isolation_level="AUTOCOMMIT")

    @property
    def path(self) -> Path:
        """The file of an SQLite database."""
        return Path(self.url.database or "")

    @asynccontextmanager
    async def write(self) -> AsyncIterator[Tx]:
        """A transaction that may write: committed at the end of the block, undone on any error.

        On SQLite only one runs at a time in the whole process. Keep network and tensor work out.

        Raises:
            Unavailable: ``grid.database``: the database cannot be reached, or went away meanwhile.
                What the block has done is undone, unless that was while it was committed.
        """
        point = f"commit.{_opener()}" if points.armed() else ""
        with self._timed("write") as begun:
            if self.dialect == "postgresql":
                async with self._begin(self._writer, point) as tx:
                    begun()
                    yield tx
                return
            async with self._writing, self._begin(self._writer, point) as tx:
                begun()
                yield tx

    @asynccontextmanager
    async def read(self) -> AsyncIterator[Tx]:
        """A transaction that reads one snapshot.

        Raises:
            Unavailable: ``grid.database``: the database cannot be reached.
        """
        with self._timed("read") as begun:
            async with self._begin(self._reader) as tx:
                begun()
                yield tx

    @asynccontextmanager
    async def glance(self) -> AsyncIterator[Tx]:
        """For a single statement that reads, often and by many: each sees a snapshot of its own,
        PostgreSQL is asked once instead of four times, and ``now`` is not told (NaN).

        Raises:
            Unavailable: ``grid.database``: the database cannot be reached.
        """
        with self._timed("read") as begun:
            async with self._begin(self._glancer, now=math.nan) as tx:
                begun()
                yield tx

    @asynccontextmanager
    async def hints(
        self, heard: Callable[[str], None]
    ) -> AsyncIterator[Callable[[str], Awaitable[None]]]:
        """PostgreSQL alone: as long as the block lasts, ``heard`` is called with what any process,
        this one too, tells the others; yields how to tell something, after a commit that others
        may want to know of. A hint may be lost, so nothing may depend on one.

        Raises:
            Unavailable: ``grid.database``: the connection has broken, or there is none.
        """
        import asyncpg  # an extra

        def on_hint(_connection: object, _pid: int, _channel: str, payload: str) -> None:
            heard(payload)

        try:
            pooled = await _connect(self._writer)
        except (DBAPIError, PoolTimeout, OSError) as problem:
            raise _away(problem) from problem
        try:
            connection: Any = (await pooled.get_raw_connection()).driver_connection
            await connection.add_listener(CHANNEL, on_hint)

            async def tell(payload: str) -> None:
                await connection.execute("SELECT pg_notify($1, $2)", CHANNEL, payload)

            yield tell
        except (asyncpg.PostgresError, asyncpg.InterfaceError, OSError) as problem:
            raise _away(problem) from problem
        finally:
            await whole(pooled.invalidate())  # nobody else shall get it, with its listener
            await whole(pooled.close())

    async def now(self) -> float:
        """Database time now."""
        async with self.read() as tx:
            return tx.now

    def not_before(self, at: float) -> None:
        """Never again tell a time before ``at``, the latest that is stored: the host's clock may
        have been set back while nothing ran. PostgreSQL looks after its own time."""
        if self._anchored is not None:
            self._anchored.not_before(at)

    async def close(self) -> None:
        """Close all connections; the threads behind SQLite's end with them."""
        await self._writer.dispose()
        if self.dialect == "sqlite":
            await self._reader.dispose()

    @contextmanager
    def _timed(self, mode: str) -> Iterator[Callable[[], None]]:
        """Tell :attr:`observe` how long a transaction took, which calls what this yields when it
        has begun; one that never begins has only waited."""
        asked = time.perf_counter()
        began: float | None = None

        def begun() -> None:
            nonlocal began
            began = time.perf_counter()

        try:
            yield begun
        finally:
            if self.observe is not None:
                ended = time.perf_counter()
                start = ended if began is None else began
                self.observe(mode, start - asked, ended - start)

    @asynccontextmanager
    async def _begin(
        self, engine: AsyncEngine, point: str = "", now: float | None = None
    ) -> AsyncIterator[Tx]:
        try:
            conn = await _connect(engine)
        except (DBAPIError, PoolTimeout, OSError) as problem:
            raise _away(problem) from problem
        try:
            if self._clock is not None:
                await whole(_start(conn))
                now = self._clock()  # now, and not before the wait for the lock
            elif now is None:
                now = float((await whole(conn.execute(NOW))).scalar_one())
            try:
                yield Tx(conn, self.dialect, now)
            except BaseException:
                await whole(conn.rollback())
                raise
            if point:
                points.reach(f"{point}.before")
            try:
                await whole(conn.commit())
            except BaseException:
                # For SQLAlchemy it has ended; on a connection to SQLite it is open still.
                await whole(conn.invalidate())
                raise
            if point:
                points.reach(f"{point}.after")
        except DBAPIError as problem:
            if not _passes(problem):
                raise
            raise _away(problem) from problem
        finally:
            await whole(conn.close())


def _opener() -> str:
    """The function that opens the present transaction, with its module below ``distribai``."""
    frame = sys._getframe(1)
    while frame.f_back is not None and frame.f_globals.get("__name__") in (__name__, "contextlib"):
        frame = frame.f_back
    module = str(frame.f_globals.get("__name__", "")).removeprefix("distribai.")
    return f"{module}.{frame.f_code.co_qualname}"


def _passes(problem: DBAPIError) -> bool:
    """Whether trying again later may help: the connection broke, the disk is full, PostgreSQL
    undid one of two transactions that waited for each other, or it has trouble of its own."""
    code = getattr(problem.orig, "sqlstate", None) or ""
    broken = isinstance(problem, (OperationalError, InterfaceError))
    return broken or problem.connection_invalidated or code.startswith(PASSING)


def _away(problem: Exception) -> Unavailable:
    first_line = (str(problem).splitlines() or [repr(problem)])[0]
    return Unavailable(
        "grid.database",
        f"The database cannot be reached or cannot go on: {first_line[:300]}",
        "Check its address, that it runs, its disk's free space, and the rights on its file.",
    )


async def whole(work: Coroutine[Any, Any, T]) -> T:
    """Finish ``work`` even when the caller is cancelled meanwhile, and cancel the caller then.

    A statement that is torn apart leaves its connection in an unknown state, and with it the one
    writer that an embedded database has.
    """
    task = asyncio.ensure_future(work)
    try:
        return await asyncio.shield(task)
    except asyncio.CancelledError:
        while not task.done():
            with suppress(asyncio.CancelledError):
                await asyncio.wait([task])
        if not task.cancelled():
            task.exception()  # whatever it is, the caller no longer waits for it
        raise


async def _connect(engine: AsyncEngine) -> AsyncConnection:
    opened: list[AsyncConnection] = []

    async def connect() -> None:
        opened.append(await engine.connect())

    try:
        await whole(connect())
    except asyncio.CancelledError:
        for conn in opened:
            await whole(conn.close())
        raise
    return opened[0]


async def _start(conn: AsyncConnection) -> None:
    await conn.begin()
