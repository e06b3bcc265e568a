"""A resting grid moves to another database and blob store, or stays whole where it was."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from sqlalchemy import text

from distribai.core.spec import BlobRef
from distribai.errors import Conflict, DistribAIError, Integrity, NotFound, UsageError
from distribai.orchestrator.backup import back_up, move, moving, survey, undo, upgrade_schema
from distribai.orchestrator.backup.existing import closed, existing, lock_resting
from distribai.orchestrator.main import Orchestrator
from distribai.orchestrator.places import MOVED, check_here, moved_to
from distribai.store import leases
from distribai.store.blobs import BlobStore, blob_key
from distribai.store.drivers import shown
from distribai.store.engine import Database
from distribai.store.lock import FileLock
from distribai.store.migrate import migrate
from distribai.store.statements import facts, records
from tests.orchestrator.harness import World
from tests.orchestrator.test_backup import (
    Stop,
    empty,
    finish,
    place,
    revive,
    rows_of,
    settings_of,
    started,
)
from tests.store.databases import new_postgres

__all__ = ["empty"]

Empty = Callable[[str, Path], Any]


def files_of(root: Path) -> dict[str, bytes]:
    """Every file of a grid but what belongs to the running of SQLite."""
    return {
        str(p.relative_to(root)): p.read_bytes()
        for p in sorted(root.rglob("*"))
        if p.is_file() and ".sqlite3" not in p.name and not {"elsewhere", "none"} & set(p.parts)
    }


async def with_a_blob(world: World, data: bytes = b"weights") -> BlobRef:
    """A grid that has nothing but one blob and a row that names it."""
    ref = await world.grid.blobs.put_bytes(data)
    async with world.grid.db.write() as tx:
        await facts.put_once(tx, "grid_id", world.grid.grid_id)
        await records.add_blob(tx, ref, "data")
    return ref


def on_disk(world: World, ref: BlobRef) -> Path:
    return world.root / "blobs" / blob_key(ref.sha256)


async def here(db: Database) -> None:
    async with db.read() as tx:
        await check_here(tx)


async def rows_left(world: World) -> dict[str, list[dict[str, Any]]]:
    """What the old database holds after a move, but for where its grid went."""
    rows = await rows_of(world.grid.db)
    rows["meta"].remove({"key": MOVED})
    return rows


async def refusal(source: Any, target: Any, **options: Any) -> DistribAIError:
    with pytest.raises(DistribAIError) as caught:
        await move(source, target, **options)
    assert caught.value.hint
    return caught.value


async def test_a_grid_moves_from_files_to_postgresql_and_s3_and_goes_on_where_it_was(
    world: World, tmp_path: Path, empty: Empty, s3_environment: str
) -> None:
    job_id, _ = await started(world)
    before, files = await rows_of(world.grid.db), files_of(world.root)
    url, blobs = await empty("postgresql", tmp_path), f"s3://grid/{tmp_path.name}"
    source = settings_of(world)
    target = replace(source, db=url, blobs=blobs)

    planned = await survey(source, target)
    db = Database(url)
    with pytest.raises(NotFound):
        await back_up(target, tmp_path / "none")

    moved = await move(source, target)
    assert moved.copied.blobs == planned.blobs.lines
    assert moved.rows == sum(part.lines for part in planned.tables.values())
    assert await rows_of(db) == before
    await db.close()
    assert await moved_to(world.grid.db) == shown(url)
    assert await rows_left(world) == before, "but for this the old grid is as it was"
    assert files_of(world.root) == files

    again = await revive(world, world.root, url)
    try:
        again.grid.blobs = BlobStore.open(blobs, tmp_path / "staging2", max_bytes=1 << 24)
        for path in (world.root / "blobs").rglob("*"):
            if path.is_file():
                path.unlink()  # nothing of the old store is needed any more
        await finish(again, job_id)
    finally:
        await again.close()


@pytest.mark.parametrize("told_at", ["blobs", "checked", "rows"])
async def test_an_interrupted_move_is_no_grid_and_can_be_run_again(
    world: World, tmp_path: Path, told_at: str
) -> None:
    await with_a_blob(world)
    root = tmp_path / "elsewhere"
    source, target = settings_of(world), place(root)
    reached = []

    def die(progress: Any) -> None:
        if progress.what == told_at and progress.total:
            reached.append(told_at)
            raise Stop

    before = await rows_of(world.grid.db)
    with pytest.raises(Stop):
        await move(source, target, told=die)
    assert reached
    with pytest.raises(NotFound):
        await back_up(target, tmp_path / "none")
    moved = await move(source, target)
    assert moved.copied.blobs == 0, "what was copied already is not copied again"
    assert moved.copied.present == 1
    assert not (root / "restoring").exists()
    async with existing(target) as db:
        assert await rows_of(db) == before
    assert (root / "invite").read_text() == (world.root / "invite").read_text()


async def test_a_grid_on_which_somebody_works_is_not_moved(
    any_world: World, tmp_path: Path
) -> None:
    world = any_world
    await with_a_blob(world)
    source, target = settings_of(world), place(tmp_path / "elsewhere")
    if world.grid.db.dialect == "sqlite":
        lock = FileLock(world.grid.db.path)
        assert (await refusal(source, target)).code == "grid.locked"
        lock.release()
    else:
        db = Database(world.url)  # on PostgreSQL's own clock, as a replica's
        async with db.write() as tx:
            await leases.take_duty(tx, "control", "replica", 3600.0)
        await db.close()
        assert (await refusal(source, target)).code == "grid.locked"
        async with world.grid.db.write() as tx:
            await leases.drop_duties(tx, None)
    await survey(source, target)
    await move(source, target)
    async with existing(target) as db:
        assert await rows_of(db) == await rows_left(world)


async def test_blobs_alone_can_move_and_the_database_stays(world: World, tmp_path: Path) -> None:
    ref = await with_a_blob(world)
    before = await rows_of(world.grid.db)
    target = replace(settings_of(world), blobs=str(tmp_path / "other"))
    moved = await move(settings_of(world), target)
    assert (moved.rows, moved.copied.blobs) == (0, 1)
    assert (tmp_path / "other" / blob_key(ref.sha256)).read_bytes() == b"weights"
    assert await rows_of(world.grid.db) == before


async def test_a_place_that_is_taken_or_the_same_is_refused(world: World, tmp_path: Path) -> None:
    await with_a_blob(world)
    source, root = settings_of(world), tmp_path / "elsewhere"
    with pytest.raises(UsageError):
        await survey(source, source)
    assert (await refusal(source, source)).code == "usage.invalid"
    other = tmp_path / "third"
    other.mkdir()
    (other / "invite").write_text("another grid's\n")
    assert (await refusal(source, place(other))).code == "grid.not_empty"
    assert not (other / "blobs").exists(), "it is seen before anything is copied"
    await move(source, place(root))
    again = await refusal(source, place(root))
    assert (again.code, str(root) in again.message) == ("grid.moved", True)
    assert "complete" in again.message
    assert "run the same" not in str(again.hint)
    with pytest.raises(Conflict) as caught:
        await survey(source, place(root))
    assert caught.value.code == "grid.moved"
    assert (await refusal(source, place(tmp_path / "fourth"))).code == "grid.moved"
    assert (await refusal(place(tmp_path / "nothing"), place(other))).code == "grid.missing"
    (tmp_path / "empty").mkdir()
    place(tmp_path / "empty").database_file.touch()
    assert (await refusal(place(tmp_path / "empty"), place(tmp_path / "to"))).code == "grid.missing"


async def test_a_grid_that_was_moved_starts_in_its_new_place_alone_until_that_is_undone(
    world: World, tmp_path: Path
) -> None:
    await with_a_blob(world)
    source, target = settings_of(world), place(tmp_path / "elsewhere")
    await here(world.grid.db)
    with pytest.raises(UsageError):
        await undo(source)
    await move(source, target)
    with pytest.raises(Conflict) as caught:
        await here(world.grid.db)
    assert caught.value.code == "grid.moved"
    assert str(tmp_path / "elsewhere") in caught.value.message
    async with existing(target) as new:
        await here(new)
    with pytest.raises(UsageError, match="looked at first"):
        await undo(source, "sqlite:///another.sqlite3")
    assert await undo(source, check=True) == shown(target.database_url)
    with pytest.raises(Conflict):
        await here(world.grid.db)
    async with existing(target) as new:
        with closed(new), pytest.raises(Conflict, match="runs in the new place") as caught:
            await undo(source)
    assert caught.value.code == "grid.locked"
    assert await undo(source) == shown(target.database_url)
    await here(world.grid.db)


async def test_a_grid_whose_new_place_is_lost_can_be_taken_back(
    world: World, tmp_path: Path
) -> None:
    await with_a_blob(world)
    source, target = settings_of(world), place(tmp_path / "elsewhere")
    await move(source, target)
    target.database_file.unlink()
    await undo(source)
    await here(world.grid.db)


async def test_a_move_that_dies_between_its_two_commits_is_nowhere_and_can_be_finished(
    world: World, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    await with_a_blob(world)
    source, target = settings_of(world), place(tmp_path / "elsewhere")
    before = await rows_of(world.grid.db)
    leave = moving._leave

    async def leave_and_die(*args: Any) -> None:
        await leave(*args)
        raise Stop

    with monkeypatch.context() as patched:
        patched.setattr(moving, "_leave", leave_and_die)
        with pytest.raises(Stop):
            await move(source, target)
    with pytest.raises(Conflict):
        await here(world.grid.db)
    with pytest.raises(NotFound):
        await back_up(target, tmp_path / "none")
    assert (await refusal(source, place(tmp_path / "third"))).code == "grid.moved"
    stranger = Database(target.database_url)
    await migrate(stranger)
    await stranger.close()
    assert (await refusal(source, target)).code == "grid.not_empty", "another grid's by now"
    target.database_file.unlink()
    await move(source, target)
    async with existing(target) as db:
        await here(db)
        assert await rows_of(db) == before


@pytest.mark.parametrize("stays", [True, False])
async def test_a_replica_that_works_while_rows_are_copied_keeps_the_grid_where_it_is(
    tmp_path: Path, postgres: str, monkeypatch: pytest.MonkeyPatch, stays: bool
) -> None:
    """Also one that has stopped again: what it did is not in the new place."""
    world = await World(tmp_path, await new_postgres(postgres)).open()
    try:
        await with_a_blob(world)
        source, target = settings_of(world), place(tmp_path / "elsewhere")
        fill = moving.fill

        async def fill_late(*args: Any, **options: Any) -> int:
            async with existing(source) as db:  # on PostgreSQL's own clock
                async with db.write() as tx:
                    await leases.take_duty(tx, "control", "replica", 3600.0)
                if not stays:
                    async with db.write() as tx:
                        await leases.drop_duties(tx, "replica")
            return await fill(*args, **options)

        with monkeypatch.context() as patched:
            patched.setattr(moving, "fill", fill_late)
            assert (await refusal(source, target)).code == "grid.locked"
        assert await moved_to(world.grid.db) is None
        with pytest.raises(NotFound):
            await back_up(target, tmp_path / "none")
        async with existing(source) as db, db.write() as tx:
            await leases.drop_duties(tx, None)
        await move(source, target)
    finally:
        await world.close()


async def test_a_replica_that_slipped_through_ends_with_its_next_lease(
    tmp_path: Path, postgres: str
) -> None:
    world = await World(tmp_path, await new_postgres(postgres)).open()
    try:
        db = world.grid.db
        async with db.write() as tx:
            await lock_resting(tx, tx.now)
            late = [
                asyncio.create_task(world.duties.control()),
                asyncio.create_task(world.duties.verify()),
            ]
            await asyncio.wait(late, timeout=0.5)
            assert not any(task.done() for task in late), "they wait for the move"
            await facts.put(tx, MOVED, "elsewhere")
        for ended in await asyncio.gather(*late, return_exceptions=True):
            assert isinstance(ended, Conflict)
            assert ended.code == "grid.moved"
        async with db.read() as tx:
            assert await leases.held_until(tx) == 0.0, "and has no lease"
    finally:
        await world.close()


async def test_the_process_ends_when_the_grid_is_here_no_more(
    tmp_path: Path, postgres: str
) -> None:
    settings = replace(place(tmp_path, await new_postgres(postgres)), grpc_port=0, http_port=0)
    settings = replace(settings, liveness=replace(settings.liveness, replica_s=1.0, tick_s=0.2))
    orchestrator = Orchestrator(settings)
    await orchestrator.start()
    try:
        async with orchestrator.grid.db.write() as tx:
            await facts.put(tx, MOVED, "elsewhere")
        with pytest.raises(Conflict) as caught:
            await asyncio.wait_for(orchestrator.watch(), 180)
        assert caught.value.code == "grid.moved"
    finally:
        await orchestrator.stop()


async def test_bytes_that_are_not_what_they_are_named_are_found_on_either_side(
    world: World, tmp_path: Path
) -> None:
    ref = await with_a_blob(world)
    root = tmp_path / "elsewhere"
    there = root / "blobs" / blob_key(ref.sha256)
    there.parent.mkdir(parents=True)
    there.write_bytes(b"wEights")
    wrong = await refusal(settings_of(world), place(root))
    assert (wrong.code, isinstance(wrong, Integrity)) == ("grid.damaged", True)
    assert ref.sha256[:12] in wrong.message
    there.unlink()
    on_disk(world, ref).write_bytes(b"wEights")
    assert (await refusal(settings_of(world), place(root))).code == "grid.damaged"
    with pytest.raises(NotFound):
        await back_up(place(root), tmp_path / "none")
    moved = await move(settings_of(world), place(root), incomplete=True)
    assert moved.manifest.lost == (ref.sha256,)


async def test_to_look_at_a_move_changes_nothing(world: World, tmp_path: Path) -> None:
    ref = await with_a_blob(world)
    files = files_of(world.root)
    planned = await survey(settings_of(world), place(tmp_path / "elsewhere"))
    assert (planned.blobs.lines, planned.blob_bytes) == (1, ref.size)
    assert not (tmp_path / "elsewhere").exists()
    assert files_of(world.root) == files


async def test_the_schema_is_not_changed_under_a_running_orchestrator(world: World) -> None:
    await with_a_blob(world)
    lock = FileLock(world.grid.db.path)
    try:
        found = await upgrade_schema(settings_of(world), check=False)
        assert found.steps == (), "nothing to do, so nothing is in the way"
        async with world.grid.db.write() as tx:
            await tx.run(text("UPDATE alembic_version SET version_num = '0005'"))
        assert (await upgrade_schema(settings_of(world), check=True)).revision == "0005"
        with pytest.raises(Conflict) as caught:
            await upgrade_schema(settings_of(world), check=False)
        assert caught.value.code == "grid.locked"
    finally:
        await asyncio.to_thread(lock.release)
