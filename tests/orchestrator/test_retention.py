"""What nothing names goes away after a while; whatever a lineage or an open task needs stays."""

from __future__ import annotations

import os
from dataclasses import replace

import pytest

from distribai.core.people import HOME, OPERATOR
from distribai.core.spec import BlobRef
from distribai.orchestrator.jobs import commands
from distribai.orchestrator.retention import collect, find_orphans, is_settled
from distribai.store.blobs import BlobStore, blob_key
from distribai.store.statements import holdings
from distribai.testing.audit import audit
from tests.orchestrator.harness import World

OLD_S = 10 * 86400.0


def age(world: World, blob: BlobRef | None = None, seconds: float = OLD_S) -> None:
    """Make a blob, or every one, as old as that."""
    root = world.root / "blobs"
    paths = [root / blob_key(blob.sha256)] if blob else [p for p in root.rglob("*") if p.is_file()]
    for path in paths:
        stamp = path.stat().st_mtime - seconds
        os.utime(path, (stamp, stamp))


async def names(blobs: BlobStore) -> set[str]:
    return {b.ref.sha256 async for b in blobs.stored()}


async def test_a_lineage_can_be_replayed_after_everything_old_was_cleaned(
    any_world: World,
) -> None:
    world = any_world
    for name in ("a", "b"):
        await world.node(name)
    job = await world.job()
    assert await world.run_job(job) == "completed"
    before = await names(world.grid.blobs)
    orphan = await world.grid.blobs.put_bytes(b"nobody names this")
    age(world)
    found = await collect(world.grid)
    assert (found.blobs, found.bytes) == (1, orphan.size)
    assert await names(world.grid.blobs) == before
    if world.grid.db.dialect == "sqlite":
        checked = audit(world.root, job)
        assert checked.ok, checked.problems
        assert checked.rounds == 3


async def test_what_is_young_stays_whoever_names_it(world: World) -> None:
    orphan = await world.grid.blobs.put_bytes(b"its row may come yet")
    age(world, orphan, world.grid.settings.orphans_s - 600)
    assert (await collect(world.grid)).blobs == 0
    age(world, orphan, 1200)
    assert (await collect(world.grid)).blobs == 1


async def test_nothing_is_cleaned_where_the_operator_wants_none_of_it(world: World) -> None:
    await world.grid.blobs.put_bytes(b"nobody names this")
    age(world)
    world.grid.settings = replace(world.grid.settings, orphans_s=0.0)
    assert (await collect(world.grid)).blobs == 0
    assert await find_orphans(world.grid.settings) == [], "nor is it said that it would be"


async def test_a_report_that_waits_for_its_verdict_keeps_its_delta(world: World) -> None:
    node = await world.node("a")
    await world.job()
    await world.settle()
    await node.work("evaluate")
    before = await names(world.grid.blobs)
    outcome = await node.outcome(node.only_task())
    await node.report(outcome)
    await node.taken_in()
    age(world)
    assert outcome.delta is not None
    assert outcome.delta.sha256 not in before
    assert (await collect(world.grid)).blobs == 0
    assert await world.grid.blobs.exists(outcome.delta.sha256)


async def test_an_old_blob_that_nothing_names_is_sent_again_and_a_named_one_is_not(
    world: World,
) -> None:
    spec = await world.spec()
    unnamed = await world.grid.blobs.put_bytes(b"uploaded long ago, never used")
    await world.job(spec)
    age(world)
    (file,) = spec.data.files
    assert await is_settled(world.grid, await world.grid.blobs.stat(file.sha256))
    assert not await is_settled(world.grid, await world.grid.blobs.stat(unnamed.sha256))
    await world.grid.blobs.put_bytes(b"uploaded long ago, never used")
    assert await is_settled(world.grid, await world.grid.blobs.stat(unnamed.sha256))
    assert (await collect(world.grid)).blobs == 0


async def test_what_is_sent_again_while_orphans_are_deleted_stays(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    data = b"nobody names this yet"
    orphan = await world.grid.blobs.put_bytes(data)
    age(world)

    async def forget(*_: object) -> None:
        await world.grid.blobs.put_bytes(data)

    monkeypatch.setattr(holdings, "forget_uploads", forget)
    assert (await collect(world.grid)).blobs == 0
    assert await world.grid.blobs.exists(orphan.sha256)


async def test_the_operator_sees_what_the_next_look_would_delete(world: World) -> None:
    orphan = await world.grid.blobs.put_bytes(b"nobody names this")
    assert await find_orphans(world.grid.settings) == []
    age(world)
    (found,) = await find_orphans(world.grid.settings)
    assert found.ref == orphan
    assert await world.grid.blobs.exists(orphan.sha256)


async def test_the_duty_looks_every_quarter_of_an_hour(world: World) -> None:
    assert not await world.duties.clean()
    await world.grid.blobs.put_bytes(b"nobody names this")
    age(world)
    assert not await world.duties.clean()
    world.time.now += 901
    assert await world.duties.clean()


async def test_what_was_cleaned_away_fills_nobody_s_quota_any_more(any_world: World) -> None:
    ref = await any_world.grid.blobs.put_bytes(b"uploaded by a member, never used")
    async with any_world.grid.db.write() as tx:
        await holdings.add_upload(tx, OPERATOR, ref.sha256, ref.size)
        assert await holdings.stored_bytes(tx, HOME) == ref.size
    age(any_world)
    assert (await collect(any_world.grid)).blobs == 1
    async with any_world.grid.db.read() as tx:
        assert await holdings.stored_bytes(tx, HOME) == 0
        assert await holdings.has_uploaded(tx, OPERATOR, [ref.sha256]) == set()


async def test_idempotency_keys_are_forgotten_when_nobody_repeats_the_request_any_more(
    any_world: World,
) -> None:
    grid, spec = any_world.grid, await any_world.spec()
    first = await commands.create_job(grid, spec, "the-key", "tester")
    any_world.time.now += grid.settings.idempotency_s - 60
    await collect(grid)
    assert await commands.create_job(grid, spec, "the-key", "tester") == first
    later = await commands.create_job(grid, spec, "another-key", "tester")
    any_world.time.now += 120
    any_world.grid.settings = replace(grid.settings, orphans_s=0.0)
    any_world.duties._cleaned_at = any_world.time.now - 3600
    assert not await any_world.duties.clean(), "no blob was deleted, but the keys were looked at"
    assert await commands.create_job(grid, spec, "another-key", "tester") == later
    assert await commands.create_job(grid, spec, "the-key", "tester") != first
