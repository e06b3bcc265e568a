"""A grid goes into a directory while it works, comes back anywhere, and goes on."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import asyncpg
import pytest
from sqlalchemy import make_url, select

from distribai import points
from distribai.errors import NotFound
from distribai.orchestrator.backup import back_up, check_backup, restore
from distribai.orchestrator.backup.format import Layout, write_manifest
from distribai.orchestrator.fleet.liveness import after_start
from distribai.orchestrator.jobs import queries
from distribai.sections import OrchestratorSettings
from distribai.store.engine import Database
from distribai.store.statements import facts
from distribai.store.tables import metadata
from tests.orchestrator.harness import FakeNode, World
from tests.orchestrator.test_whole_job import assert_every_position_once

SETTLED = {
    "meta": {"value"},  # the epoch of the events
    "sessions": {"ended_at"},
    "duties": {"lease_until"},
    "tasks": {"lease_until", "deadline_at", "leased_at"},
    "rounds": {"deadline_at", "opened_at"},
}
"""What a restore changes on purpose."""


def settings_of(world: World) -> OrchestratorSettings:
    return replace(world.grid.settings, db=world.url)


def place(root: Path, url: str = "", blobs: str = "") -> OrchestratorSettings:
    return OrchestratorSettings(state_dir=root, db=url, blobs=blobs, merge_threads=1)


async def started(world: World, nodes: str = "abc") -> tuple[str, list[FakeNode]]:
    """A job whose first round is merged and whose second one is at work."""
    async with world.grid.db.write() as tx:
        await facts.put_once(tx, "grid_id", world.grid.grid_id)
    made = [await world.node(name) for name in nodes]
    job_id = await world.job()
    while (await queries.show_job(world.grid, job_id)).version < 1:
        await world.settle()
        world.time.now += 1.0  # every task takes a second: nobody is faster than others
        for node in made:
            await node.work()
    await world.settle()
    world.time.now += 1.0
    await made[0].work()
    return job_id, made


async def rows_of(db: Database) -> dict[str, list[dict[str, Any]]]:
    """Every row of every table, without what a restore changes on purpose."""
    found = {}
    async with db.read() as tx:
        for name, table in metadata.tables.items():
            keys = list(table.primary_key.columns)
            found[name] = [
                {k: v for k, v in row._mapping.items() if k not in SETTLED.get(name, ())}
                for row in await tx.all(select(table).order_by(*keys))
            ]
    found["outbox"] = [r for r in found["outbox"] if r["kind"] != "grid.restored"]
    return found


async def revive(world: World, root: Path, url: str) -> World:
    """An orchestrator on the restored stores; the old world's nodes turn to it."""
    nodes = list(world.nodes)
    for node in nodes:
        await node.vanish()
    world.nodes.clear()
    again = World(root, url, world.time, world.seed + 1)
    await again.open()
    assert again.invite == world.invite
    await after_start(again.grid)
    for node in nodes:
        node.world = again
        again.nodes.append(node)
        await node.connect()
        assert node.end is None
    return again


async def finish(world: World, job_id: str) -> None:
    assert await world.run_job(job_id) == "completed"
    await assert_every_position_once(world, job_id)
    job = await queries.show_job(world.grid, job_id)
    rounds = await queries.list_rounds(world.grid, job_id)
    assert job.version == job.rounds_total == 3
    assert job.tokens == sum(r.tokens for r in rounds)


@pytest.fixture
def empty(request: pytest.FixtureRequest) -> Callable[[str, Path], Any]:
    """Makes the URL of an empty database of either kind."""
    made: list[str] = []

    async def make(kind: str, root: Path) -> str:
        if kind == "sqlite":
            return f"sqlite:///{root / 'grid.sqlite3'}"
        uri = make_url(request.getfixturevalue("postgres"))
        name = f"restored{len(made)}"
        connection = await asyncpg.connect(uri.render_as_string(hide_password=False))
        await connection.execute(f"DROP DATABASE IF EXISTS {name}")
        await connection.execute(f"CREATE DATABASE {name}")
        await connection.close()
        made.append(name)
        return uri.set(database=name).render_as_string(hide_password=False)

    return make


@pytest.mark.parametrize("kind", ["sqlite", "postgresql"])
async def test_a_grid_moves_between_databases_and_goes_on_where_it_was(
    any_world: World, kind: str, tmp_path: Path, empty: Callable[[str, Path], Any]
) -> None:
    job_id, _ = await started(any_world)
    saved = await back_up(settings_of(any_world), tmp_path / "backup")
    assert saved.manifest.lost == ()
    before = await rows_of(any_world.grid.db)
    # What happens after the snapshot is lost with the old grid.
    for node in any_world.nodes:
        await node.work()
    await any_world.settle()
    assert (await queries.show_job(any_world.grid, job_id)).version == 2

    root = tmp_path / "elsewhere"
    url = await empty(kind, root)
    await restore(place(root, url), tmp_path / "backup")
    db = Database(url)
    assert await rows_of(db) == before
    await db.close()

    again = await revive(any_world, root, url)
    try:
        assert (await queries.show_job(again.grid, job_id)).version == 1
        await finish(again, job_id)
        # Numbers go on behind the restored ones, and a cursor from before sees what is new.
        kinds = [e.kind for e in await queries.list_events(again.grid, job_id, limit=500)]
        assert kinds.count("job.completed") == 1
        assert kinds.count("round.merged") == 3
    finally:
        await again.close()


async def test_a_cursor_of_the_lost_grid_sees_the_events_of_the_restored_one(
    world: World, tmp_path: Path
) -> None:
    job_id, _ = await started(world)
    await back_up(settings_of(world), tmp_path / "backup")
    await world.run_job(job_id)
    seen = await queries.list_events(world.grid, job_id, limit=500)
    root = tmp_path / "elsewhere"
    await restore(place(root), tmp_path / "backup")
    again = await revive(world, root, f"sqlite:///{root / 'grid.sqlite3'}")
    try:
        await finish(again, job_id)
        fresh = await queries.list_events(again.grid, job_id, seen[-1].cursor, limit=500)
        assert [e.kind for e in fresh].count("job.completed") == 1
    finally:
        await again.close()


async def test_a_snapshot_taken_at_any_moment_of_a_busy_grid_can_go_on(
    world: World, tmp_path: Path
) -> None:
    """Backups while nodes train, report and vanish; each is restored and finishes the job."""
    job_id, _ = await started(world)
    taken: list[Path] = []

    async def save() -> None:
        for number in range(6):
            out = tmp_path / f"backup{number}"
            await back_up(settings_of(world), out)
            taken.append(out)

    saving = asyncio.create_task(save())
    for turn in range(200):
        if saving.done():
            break
        await world.settle()
        for node in world.nodes[turn % 2 :]:
            await node.work()
        if turn % 5 == 4:
            await world.nodes[0].vanish()
            await world.nodes[0].connect()
        world.time.now += 1.0
        await asyncio.sleep(0)
    await saving
    versions = set()
    for number, out in enumerate(taken):
        root = tmp_path / f"grid{number}"
        await restore(place(root), out)
        again = await revive(world, root, f"sqlite:///{root / 'grid.sqlite3'}")
        versions.add((await queries.show_job(again.grid, job_id)).version)
        await finish(again, job_id)
        for node in again.nodes:
            await node.vanish()
        world.nodes[:] = again.nodes
        again.nodes.clear()
        await again.close()
    assert versions


async def test_a_node_drops_what_the_restored_grid_does_not_know(
    world: World, tmp_path: Path
) -> None:
    job_id, nodes = await started(world)
    await back_up(settings_of(world), tmp_path / "backup")
    while (await queries.show_job(world.grid, job_id)).version < 2:
        world.time.now += 1.0
        for node in nodes:
            await node.work()
        await world.settle()
    later = nodes[0].only_task()
    assert later.round == 2
    root = tmp_path / "elsewhere"
    await restore(place(root), tmp_path / "backup")
    again = await revive(world, root, f"sqlite:///{root / 'grid.sqlite3'}")
    try:
        assert nodes[0].register_ack is not None
        assert later.task_id in [t.task_id for t in nodes[0].register_ack.drop]
        await finish(again, job_id)
    finally:
        await again.close()


async def test_leases_are_as_long_as_when_the_backup_was_made(world: World, tmp_path: Path) -> None:
    await started(world)
    await back_up(settings_of(world), tmp_path / "backup")
    layout = Layout(tmp_path / "backup")
    manifest = await check_backup(layout.root)
    write_manifest(layout, replace(manifest, taken_at=manifest.taken_at - 7200))
    root = tmp_path / "elsewhere"
    await restore(place(root), layout.root)
    async with world.grid.db.read() as tx:
        before = {
            r.id: r for r in await tx.all(select(metadata.tables["tasks"])) if r.state == "leased"
        }
    db = Database(f"sqlite:///{root / 'grid.sqlite3'}")
    async with db.read() as tx:
        after = {
            r.id: r for r in await tx.all(select(metadata.tables["tasks"])) if r.state == "leased"
        }
    await db.close()
    assert before.keys() == after.keys()
    assert before
    for task_id, row in before.items():
        assert after[task_id].deadline_at - row.deadline_at >= 7200
        assert after[task_id].lease_until - row.lease_until >= 7200


async def test_a_grid_moves_from_files_to_s3_and_back(
    world: World, tmp_path: Path, s3_environment: str
) -> None:
    job_id, _ = await started(world)
    first = await back_up(settings_of(world), tmp_path / "backup")
    middle = place(tmp_path / "middle", blobs="s3://grid/moved")
    await restore(middle, tmp_path / "backup")
    assert not (tmp_path / "middle" / "blobs").exists()
    second = await back_up(middle, tmp_path / "again")
    assert second.copied.blobs == first.copied.blobs
    root = tmp_path / "back"
    await restore(place(root), tmp_path / "again")
    again = await revive(world, root, f"sqlite:///{root / 'grid.sqlite3'}")
    try:
        await finish(again, job_id)
    finally:
        await again.close()


# ------------------------------------------------------------------ repeated, interrupted


async def test_a_second_backup_copies_only_what_is_new(world: World, tmp_path: Path) -> None:
    job_id, _ = await started(world)
    out = tmp_path / "backup"
    first = await back_up(settings_of(world), out)
    assert first.copied.blobs == first.manifest.blobs.lines
    await world.run_job(job_id)
    second = await back_up(settings_of(world), out)
    assert 0 < second.copied.blobs < second.manifest.blobs.lines
    assert second.copied.present == first.manifest.blobs.lines
    assert [p.name for p in (out / "snapshots").iterdir()] == [second.manifest.snapshot]
    third = await back_up(settings_of(world), out)
    assert third.copied.blobs == 0
    root = tmp_path / "elsewhere"
    await restore(place(root), out)
    again = await revive(world, root, f"sqlite:///{root / 'grid.sqlite3'}")
    assert (await queries.show_job(again.grid, job_id)).state == "completed"
    await again.close()


class Stop(Exception):
    """This process dies here."""


def stop_at(point: str, count: int = 1) -> None:
    left = [count]

    def hook(name: str) -> None:
        if name == point:
            left[0] -= 1
            if left[0] == 0:
                raise Stop(name)

    points.install(hook)


@pytest.fixture
def interrupted() -> Iterator[Callable[..., None]]:
    yield stop_at
    points.install(None)


@pytest.mark.parametrize(
    "point", ["backup.rows.written", "backup.file.renamed", "backup.manifest.flushed"]
)
async def test_an_interrupted_backup_is_none_and_an_earlier_one_stays(
    world: World, tmp_path: Path, interrupted: Callable[..., None], point: str
) -> None:
    job_id, _ = await started(world)
    out = tmp_path / "backup"
    interrupted(point)
    with pytest.raises(Stop):
        await back_up(settings_of(world), out)
    points.install(None)
    with pytest.raises(NotFound, match="was interrupted"):
        await restore(place(tmp_path / "none"), out)
    first = await back_up(settings_of(world), out)
    await world.run_job(job_id)
    interrupted(point)
    with pytest.raises(Stop):
        await back_up(settings_of(world), out)
    points.install(None)
    assert (await check_backup(out)).snapshot == first.manifest.snapshot
    assert (await back_up(settings_of(world), out)).manifest.snapshot != first.manifest.snapshot
    assert len(list((out / "snapshots").iterdir())) == 1
    await check_backup(out)


async def test_an_interrupted_restore_is_no_grid_and_can_be_run_again(
    world: World, tmp_path: Path, interrupted: Callable[..., None]
) -> None:
    job_id, _ = await started(world)
    out, root = tmp_path / "backup", tmp_path / "elsewhere"
    await back_up(settings_of(world), out)

    for told_at in ("blobs", "rows"):

        def die(progress: Any, told_at: str = told_at) -> None:
            if progress.what == told_at and progress.done >= progress.total // 2:
                raise Stop

        with pytest.raises(Stop):
            await restore(place(root), out, told=die)
    interrupted("restore.file.flushed")
    with pytest.raises(Stop):
        await restore(place(root), out)
    points.install(None)
    with pytest.raises(NotFound):
        await back_up(place(root), tmp_path / "other")
    again = await restore(place(root), out)
    assert again.copied.blobs == 0
    revived = await revive(world, root, f"sqlite:///{root / 'grid.sqlite3'}")
    try:
        await finish(revived, job_id)
    finally:
        await revived.close()
