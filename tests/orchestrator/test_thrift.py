"""What the hot path reads does not grow with the grid: counted in statements and rows, not time."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import pytest
from sqlalchemy import Executable, event

from distribai.orchestrator.duties import ASK_S, PROMPT
from distribai.orchestrator.jobs import queries
from distribai.orchestrator.jobs.generation import request_generation
from distribai.orchestrator.rounds.joining import join_rounds
from distribai.orchestrator.rounds.opening import open_rounds
from distribai.orchestrator.rounds.ready import Ready
from distribai.store.engine import AnyRow, Database, Tx
from distribai.store.leases import drop_duties
from tests.orchestrator.harness import World, breathe


@dataclass
class Spent:
    """Statements that were executed, and rows that came of them."""

    statements: int = 0
    rows: int = 0


@contextmanager
def counted(db: Database) -> Iterator[Spent]:
    """What the block asks of a database."""
    spent, run = Spent(), Tx.all

    async def everything(tx: Tx, statement: Executable) -> list[AnyRow]:
        found = list(await run(tx, statement))
        spent.rows += len(found)
        return found

    def on_execute(*_: object) -> None:
        spent.statements += 1

    engines = {e.sync_engine for e in (db._writer, db._reader)}
    for engine in engines:
        event.listen(engine, "before_cursor_execute", on_execute)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Tx, "all", everything)
        yield spent
    for engine in engines:
        event.remove(engine, "before_cursor_execute", on_execute)


async def a_sample(world: World, job: str) -> None:
    """Ask for a sample, have it assigned, handed in and judged."""
    await request_generation(world.grid, job, None, "x", 1, 1.0, 0)
    for _ in range(3):
        await world.duties.news()
        await world.duties.assign()
        await breathe()
        for node in world.nodes:
            await node.work("generate")
        await world.duties.verify()


async def test_an_assignment_asks_the_same_of_the_database_however_many_nodes_there_are(
    any_world: World,
) -> None:
    world, costs = any_world, []
    job = await world.job(workers_min=1000, workers_max=1000)
    for nodes in (2, 20):
        while len(world.nodes) < nodes:
            await world.node(f"n{len(world.nodes)}")
        await world.settle()
        await a_sample(world, job)
        with counted(world.grid.db) as spent:
            await a_sample(world, job)
        costs.append(spent)
    assert costs[0] == costs[1]
    assert costs[0].rows


async def test_news_of_a_round_whose_devices_are_all_busy_read_nothing_of_it(
    world: World,
) -> None:
    for i in range(3):
        await world.node(f"n{i}")
    await world.job()
    await world.settle()
    ready = await read_anew(world)
    assert not len(ready.free)
    with counted(world.grid.db) as spent:
        assert not await join_rounds(world.grid, ready)
    assert spent == Spent()


async def test_jobs_whose_rounds_are_under_way_cost_the_opening_nothing(world: World) -> None:
    costs: list[int] = []
    for more in (1, 3):
        for i in range(more):
            await world.node(f"n{more}{i}")
            await world.job(workers_max=1)
            await world.settle()
        with counted(world.grid.db) as spent:
            assert not await open_rounds(world.grid, await read_anew(world))
        costs.append(spent.statements)
    assert costs[0] == costs[1]


async def test_a_job_that_waits_for_more_nodes_has_none_of_them_read(world: World) -> None:
    costs = []
    job = await world.job(workers_min=8, workers_max=8)
    for nodes in (2, 7):
        while len(world.nodes) < nodes:
            await world.node(f"n{len(world.nodes)}")
        ready = await read_anew(world)
        with counted(world.grid.db) as spent:
            assert not await open_rounds(world.grid, ready)
        costs.append(spent)
    assert costs[0] == costs[1]
    await world.node("the eighth")
    await world.settle()
    assert (await queries.show_job(world.grid, job)).state == "running"


async def read_anew(world: World) -> Ready:
    """What the scheduler keeps, as it would be after a start."""
    ready = Ready(world.grid)
    async with world.grid.db.read() as tx:
        await ready.read_all(tx)
    return ready


async def test_one_statement_a_second_tells_of_all_duties_that_others_hold(
    replicas: tuple[World, World],
) -> None:
    first, second = replicas
    leases = [second.duties._leases[name] for name in PROMPT]
    with counted(second.grid.db) as spent:
        for _ in range(5):
            assert not any([await lease.held() for lease in leases])
    assert spent.statements == 1
    first.time.now += ASK_S
    with counted(second.grid.db) as spent:
        assert not any([await lease.held() for lease in leases])
    assert spent.statements == 1

    async with first.grid.db.write() as tx:
        await drop_duties(tx, first.grid.holder)
    first.time.now += ASK_S
    assert all([await lease.held() for lease in leases]), "and they are taken over as soon as ever"
