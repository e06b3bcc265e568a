"""What is no backup, no grid, or no longer whole is refused by name, and nothing is written."""

from __future__ import annotations

import asyncio
import gzip
import json
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from distribai.core.plain import from_plain, to_plain
from distribai.errors import (
    Conflict,
    DistribAIError,
    Integrity,
    NotFound,
    Unavailable,
    UsageError,
)
from distribai.orchestrator.backup import BackupManifest, back_up, check_backup, restore
from distribai.orchestrator.backup.format import Layout, Part, write_manifest
from distribai.orchestrator.jobs import queries
from distribai.store import outbox
from distribai.store.blobs import blob_key, hash_file
from tests.orchestrator.harness import World
from tests.orchestrator.test_backup import place, settings_of, started
from tests.store.databases import new_sqlite


def parts(out: Path) -> dict[str, Path]:
    """One file of each kind."""
    (snapshot,) = (out / "snapshots").iterdir()
    return {
        "manifest": out / "backup.json",
        "rows": snapshot / "tasks.jsonl.gz",
        "list": snapshot / "named-blobs.jsonl.gz",
        "secret": snapshot / "invite",
        "blob": next(p for p in sorted((out / "blobs").rglob("*")) if p.is_file()),
    }


def spoil(path: Path, how: str) -> None:
    data = path.read_bytes()
    if how == "flipped":
        path.write_bytes(data[:-20] + bytes([data[-20] ^ 1]) + data[-19:])
    elif how == "truncated":
        path.write_bytes(data[: len(data) // 2])
    else:
        path.unlink()


async def test_a_damaged_backup_is_named_and_nothing_is_written(
    world: World, tmp_path: Path
) -> None:
    await started(world, "a")
    whole, root = tmp_path / "backup", tmp_path / "elsewhere"
    await back_up(settings_of(world), whole)
    for what in ("manifest", "rows", "list", "secret", "blob"):
        for how in ("flipped", "truncated", "gone"):
            out = tmp_path / f"{what}-{how}"
            shutil.copytree(whole, out)
            path = parts(out)[what]
            spoil(path, how)
            kind = NotFound if (what, how) == ("manifest", "gone") else Integrity
            with pytest.raises(kind) as refused:
                await restore(place(root), out)
            assert refused.value.code == "grid.backup", (what, how)
            assert refused.value.hint
            assert path.name in refused.value.message, (what, how)
            assert not (root / "blobs").exists()
            assert not (root / "invite").exists()
    await restore(place(root), whole)


async def test_an_incremental_backup_mends_a_torn_blob(world: World, tmp_path: Path) -> None:
    await started(world, "a")
    out = tmp_path / "backup"
    await back_up(settings_of(world), out)
    blob = parts(out)["blob"]
    blob.write_bytes(blob.read_bytes()[:-1])
    assert (await back_up(settings_of(world), out)).copied.blobs == 1
    await check_backup(out)


async def change_manifest(out: Path, **changes: Any) -> None:
    manifest = from_plain(BackupManifest, json.loads((out / "backup.json").read_text()))
    write_manifest(Layout(out), replace(manifest, **changes))


async def test_an_impossible_manifest_is_refused(world: World, tmp_path: Path) -> None:
    await started(world, "a")
    out = tmp_path / "backup"
    manifest = (await back_up(settings_of(world), out)).manifest
    cases: list[tuple[dict[str, Any], type[DistribAIError], str]] = [
        ({"revision": "0999"}, Conflict, "grid.schema"),
        ({"format": 2}, Conflict, "grid.schema"),
        ({"snapshot": "../../etc"}, Integrity, "grid.backup"),
        ({"tables": {}}, Integrity, "grid.backup"),
        ({"columns": {}}, Integrity, "grid.backup"),
        ({"files": {"passwd": manifest.files["invite"]}}, Integrity, "grid.backup"),
    ]
    for changes, kind, code in cases:
        write_manifest(Layout(out), replace(manifest, **changes))
        with pytest.raises(kind) as refused:
            await restore(place(tmp_path / "elsewhere"), out)
        assert refused.value.code == code, changes
        assert refused.value.hint


async def test_rows_that_contradict_each_other_are_refused_as_a_whole(
    world: World, tmp_path: Path
) -> None:
    """The hashes fit, yet a task belongs to a job that is not there."""
    await started(world, "a")
    out, root = tmp_path / "backup", tmp_path / "elsewhere"
    manifest = (await back_up(settings_of(world), out)).manifest
    path = Layout(out).lines(manifest.snapshot, "jobs")
    path.write_bytes(gzip.compress(b""))
    found = hash_file(path)
    tables = {**manifest.tables, "jobs": Part(found.sha256, found.size)}
    await change_manifest(out, tables=tables)
    with pytest.raises(Integrity) as refused:
        await restore(place(root), out)
    assert refused.value.code == "grid.backup"
    with pytest.raises(NotFound):
        await back_up(place(root), tmp_path / "other")


async def test_a_backup_goes_only_where_no_grid_is(world: World, tmp_path: Path) -> None:
    await started(world, "a")
    out = tmp_path / "backup"
    await back_up(settings_of(world), out)
    with pytest.raises(Conflict) as refused:
        await restore(settings_of(world), out)
    assert refused.value.code == "grid.not_empty"
    other = tmp_path / "other"
    other.mkdir()
    (other / "invite").write_text("another grid's\n")
    with pytest.raises(Conflict, match="another grid's"):
        await restore(place(other), out)
    assert (other / "invite").read_text() == "another grid's\n"
    await new_sqlite(other)
    with pytest.raises(Conflict, match="holds a table"):
        await restore(place(other), out)


async def test_where_there_is_no_grid_nothing_is_saved(tmp_path: Path) -> None:
    with pytest.raises(NotFound) as refused:
        await back_up(place(tmp_path / "nowhere"), tmp_path / "backup")
    assert refused.value.code == "grid.missing"
    assert not (tmp_path / "nowhere").exists()
    (tmp_path / "some").mkdir()
    await new_sqlite(tmp_path / "some")
    with pytest.raises(NotFound, match="ever started"):
        await back_up(place(tmp_path / "some"), tmp_path / "backup")
    (tmp_path / "file").write_text("x")
    with pytest.raises(NotFound) as refused:
        await restore(place(tmp_path / "elsewhere"), tmp_path / "file")
    assert refused.value.code == "grid.backup"
    (tmp_path / "grid.sqlite3").touch()
    with pytest.raises(Unavailable) as full:
        await back_up(place(tmp_path), tmp_path / "file")
    assert full.value.code == "io.file"


async def test_a_state_directory_that_cannot_be_made_is_refused_in_its_flag_s_own_words(
    tmp_path: Path,
) -> None:
    (tmp_path / "file").write_text("x")
    with pytest.raises(UsageError) as refused:
        await restore(place(tmp_path / "file" / "below"), tmp_path / "backup")
    assert refused.value.code == "io.file"
    assert "--state-dir" in refused.value.hint


async def test_a_grid_that_has_lost_blobs_says_which(world: World, tmp_path: Path) -> None:
    job_id, _ = await started(world)
    out = tmp_path / "backup"
    versions = await queries.list_versions(world.grid, job_id)
    gone, flipped = versions[0].weights.sha256, versions[1].weights.sha256
    store = world.root / "blobs"
    kept = (store / blob_key(gone)).read_bytes()
    (store / blob_key(gone)).unlink()
    data = bytearray((store / blob_key(flipped)).read_bytes())
    data[-1] ^= 1
    (store / blob_key(flipped)).write_bytes(data)
    with pytest.raises(Integrity) as refused:
        await back_up(settings_of(world), out)
    assert refused.value.code == "grid.damaged"
    assert gone[:12] in refused.value.message
    assert flipped[:12] in refused.value.message
    with pytest.raises(NotFound):
        await check_backup(out)
    saved = await back_up(settings_of(world), out, incomplete=True)
    assert set(saved.manifest.lost) == {gone, flipped}
    await restore(place(tmp_path / "elsewhere"), out)
    (store / blob_key(gone)).write_bytes(kept)
    assert set((await back_up(settings_of(world), out, incomplete=True)).manifest.lost) == {flipped}


async def test_one_backup_at_a_time_writes_into_a_directory(world: World, tmp_path: Path) -> None:
    await started(world, "a")
    out = tmp_path / "backup"
    results = await asyncio.gather(
        *(back_up(settings_of(world), out) for _ in range(2)), return_exceptions=True
    )
    refused = [r for r in results if isinstance(r, Conflict)]
    assert [r.code for r in refused] == ["grid.locked"]
    await check_backup(out)


async def test_secrets_are_for_their_owner_alone(world: World, tmp_path: Path) -> None:
    await started(world, "a")
    out, root = tmp_path / "backup", tmp_path / "elsewhere"
    await back_up(settings_of(world), out, secrets={"operator-token": "dop_x\n"})
    assert out.stat().st_mode & 0o077 == 0
    await restore(place(root), out)
    assert root.stat().st_mode & 0o077 == 0
    for name in ("invite", "operator-token"):
        assert (root / name).stat().st_mode & 0o177 == 0
    assert (root / "operator-token").read_text() == "dop_x\n"
    assert not (root / "restoring").exists()
    assert not (out / "staging").exists()


async def test_a_claim_of_a_blob_that_was_never_uploaded_spoils_no_backup(
    world: World, tmp_path: Path
) -> None:
    _, (node, *_) = await started(world, "a")
    async with world.grid.db.write() as tx:
        claims = {"delta": {"sha256": "f" * 64, "size": 7}, "y": {"sha256": "../..", "size": 1}}
        await outbox.append(tx, [outbox.Change("x", data=claims)])
    saved = await back_up(settings_of(world), tmp_path / "backup")
    assert saved.manifest.lost == ()
    assert to_plain(await check_backup(tmp_path / "backup")) == to_plain(saved.manifest)
    assert node.id


async def test_a_read_only_copy_of_a_backup_can_be_restored(world: World, tmp_path: Path) -> None:
    await started(world, "a")
    await back_up(settings_of(world), tmp_path / "backup")
    shutil.copytree(tmp_path / "backup", tmp_path / "copy")
    before = {p: p.stat().st_mtime_ns for p in (tmp_path / "copy").rglob("*")}
    await restore(place(tmp_path / "elsewhere"), tmp_path / "copy")
    assert {p: p.stat().st_mtime_ns for p in (tmp_path / "copy").rglob("*")} == before
