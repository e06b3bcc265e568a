"""The invariants that state machines are held to can fail: each kind of damage is seen."""

from __future__ import annotations

from sqlalchemy import Executable, delete, insert, update

from distribai.store.tables import jobs, outbox, rounds, sessions, submissions, tasks, versions
from tests.orchestrator.harness import World
from tests.orchestrator.invariants import check_all, read_all

TRAINED = tasks.c.phase == "train"

DAMAGE: dict[str, tuple[Executable, ...]] = {
    "a task's state was written past its table": (
        update(tasks).where(TRAINED).values(state="rejected"),
    ),
    "an ended task is leased": (
        update(tasks)
        .where(TRAINED, tasks.c.slot == 0, tasks.c.round == 1)
        .values(state="leased", lease_until=1.0, deadline_at=2.0),
    ),
    "an event is missing": (delete(outbox).where(outbox.c.kind == "task.leased"),),
    "a submission is lost": (delete(submissions).where(submissions.c.phase == "train"),),
    "a submission counts under another attempt": (update(submissions).values(attempt=7),),
    "positions are lost": (update(jobs).values(pool_cursor=jobs.c.pool_cursor + 1),),
    "positions are issued twice": (update(jobs).values(pool_returned=[[0, 1]]),),
    "a version is missing": (delete(versions).where(versions.c.version == 2),),
    "a version does not follow": (
        update(versions).where(versions.c.version == 1).values(weights_hash="0" * 64),
    ),
    "momentum was changed": (
        update(versions).where(versions.c.version == 1).values(outer_hash="0" * 64),
    ),
    "a merged round is open": (update(rounds).values(state="open"),),
    "a completed job runs": (update(jobs).values(state="running"),),
    "tokens were counted twice": (update(jobs).values(tokens=2 * jobs.c.tokens),),
    "a session too many": (
        update(sessions).values(ended_at=None),
        insert(sessions).from_select(
            ["id", "node_id", "token_hash", "holder", "created_at"],
            sessions.select().with_only_columns(
                sessions.c.id + "x",
                sessions.c.node_id,
                sessions.c.token_hash + "x",
                sessions.c.holder,
                sessions.c.created_at,
            ),
        ),
    ),
}


class _Undo(Exception):
    """Undoes a transaction."""


async def seen(world: World, statements: tuple[Executable, ...]) -> bool:
    """Whether an invariant notices what the statements do; nothing of it stays."""
    noticed = False
    try:
        async with world.grid.db.write() as tx:
            for statement in statements:
                await tx.run(statement)
            rows = await read_all(tx)
            try:
                check_all(rows)
            except (AssertionError, ValueError, KeyError):
                noticed = True
            raise _Undo
    except _Undo:
        return noticed


async def test_every_kind_of_damage_is_seen(world: World) -> None:
    for name in "ab":
        await world.node(name)
    assert await world.run_job(await world.job()) == "completed"
    async with world.grid.db.read() as tx:
        check_all(await read_all(tx))
    unseen = [what for what, statements in DAMAGE.items() if not await seen(world, statements)]
    assert not unseen
