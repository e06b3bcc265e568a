from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any, Literal

import aiosqlite
import pytest
from sqlalchemy import delete, insert, select, text, update
from sqlalchemy.engine.interfaces import CacheStats
from sqlalchemy.exc import IntegrityError

from distribai import points
from distribai.errors import Conflict, Unavailable, UsageError
from distribai.store import outbox
from distribai.store.engine import AnchoredTime, Database, whole
from distribai.store.lock import FileLock
from distribai.store.migrate import migrate
from distribai.store.tables import meta
from tests.store.databases import new_postgres, new_sqlite


async def test_a_failed_transaction_leaves_nothing_behind(db: Database) -> None:
    async def fail() -> None:
        async with db.write() as tx:
            await tx.run(insert(meta).values(key="a", value="1"))
            raise RuntimeError("half-way")

    with pytest.raises(RuntimeError, match="half-way"):
        await fail()
    async with db.read() as tx:
        assert await tx.first(select(meta).where(meta.c.key == "a")) is None


async def test_readers_see_one_snapshot_while_a_writer_commits(db: Database) -> None:
    async with db.read() as reader:
        before = await reader.all(select(meta))
        async with db.write() as tx:
            await tx.run(insert(meta).values(key="a", value="1"))
        assert await reader.all(select(meta)) == before
    async with db.read() as reader:
        assert len(await reader.all(select(meta))) == len(before) + 1


def counting(ways: list[object]) -> Callable[..., Any]:
    """aiosqlite's way to a file's thread, noted in ``ways`` each time that it is taken."""
    go = aiosqlite.Connection._execute

    async def going(connection: aiosqlite.Connection, *args: Any, **kwargs: Any) -> Any:
        ways.append(args)
        return await go(connection, *args, **kwargs)

    return going


async def test_a_statement_costs_one_way_to_the_file_s_thread(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    database = Database(await new_sqlite(tmp_path))
    ways: list[object] = []
    going = counting(ways)
    async with database.write() as tx:
        monkeypatch.setattr(aiosqlite.Connection, "_execute", going)
        values = [{"key": f"k{i}", "value": str(i)} for i in range(3)]
        await tx.run_many(insert(meta), values)
        assert len(ways) == 1
        changed = await tx.run(update(meta).where(meta.c.key == "k1").values(value="x"))
        assert (changed.rowcount, len(ways)) == (1, 2)
        rows = await tx.all(select(meta).where(meta.c.key.like("k%")).order_by(meta.c.key))
        assert [row.value for row in rows] == ["0", "x", "2"]
        assert len(ways) == 3
        returned = await tx.all(delete(meta).where(meta.c.key == "k2").returning(meta.c.value))
        assert ([row.value for row in returned], len(ways)) == (["2"], 4)
        with pytest.raises(IntegrityError):
            await tx.run(insert(meta).values(key="k1", value="again"))
        assert len(ways) == 5
        assert [row.value for row in await tx.all(select(meta.c.value))] == ["1", "0", "x"]
    await database.close()


async def test_a_transaction_costs_a_way_to_begin_and_one_to_end_and_leaves_nothing_open(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    database = Database(await new_sqlite(tmp_path))
    ways: list[object] = []
    going = counting(ways)
    for _ in range(2):
        ways.clear()
        async with database.write() as tx:
            await tx.run(insert(meta).values(key="k0", value="1"))
        async with database.read() as tx:
            assert len(await tx.all(select(meta))) == 2
        with suppress(RuntimeError):
            async with database.write() as tx:
                await tx.run(delete(meta))
                raise RuntimeError
        async with database.write() as tx:
            await tx.run(delete(meta).where(meta.c.key == "k0"))
        # The first time opens the connections, which takes ways of its own.
        monkeypatch.setattr(aiosqlite.Connection, "_execute", going)
    assert len(ways) == 4 * 3
    await database.close()


async def test_a_commit_that_fails_leaves_nothing_open_for_the_next_transaction(
    tmp_path: Path,
) -> None:
    database = Database(await new_sqlite(tmp_path), durable=False)
    late = "CREATE TABLE late (id TEXT REFERENCES meta (key) DEFERRABLE INITIALLY DEFERRED)"
    async with database.write() as tx:
        await tx.run(text(late))
    with pytest.raises(IntegrityError):
        async with database.write() as tx:
            await tx.run(text("INSERT INTO late VALUES ('nobody')"))
    async with database.write() as tx:
        assert await tx.all(text("SELECT * FROM late")) == []
    await database.close()


async def test_a_statement_is_compiled_once_for_all_databases_of_a_kind(tmp_path: Path) -> None:
    statement = select(meta.c.value.label("once"))
    seen = []
    for name in "ab":
        (tmp_path / name).mkdir()
        database = Database(await new_sqlite(tmp_path / name), durable=False)
        for transaction in (database.write, database.read):
            async with transaction() as tx:
                result = await tx.run(statement)
                assert result.context is not None
                seen.append(result.context.cache_hit)
        await database.close()
    assert seen == [CacheStats.CACHE_MISS, *[CacheStats.CACHE_HIT] * 3]


async def test_concurrent_writers_all_get_their_turn(db: Database) -> None:
    async def add(i: int) -> None:
        async with db.write() as tx:
            await tx.run(insert(meta).values(key=f"k{i}", value=str(i)))

    await asyncio.gather(*(add(i) for i in range(20)))
    async with db.read() as tx:
        rows = await tx.all(select(meta).where(meta.c.key.like("k%")))
    assert len(rows) == 20


async def test_database_time_is_the_databases_own(url: str) -> None:
    database = Database(url)
    try:
        first = await database.now()
        second = await database.now()
    finally:
        await database.close()
    assert second >= first > 1_600_000_000


async def test_an_upsert_is_spelled_alike_on_both(db: Database) -> None:
    async with db.write() as tx:
        for value in ("1", "2"):
            statement = tx.insert(meta).values(key="a", value=value)
            await tx.run(
                statement.on_conflict_do_update(index_elements=["key"], set_={"value": value})
            )
        assert await tx.scalar(select(meta.c.value).where(meta.c.key == "a")) == "2"


@pytest.mark.parametrize("url", ["mysql://somewhere/x", "not a url", "sqlit:///x"])
def test_another_kind_of_database_is_refused(url: str) -> None:
    with pytest.raises(UsageError) as caught:
        Database(url)
    assert caught.value.code == "config.invalid"


def test_a_database_in_no_directory_is_refused(tmp_path: Path) -> None:
    with pytest.raises(Unavailable) as caught:
        Database(f"sqlite:///{tmp_path}/no/such/directory/grid.sqlite3")
    assert caught.value.code == "grid.database"


async def test_an_unreachable_server_is_named(tmp_path: Path) -> None:
    database = Database(f"postgresql://nobody@/grid?host={tmp_path}")
    with pytest.raises(Unavailable) as caught:
        await database.now()
    await database.close()
    assert caught.value.code == "grid.database"


def test_a_second_lock_on_one_file_is_refused_until_the_first_lets_go(tmp_path: Path) -> None:
    path = tmp_path / "grid.sqlite3"
    first = FileLock(path)
    with pytest.raises(Conflict) as caught:
        FileLock(path)
    assert caught.value.code == "grid.locked"
    first.release()
    FileLock(path).release()


async def test_a_connection_that_breaks_is_told_as_such_and_the_next_one_works(
    url: str,
) -> None:
    database = Database(url)

    async def lose_the_connection() -> None:
        async with database.write() as tx:
            if database.dialect == "sqlite":
                await tx.run(text("SELECT * FROM a_table_that_is_gone"))
            else:
                await tx.run(text("SELECT pg_terminate_backend(pg_backend_pid())"))

    try:
        with pytest.raises(Unavailable) as caught:
            await lose_the_connection()
        assert caught.value.code == "grid.database"
        assert await database.now() > 0
    finally:
        await database.close()


@pytest.mark.parametrize("when", ["in a statement", "between two", "before the commit"])
@pytest.mark.parametrize("mode", ["write", "read"])
async def test_a_server_that_ends_every_connection_is_away_and_nothing_else(
    postgres: str, when: str, mode: Literal["write", "read"]
) -> None:
    """What a restart of PostgreSQL does to whoever is in the middle of something."""
    database = Database(await new_postgres(postgres))
    waits = asyncio.Event()

    async def work() -> None:
        async with database.write() if mode == "write" else database.read() as tx:
            pids.append(int(await tx.scalar(text("SELECT pg_backend_pid()"))))
            waits.set()
            if when == "in a statement":
                await tx.run(text("SELECT pg_sleep(60)"))
            await ended.wait()
            if when == "between two":
                await tx.run(text("SELECT 1"))

    pids: list[int] = []
    ended = asyncio.Event()
    try:
        for _ in range(10):  # who notices first, the statement or the connection, is chance
            pids.clear()
            ended.clear()
            waits.clear()
            working = asyncio.create_task(work())
            await waits.wait()
            async with database.write() as tx:
                await tx.run(text("SELECT pg_terminate_backend(:pid)"), {"pid": pids[0]})
            ended.set()
            await asyncio.gather(working, return_exceptions=True)
            # Whoever only read, and has all, may not have noticed.
            unnoticed = mode == "read" and when == "before the commit"
            problem = working.exception()
            assert _is_away(problem) or (unnoticed and problem is None), repr(problem)
    finally:
        await database.close()


@pytest.mark.parametrize(
    "code", ["08006", "25006", "40001", "40P01", "53100", "53300", "55P03", "57P01", "58030"]
)
async def test_trouble_of_the_server_that_passes_is_told_as_such(postgres: str, code: str) -> None:
    database = Database(await new_postgres(postgres))

    async def run_into_it() -> None:
        async with database.write() as tx:
            await tx.run(text(f"DO $$ BEGIN RAISE EXCEPTION USING ERRCODE = '{code}'; END $$"))

    try:
        with pytest.raises(Unavailable) as caught:
            await run_into_it()
        assert _is_away(caught.value)
        assert await database.now() > 0
    finally:
        await database.close()


def _is_away(problem: BaseException | None) -> bool:
    return isinstance(problem, Unavailable) and problem.code == "grid.database"


async def test_a_caller_who_is_cancelled_leaves_the_writer_whole(db: Database) -> None:
    begun = asyncio.Event()

    async def write_slowly() -> None:
        async with db.write() as tx:
            await tx.run(insert(meta).values(key="a", value="1"))
            begun.set()
            await asyncio.Event().wait()

    writing = asyncio.create_task(write_slowly())
    await begun.wait()
    writing.cancel()
    with pytest.raises(asyncio.CancelledError):
        await writing
    async with db.write() as tx:
        assert await tx.first(select(meta).where(meta.c.key == "a")) is None


async def test_a_statement_is_finished_before_its_caller_is_cancelled(db: Database) -> None:
    done: list[int] = []

    async def work() -> None:
        await asyncio.sleep(0)
        done.append(1)

    for cancels in (1, 2):
        task = asyncio.create_task(whole(work()))
        await asyncio.sleep(0)
        for _ in range(cancels):
            task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        assert len(done) == cancels


async def test_a_step_of_the_hosts_clock_moves_nothing_that_is_stored(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    database = Database(await new_sqlite(tmp_path))
    before = await database.now()
    real = time.time
    monkeypatch.setattr(time, "time", lambda: real() - 86400.0)
    after = await database.now()
    await database.close()
    assert before <= after < before + 3600.0


async def test_a_clock_that_was_set_back_between_two_starts_does_not_take_time_back(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    url = await new_sqlite(tmp_path)
    database = Database(url)
    await migrate(database)
    async with database.write() as tx:
        await outbox.append(tx, [outbox.Change("job.submitted")])
        stored = tx.now
    await database.close()
    real = time.time
    monkeypatch.setattr(time, "time", lambda: real() - 86400.0)
    again = Database(url)
    await migrate(again)
    now = await again.now()
    await again.close()
    assert now >= stored


def test_anchored_time_reads_the_hosts_clock_once() -> None:
    wall, monotonic = [1000.0], [5.0]
    anchored = AnchoredTime(lambda: wall[0], lambda: monotonic[0])
    wall[0] = 0.0
    monotonic[0] += 2.0
    assert anchored() == 1002.0
    anchored.not_before(900.0)
    assert anchored() == 1002.0
    anchored.not_before(2000.0)
    monotonic[0] += 1.0
    assert anchored() == 2001.0


async def test_every_commit_is_a_point_named_after_who_opened_the_transaction(
    db: Database,
) -> None:
    async def change(value: str) -> None:
        async with db.write() as tx:
            await tx.run(insert(meta).values(key="a", value=value))

    reached: list[str] = []
    points.install(reached.append)
    try:
        await change("1")
        with pytest.raises(IntegrityError):
            await change("2")
        async with db.read() as tx:
            await tx.first(select(meta))
    finally:
        points.install(None)
    name = "commit.tests.store.test_engine."
    name += "test_every_commit_is_a_point_named_after_who_opened_the_transaction.<locals>.change"
    assert reached == [f"{name}.before", f"{name}.after"], "what is undone or only read is none"
