from __future__ import annotations

import asyncio
from typing import Any

import pytest
from sqlalchemy import insert, update
from sqlalchemy.exc import IntegrityError

from distribai.core.states import TaskState
from distribai.store import leases
from distribai.store.engine import Database
from distribai.store.statements import jobs as job_rows
from distribai.store.statements import work
from distribai.store.tables import datasets, jobs, nodes, tasks
from tests.store.conftest import Clock


@pytest.fixture
async def work_db(db: Database) -> Database:
    """A job with three queued tasks, and a node."""
    async with db.write() as tx:
        await tx.run(
            insert(datasets).values(
                key="d", manifest_sha="", manifest_size=0, figures={}, created_at=0.0
            )
        )
        await tx.run(
            insert(jobs).values(
                id="j",
                name="j",
                state="running",
                spec={},
                priority="P2",
                created_at=0.0,
                created_by="me",
                version=0,
                rounds_total=1,
                parameters=1,
                manifest_hash="",
                dataset_key="d",
                plan={},
                pool_returned=[],
            )
        )
        await tx.run(
            insert(nodes).values(
                id="n",
                public_key=b"k",
                liveness="online",
                standing="trusted",
                intent="contribute",
                devices=[],
                joined_at=0.0,
                last_heard_at=0.0,
            )
        )
        await work.add_tasks(tx, "j", [row_of(f"t{i}") for i in range(3)])
    return db


def row_of(task_id: str) -> dict[str, Any]:
    return {"id": task_id, "round": 0, "take": 0, "phase": "train", "samples": []}


async def lease(db: Database, task: str, device: int = 0, **times: float) -> Any:
    wanted = leases.Wanted(task, "n", device, times.get("deadline", 3600.0))
    async with db.write() as tx:
        rows = await leases.lease_tasks(tx, [wanted], times.get("lease", 50.0))
    return rows[0] if rows else None


async def test_a_task_is_leased_once_under_a_growing_attempt(work_db: Database) -> None:
    first = await lease(work_db, "t0")
    assert (first.attempt, first.state) == (1, "leased")
    assert await lease(work_db, "t0", device=1) is None
    async with work_db.write() as tx:
        assert await leases.leave_state(
            tx, "t0", TaskState.LEASED, TaskState.QUEUED, attempt=1, node_id="n"
        )
    again = await lease(work_db, "t0", device=1)
    assert again.attempt == 2


async def test_a_device_holds_one_task(work_db: Database) -> None:
    assert await lease(work_db, "t0") is not None
    assert await lease(work_db, "t1") is None
    assert await lease(work_db, "t1", device=1) is not None


async def test_the_schema_itself_keeps_a_device_to_one_task(work_db: Database) -> None:
    async def lease_by_force() -> None:
        async with work_db.write() as tx:
            await tx.run(update(tasks).values(state="leased", node_id="n", device=0))

    with pytest.raises(IntegrityError):
        await lease_by_force()


async def test_of_two_schedulers_one_gets_the_task(work_db: Database) -> None:
    got = await asyncio.gather(*(lease(work_db, "t0", device=i) for i in range(4)))
    assert sum(row is not None for row in got) == 1


async def test_every_guard_of_a_state_change_counts(work_db: Database) -> None:
    await lease(work_db, "t0")
    async with work_db.write() as tx:
        for guard in ({"attempt": 2, "node_id": "n"}, {"attempt": 1, "node_id": "m"}):
            assert (
                await leases.leave_state(
                    tx,
                    "t0",
                    TaskState.LEASED,
                    TaskState.SUBMITTED,
                    **guard,  # type: ignore[arg-type]
                )
                is None
            )
        assert (
            await leases.leave_state(tx, "t0", TaskState.QUEUED, TaskState.CANCELLED, attempt=1)
            is None
        )


async def test_a_lease_lives_by_heartbeats_and_never_beyond_its_deadline(
    work_db: Database, clock: Clock
) -> None:
    await lease(work_db, "t0", lease=50.0, deadline=100.0)

    async def extend() -> set[tuple[str, int]]:
        async with work_db.write() as tx:
            return await leases.extend_leases(tx, [("n", "t0", 1), ("n", "t1", 1)], 50.0)

    async def expired() -> list[str]:
        async with work_db.read() as tx:
            return [row.id for row in await leases.expired_tasks(tx)]

    clock.now += 49
    assert await expired() == []
    assert await extend() == {("t0", 1)}
    clock.now += 49
    assert await expired() == []
    await extend()
    clock.now += 2
    assert await expired() == ["t0"], "the hard deadline has come"
    async with work_db.write() as tx:
        await leases.grant_grace(tx, 60.0, 100.0)
    assert await expired() == []
    clock.now += 59
    assert await expired() == [], "the time before the start does not count"
    clock.now += 1
    assert await expired() == ["t0"]
    async with work_db.write() as tx:
        assert await leases.extend_leases(tx, [("other", "t0", 1)], 50.0) == set()
        assert await leases.extend_leases(tx, [("n", "t0", 2)], 50.0) == set()


async def test_a_duty_is_held_by_one_until_its_lease_ends(db: Database, clock: Clock) -> None:
    async def take(holder: str) -> int | None:
        async with db.write() as tx:
            return await leases.take_duty(tx, "merge", holder, 30.0)

    assert await take("a") == 1
    assert await take("b") is None
    clock.now += 20
    assert await take("a") == 1
    clock.now += 20
    assert await take("b") is None
    clock.now += 20
    assert await take("b") == 2
    assert await take("a") is None
    async with db.write() as tx:
        await leases.drop_duties(tx, "b")
    assert await take("a") == 3


async def test_progress_is_only_taken_from_who_holds_the_lease(work_db: Database) -> None:
    await lease(work_db, "t0")
    async with work_db.write() as tx:
        held = {"task": "t0", "node": "n"}
        await leases.write_progress(tx, [{**held, "under": 2, "report": {"step": 9}}])
        await leases.write_progress(tx, [{**held, "under": 1, "report": {"step": 3}}])
        row = await work.get_task(tx, "t0")
    assert row is not None
    assert row.progress == {"step": 3}


async def test_a_jobs_tasks_are_numbered_one_after_the_other(work_db: Database) -> None:
    async def add(i: int) -> None:
        async with work_db.write() as tx:
            await job_rows.lock(tx, "j")
            await work.add_tasks(tx, "j", [row_of(f"u{i}")])

    await asyncio.gather(*(add(i) for i in range(5)))
    async with work_db.read() as tx:
        rows = await work.tasks_page(tx, "j", 100, 0)
    assert [row.seq for row in rows] == list(range(1, 9))


async def test_of_many_leases_at_once_those_are_made_that_can_be(work_db: Database) -> None:
    assert await lease(work_db, "t0", device=0) is not None
    wanted = [
        leases.Wanted("t0", "n", 3, 3600.0),  # no longer queued
        leases.Wanted("t1", "n", 0, 3600.0),  # its device holds another
        leases.Wanted("t2", "n", 1, 20.0),
        leases.Wanted("t9", "n", 2, 3600.0),  # there is no such task
    ]
    async with work_db.write() as tx:
        (row,) = await leases.lease_tasks(tx, wanted, 50.0)
    assert (row.id, row.node_id, row.device, row.attempt) == ("t2", "n", 1, 1)
    assert row.lease_until == row.deadline_at == row.leased_at + 20.0
    async with work_db.write() as tx:
        assert await leases.lease_tasks(tx, [], 50.0) == []
