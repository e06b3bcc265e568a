"""The production stores without threads, so that a simulation's order never depends on chance."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

from sqlalchemy import Connection, Engine, Executable, create_engine, event
from sqlalchemy.ext.asyncio import AsyncConnection, AsyncEngine

from distribai.core.spec import BlobRef
from distribai.errors import NotFound
from distribai.store.blobs import BlobStore, blob_key
from distribai.store.engine import AnyResult, Database, Tx
from distribai.store.migrate import migrate

CHUNK = 1 << 20


@dataclass(frozen=True, slots=True)
class _InlineTx(Tx):
    """A transaction whose statements are done when they are asked for."""

    inline: Connection

    async def run(
        self, statement: Executable, values: Mapping[str, Any] | None = None
    ) -> AnyResult:
        """Execute one statement."""
        return self.inline.execute(statement, values)

    async def run_many(self, statement: Executable, rows: Sequence[Mapping[str, Any]]) -> None:
        """Execute one statement for each of ``rows``."""
        if rows:
            self.inline.execute(statement, rows)


_empty: list[bytes] = []
"""The file of a migrated database without a grid in it, once there was one."""


class InlineDatabase(Database):
    """SQLite as the production engine sets it up, but without threads and greenlets.

    A transaction hence runs from its beginning to its end without a pause, and costs a fraction.
    """

    def __init__(self, path: Path, clock: Callable[[], float]) -> None:
        super().__init__(f"sqlite:///{path}", clock=clock, durable=False)
        self._time = clock
        self._write_engine = _engine(path, "BEGIN IMMEDIATE")
        self._read_engine = _engine(path, "BEGIN")

    @classmethod
    async def create(cls, path: Path, clock: Callable[[], float]) -> InlineDatabase:
        """A new database with its tables, at ``path``, where nothing is yet.

        The production migrations make them, once a process: that takes longer than many a
        simulation.
        """
        if not _empty:
            first = cls(path, lambda: 0.0)
            try:
                await migrate(first)
            finally:
                await first.close()  # which also moves what is in the WAL into the file
            _empty.append(_read(path))
        _write(path, _empty[0])
        return cls(path, clock)

    async def close(self) -> None:
        """Close all connections."""
        self._write_engine.dispose()
        self._read_engine.dispose()
        await super().close()

    @asynccontextmanager
    async def _begin(
        self, engine: AsyncEngine, point: str = "", now: float | None = None
    ) -> AsyncIterator[Tx]:
        inline = self._write_engine if engine is self._writer else self._read_engine
        with inline.connect() as connection, connection.begin():
            yield _InlineTx(
                cast(AsyncConnection, _RunSync(connection)), "sqlite", self._time(), connection
            )


class _RunSync:
    """What of an asynchronous connection the migrations use."""

    def __init__(self, connection: Connection) -> None:
        self._connection = connection

    async def run_sync(self, work: Callable[[Connection], None]) -> None:
        """Call ``work`` with the connection."""
        work(self._connection)


def _read(path: Path) -> bytes:
    return path.read_bytes()


def _write(path: Path, data: bytes) -> None:
    path.write_bytes(data)


def _engine(path: Path, begin: str) -> Engine:
    engine = create_engine(f"sqlite:///{path}")

    @event.listens_for(engine, "connect")
    def on_connect(connection: Any, _record: object) -> None:
        connection.isolation_level = None
        cursor = connection.cursor()
        for pragma in ("journal_mode = WAL", "synchronous = OFF", "foreign_keys = ON"):
            cursor.execute(f"PRAGMA {pragma}")
        cursor.close()

    @event.listens_for(engine, "begin")
    def on_begin(connection: Connection) -> None:
        connection.exec_driver_sql(begin)

    return engine


class PacedBlobs(BlobStore):
    """The production store over a directory; reading and writing a blob takes virtual seconds.

    So a verdict takes ``read_s`` and a merge of K submissions about ``(K + 2) read_s + 3 write_s``.

    """

    read_s = 0.0
    write_s = 0.0

    async def put_file(self, path: Path, ref: BlobRef) -> None:
        """As the production store, ``write_s`` later."""
        await asyncio.sleep(self.write_s)
        await super().put_file(path, ref)

    async def put_upload(self, path: Path, ref: BlobRef) -> None:
        """A node's upload, whose time is the link's."""
        await super().put_file(path, ref)

    @asynccontextmanager
    async def local(self, ref: BlobRef) -> AsyncIterator[Path]:
        """As the production store, ``read_s`` later."""
        await asyncio.sleep(self.read_s)
        async with super().local(ref) as path:
            yield path

    def path(self, sha256: str) -> Path:
        """Where a blob lies."""
        assert self._root is not None, "a simulation's blobs lie in a directory"
        return self._root / blob_key(sha256)

    async def size(self, sha256: str) -> int:
        """As the production store, which asks a thread."""
        try:
            return self.path(sha256).stat().st_size
        except FileNotFoundError:
            raise NotFound("blob.unknown", f"There is no blob {sha256[:12]} here.") from None

    async def read(
        self, sha256: str, start: int = 0, stop: int | None = None
    ) -> AsyncIterator[bytes]:
        """As the production store, which asks a thread."""
        size = await self.size(sha256)
        with self.path(sha256).open("rb") as file:
            file.seek(start)
            left = (size if stop is None else min(stop, size)) - start
            while left > 0 and (chunk := file.read(min(CHUNK, left))):
                left -= len(chunk)
                yield chunk
