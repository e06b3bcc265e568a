"""Versions that are made again: whose turn it is, how much is lent, and for how long."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st

from distribai.core.spec import BlobRef, JobSpec
from distribai.errors import NotFound, TooMany
from distribai.orchestrator import rebuilding
from distribai.orchestrator.context import Grid
from distribai.orchestrator.fleet import loans
from distribai.orchestrator.fleet.loans import Loan, Loans
from distribai.orchestrator.jobs import queries
from distribai.orchestrator.retention import CLEAN_S, let_go
from distribai.store.blobs import no_blob
from distribai.store.engine import AnyRow
from tests.orchestrator.harness import World, breathe
from tests.orchestrator.test_retention import age
from tests.orchestrator.test_snapshots import later, present, quiet


async def thinned(world: World) -> str:
    """A job whose versions 1 to 5 keep no snapshot."""
    await world.node("a")
    job = await world.job(await quiet(world))
    assert await world.run_job(job) == "completed"
    await later(world)
    return job


class Counted:
    """What is made again from now on; the first ``failing`` times a file is gone."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, failing: int = 0) -> None:
        self.versions: list[int] = []
        self._failing, self._real = failing, rebuilding._rebuild
        monkeypatch.setattr(rebuilding, "_rebuild", self._rebuild)

    async def _rebuild(self, grid: Grid, spec: JobSpec, rows: Sequence[AnyRow]) -> BlobRef:
        self.versions.append(rows[0].version)
        if len(self.versions) <= self._failing:
            raise no_blob("0" * 64)
        return await self._real(grid, spec, rows)


async def waits(world: World, account: str) -> None:
    """Until the account waits for its turn, which another one has."""
    async with asyncio.timeout(180):
        while account not in world.grid.stock.loans._asking:
            await breathe()


async def test_who_waits_for_a_turn_while_the_snapshot_before_goes_gets_the_version(
    world: World,
) -> None:
    node = await world.node("a")
    job = await world.job(await quiet(world))
    while (await queries.show_job(world.grid, job)).version < 5:
        await world.settle()
        world.time.now += 1
        await node.work()
    await world.settle()
    await let_go(world.grid)
    assert 3 in await present(world, job), "the last one before version 4"
    async with world.grid.stock.loans.making:
        task = asyncio.create_task(queries.weights_blob(world.grid, job, 4, "ann"))
        await waits(world, "ann")
        assert await world.run_job(job) == "completed"
        await later(world)
        assert 3 not in await present(world, job)
    number, ref = await task
    assert number == 4
    assert await world.grid.blobs.is_whole(ref)


async def test_a_file_that_went_while_it_was_read_is_looked_for_once_more(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    job = await thinned(world)
    counted = Counted(monkeypatch, failing=1)
    await queries.weights_blob(world.grid, job, 4)
    assert counted.versions == [4, 4]
    counted = Counted(monkeypatch, failing=2)
    with pytest.raises(NotFound):
        await queries.weights_blob(world.grid, job, 5)
    assert counted.versions == [5, 5]


async def test_an_account_waits_for_one_version_at_a_time(world: World) -> None:
    job = await thinned(world)
    async with world.grid.stock.loans.making:
        first = asyncio.create_task(queries.weights_blob(world.grid, job, 4, "ann"))
        await waits(world, "ann")
        for number in (4, 5):
            with pytest.raises(TooMany) as caught:
                await queries.weights_blob(world.grid, job, number, "ann")
            assert caught.value.code == "limit.rate"
            assert caught.value.retry_after == loans.TURN_S
        other = asyncio.create_task(queries.weights_blob(world.grid, job, 5, "bob"))
        await waits(world, "bob")
        assert (await queries.weights_blob(world.grid, job, 7, "ann"))[0] == 7, (
            "a kept one is there"
        )
    assert ((await first)[0], (await other)[0]) == (4, 5)
    assert (await queries.weights_blob(world.grid, job, 5, "ann"))[0] == 5, (
        "nor is one that is lent"
    )


async def test_what_is_lent_is_bounded_and_there_is_room_when_something_has_gone(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    job = await thinned(world)
    _, ref = await queries.weights_blob(world.grid, job, 1, "ann")
    monkeypatch.setattr(loans, "LENT_BYTES", 4 * ref.size)
    await queries.weights_blob(world.grid, job, 2, "ann")
    with pytest.raises(TooMany, match="no room") as caught:
        await queries.weights_blob(world.grid, job, 3, "ann")
    await queries.weights_blob(world.grid, job, 4, "bob")
    await queries.weights_blob(world.grid, job, 1, "ann")
    assert caught.value.retry_after == world.grid.settings.let_go_s + CLEAN_S
    await later(world)
    assert not await world.grid.blobs.exists(ref.sha256)
    await queries.weights_blob(world.grid, job, 3, "ann")


@given(st.lists(st.tuples(st.integers(0, 5), st.sampled_from("abc"), st.integers(1, 12 << 30))))
def test_no_more_is_ever_lent_than_the_bound_whoever_asks_for_what(
    asked: list[tuple[int, str, int]],
) -> None:
    lent = Loans()
    for at, (number, account, size) in enumerate(asked):
        key = ("job", number)
        try:
            lent.check_room(key, account, size, float(at))
        except TooMany:
            continue
        lent.files[key] = Loan(BlobRef("0" * 64, size), account, at + 4.0)
        assert sum(loan.ref.size for loan in lent.files.values()) <= loans.LENT_BYTES


async def test_a_version_is_lent_by_the_date_of_its_row_whatever_the_store_says(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    job = await thinned(world)
    counted = Counted(monkeypatch)
    _, ref = await queries.weights_blob(world.grid, job, 5)
    age(world, ref)
    await queries.weights_blob(world.grid, job, 5)
    assert counted.versions == [5]
    world.time.now += world.grid.settings.let_go_s / 2 + 1
    await queries.weights_blob(world.grid, job, 5)
    assert counted.versions == [5, 5], "it would go while it is sent"
