"""What replicas tell each other: which rows, how much at once, and what is done without."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from distribai.orchestrator.hints import MAX_WAITING, Hints
from distribai.orchestrator.news import Box, Changes, Told
from distribai.store import outbox
from distribai.store.outbox import Change, Cursor
from tests.orchestrator.harness import World
from tests.store.databases import new_postgres


def everything(_row: Told) -> bool:
    return True


def leading(world: World, *, shares: bool = False) -> Hints:
    """The half of a replica that leads and is heard."""
    hints = Hints(world.grid, leads=lambda: True, shares=lambda: shares)
    hints.connected = True
    return hints


@pytest.fixture
async def two(tmp_path: Path, postgres: str) -> AsyncIterator[tuple[World, World]]:
    """Two replicas of one grid."""
    url = await new_postgres(postgres)
    first = await World(tmp_path / "first", url).open()
    second = await World(tmp_path / "second", url, first.time, seed=1).open()
    yield first, second
    for world in (first, second):
        await world.close()


async def box_of(world: World) -> Box:
    """An empty box."""
    box = world.grid.news.box(everything)
    await world.grid.news.catch_up(world.grid)
    box.take()
    return box


def all_messages(hints: Hints) -> list[str]:
    found = []
    while message := hints.next_message():
        found.append(message)
    return found


def note_many(hints: Hints, count: int) -> None:
    for number in range(count):
        key: Cursor = (1, 10**15, 10**9 + number)
        hints.note(key, Told("task.accepted", "j" * 40, "t" * 40, f"node{number}", "generate"))


async def test_what_the_leader_has_read_is_told_to_the_others_once(
    two: tuple[World, World],
) -> None:
    first, second = two
    hints, other = leading(first), leading(second)
    theirs, ours = await box_of(second), await box_of(first)
    async with first.grid.db.write() as tx:
        told = [Change("task.leased", "j", "t", "n1", {"phase": "generate"})]
        await outbox.append(tx, [*told, Change("job.queued", "j2")])
    await first.grid.news.catch_up(first.grid)
    (message,) = all_messages(hints)
    hints.heard(message)
    assert ours.take() == Changes(some=True, nodes={"n1"}, jobs={"j2"}), "and not by itself again"
    other.heard(message)
    assert theirs.take() == Changes(some=True, nodes={"n1"}, jobs={"j2"})
    await second.grid.news.catch_up(second.grid)
    assert theirs.take() == Changes(some=True, nodes={"n1"}, jobs={"j2"}), "what is read counts"
    other.heard(message)
    await second.grid.news.catch_up(second.grid)
    assert not theirs.take(), "then neither a second message nor the outbox tells it again"


async def test_a_row_that_was_not_relayed_is_told_when_it_is_read(
    two: tuple[World, World],
) -> None:
    first, second = two
    theirs = await box_of(second)
    async with first.grid.db.write() as tx:
        await outbox.append(tx, [Change("node.online", node_id=n) for n in ("n1", "n2")])
    hints = leading(first)
    async with first.grid.db.glance() as tx:
        row = (await outbox.visible(tx, outbox.BEGINNING, 10))[1]
    hints.note((row.epoch, row.xid, row.id), Told(row.kind, node_id=row.node_id))
    leading(second).heard(hints.next_message())
    assert theirs.take().nodes == {"n2"}
    await second.grid.news.catch_up(second.grid)
    assert theirs.take().nodes == {"n1", "n2"}


async def test_a_message_of_a_stranger_keeps_no_news_back_and_is_not_remembered(
    two: tuple[World, World],
) -> None:
    """Every role that may connect to the database can send one, with keys of rows to come."""
    _, second = two
    news, other = second.grid.news, leading(second)
    theirs = await box_of(second)
    assert news._cursor is not None
    epoch, xid, row_id = news._cursor
    forged = [
        [epoch + later, xid + i, row_id + j, "job.queued", "j"]
        for later in (0, 2**40)
        for i in range(9)
        for j in range(1, 9)
    ]
    other.heard(f"stranger\n{json.dumps(forged)}")
    theirs.take()
    assert not news._told
    async with second.grid.db.write() as tx:
        await outbox.append(tx, [Change("job.queued", "j")])
    await news.catch_up(second.grid)
    assert theirs.take().jobs == {"j"}, "told early, when there was nothing to see, and now"


async def test_messages_are_as_long_as_postgresql_takes_and_tell_everything(world: World) -> None:
    hints, box = leading(world), await box_of(world)
    note_many(hints, MAX_WAITING)
    messages = all_messages(hints)
    assert len(messages) > 1
    assert all(len(m.encode()) < 8000 for m in messages)
    world.grid.holder = "another"
    for message in messages:
        hints.heard(message)
    assert len(box.take().nodes) == MAX_WAITING


async def test_more_than_messages_hold_lets_the_others_read_at_once(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    hints = leading(world)
    note_many(hints, MAX_WAITING + 1)
    (message,) = all_messages(hints)
    world.grid.holder = "another"
    monkeypatch.setattr("distribai.orchestrator.hints.WALK_S", 3600.0)
    resting = asyncio.create_task(hints.pause(0.0))
    hints.heard(message)
    await asyncio.wait_for(resting, 180)


async def test_reports_and_queued_tasks_are_the_duties_own_and_only_hinted_at(
    world: World,
) -> None:
    alone, sharing = leading(world), leading(world, shares=True)
    for hints in (alone, sharing):
        hints.note((1, 1, 1), Told("task.queued", "j", "t"))
        hints.note((1, 1, 2), Told("task.submitted", "j", "t", "n"))
    assert all_messages(alone) == []
    assert all_messages(sharing) == [world.grid.holder], "another replica judges"


@pytest.mark.parametrize(
    "message",
    [
        "another",
        "another\nwhat?",
        "another\n[[1]]",
        "another\n5",
        'another\n[["a", 1, 2, "k"]]',
        'another\n[[1e999, 1, 1, "k"]]',
        'another\n[[NaN, 1, 1, "k"]]',
        'another\n[[9e9, 1, 1, "k"]]',
        f'another\n[[{"9" * 5000}, 1, 1, "k"]]',
        "another\n[[99, 1, 1]]",
        'another\n[[99, 1, 1, "k", 5]]',
        'another\n[[99, 1, 1, "k", "j", "t", "n", "p", "more"]]',
        'another\n[[99, 1, 1, "k", "\\ud800"]]',
        'another\n[[99, 1, 1, "k", "j", "t", "\\u0000"]]',
        "another\n" + "[" * 7000,
    ],
)
async def test_what_cannot_be_read_is_a_hint(world: World, message: str) -> None:
    """An older replica tells its name alone, a newer one may tell what is not known yet."""
    hints, box = leading(world), await box_of(world)
    before = world.grid.wake.count
    hints.heard(message)
    assert world.grid.wake.count == before + 1
    assert not box.take()


async def test_relays_travel_through_postgresql(two: tuple[World, World]) -> None:
    first, second = two
    leader = Hints(first.grid, leads=lambda: True, shares=lambda: False)
    other = Hints(second.grid, leads=lambda: False, shares=lambda: True)
    theirs = await box_of(second)
    running = [asyncio.create_task(h.run()) for h in (leader, other)]
    async with asyncio.timeout(180):
        while not (leader.connected and other.connected):  # noqa: ASYNC110  # two processes' halves
            await asyncio.sleep(0.01)
        leader.note((1, 10**9, 1), Told("task.leased", "j", "t", "n1", "train"))
        await theirs.wait(180)
    assert theirs.take().nodes == {"n1"}
    for hints in (leader, other):
        hints.stop()
        hints._grid.wake.set()
    await asyncio.wait_for(asyncio.gather(*running), 180)
