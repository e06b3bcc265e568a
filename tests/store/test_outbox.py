from __future__ import annotations

import pytest
from sqlalchemy import select, update

from distribai.errors import UsageError
from distribai.store import outbox
from distribai.store.engine import Database
from distribai.store.tables import meta
from distribai.store.tables import outbox as table


async def _add(db: Database, *kinds: str, job: str = "") -> None:
    async with db.write() as tx:
        for kind in kinds:
            await outbox.append(tx, [outbox.Change(kind, job, data={"n": 1})])


async def _kinds(db: Database, after: str = "", job: str | None = None) -> list[str]:
    async with db.read() as tx:
        rows = await outbox.read(tx, outbox.parse_cursor(after), 100, job)
    return [row.kind for row in rows]


async def test_events_come_in_order_and_behind_the_cursor(db: Database) -> None:
    await _add(db, "a", "b")
    await _add(db, "c")
    async with db.read() as tx:
        rows = await outbox.read(tx, outbox.BEGINNING, 2)
    assert [row.kind for row in rows] == ["a", "b"]
    assert await _kinds(db, outbox.format_cursor(rows[-1])) == ["c"]


async def test_events_of_one_job_are_apart(db: Database) -> None:
    await _add(db, "a", job="job_1")
    await _add(db, "b", job="job_2")
    assert await _kinds(db, job="job_2") == ["b"]


async def test_an_undone_change_leaves_no_event(db: Database) -> None:
    async def fail() -> None:
        async with db.write() as tx:
            await outbox.append(tx, [outbox.Change("a")])
            raise RuntimeError("half-way")

    with pytest.raises(RuntimeError, match="half-way"):
        await fail()
    assert await _kinds(db) == []


async def test_a_late_commit_is_never_skipped(db: Database) -> None:
    if db.dialect == "sqlite":
        pytest.skip("SQLite has one writer: there is no late commit")
    async with db.write() as slow:
        await outbox.append(slow, [outbox.Change("slow")])
        await _add(db, "fast")
        # "fast" has the higher id and is committed, but "slow" may still come before it.
        assert await _kinds(db) == []
    assert await _kinds(db) == ["slow", "fast"]


async def test_a_restored_dump_opens_a_new_epoch(db: Database) -> None:
    await _add(db, "old")
    async with db.write() as tx:
        # As after a restore into a cluster whose transaction ids are still small.
        await tx.run(update(table).values(xid=2**60))
        await outbox.start(tx)
        epoch = await tx.scalar(select(meta.c.value).where(meta.c.key == "outbox_epoch"))
    assert epoch == "2"
    await _add(db, "new")
    assert await _kinds(db) == ["old", "new"]


async def test_a_start_without_a_restore_keeps_the_epoch(db: Database) -> None:
    await _add(db, "old")
    async with db.write() as tx:
        await outbox.start(tx)
        assert await tx.scalar(select(meta.c.value).where(meta.c.key == "outbox_epoch")) == "1"


@pytest.mark.parametrize("text", ["1", "1.2", "1.2.x", "-1.2.3", "1.2.3.4", "1.2." + "9" * 30])
def test_a_cursor_that_we_did_not_write_is_refused(text: str) -> None:
    with pytest.raises(UsageError):
        outbox.parse_cursor(text)
