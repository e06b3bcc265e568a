"""``distribai grid backup | restore | migrate`` as it is typed."""

from __future__ import annotations

import asyncio
import json
import os
import resource
import subprocess
import sys
from pathlib import Path

import pytest
from alembic import command

from distribai.cli import migrate
from distribai.config import Home
from distribai.core.spec import BlobRef
from distribai.orchestrator.fleet import tokens
from distribai.orchestrator.secrets import hash_secret
from distribai.store.blobs import BlobStore
from distribai.store.engine import Database
from distribai.store.migrate import alembic_config
from distribai.store.migrate import migrate as migrate_schema
from distribai.store.statements import facts, records
from tests.cli.conftest import Run
from tests.store.databases import add_old_operator_token

BLOB = bytes(range(256)) * 4096


@pytest.fixture
def state(home: Path) -> Path:
    """A grid with one blob, where ``orchestrator start`` would have put it."""
    path = home / "state" / "orchestrator"

    async def make() -> None:
        path.mkdir(parents=True)
        db = Database(f"sqlite:///{path / 'grid.sqlite3'}", durable=False)
        await migrate_schema(db)
        await tokens.ensure_invite(db, path, os.urandom)
        blobs = BlobStore.open(path / "blobs", path / "staging", max_bytes=1 << 24)
        ref: BlobRef = await blobs.put_bytes(BLOB)
        async with db.write() as tx:
            await facts.put_once(tx, "grid_id", "grid_of_this_test")
            await add_old_operator_token(tx, hash_secret("dop_secret"))
            await records.add_blob(tx, ref, "data")
        await db.close()

    asyncio.run(make())
    credentials = Home.find(os.environ).credentials
    words = {"url": "http://127.0.0.1:1", "token": "dop_secret", "state_dir": str(path)}
    credentials.write_text(json.dumps(words))
    return path


def test_a_grid_is_saved_checked_and_restored(offline: Run, state: Path, tmp_path: Path) -> None:
    done = offline("grid", "backup", "saved")
    assert done.status == 0, done.err
    assert "grid_of_this_test" in done.out
    assert "1 blob (1.0 MB) copied now" in done.out
    again = offline("grid", "backup", "saved", "--json").json
    assert (again["copied_blobs"], again["blobs"], again["lost"]) == (0, 1, [])

    checked = offline("grid", "restore", "saved", "--check")
    assert checked.status == 0, checked.err
    assert "is whole" in checked.out

    done = offline("grid", "restore", "saved", "--state-dir", "new")
    assert done.status == 0, done.err
    assert "orchestrator start" in done.out
    new = tmp_path / "new"
    assert (new / "invite").read_text() == (state / "invite").read_text()
    # Told at the first start: on another machine nobody would have it.
    assert (new / "operator-token").read_text() == "dop_secret\n"


def test_another_grids_token_is_not_saved(offline: Run, state: Path, tmp_path: Path) -> None:
    credentials = Home.find(os.environ).credentials
    words = {"url": "http://127.0.0.1:1", "token": "dop_other", "state_dir": "/somewhere"}
    credentials.write_text(json.dumps(words))
    assert offline("grid", "backup", "saved").status == 0
    assert not any(b"dop_other" in p.read_bytes() for p in (tmp_path / "saved").rglob("operator*"))


def test_what_cannot_be_done_says_why_and_what_to_try(offline: Run, state: Path) -> None:
    nothing = offline("grid", "backup", "saved", "--state-dir", "nowhere")
    assert nothing.status == 3
    assert "code: grid.missing" in nothing.err
    assert "try: " in nothing.err
    none = offline("grid", "restore", "nowhere", "--state-dir", "new")
    assert none.status == 3
    assert "code: grid.backup" in none.err
    assert offline("grid", "backup", "saved").status == 0
    onto = offline("grid", "restore", "saved")
    assert onto.status == 5
    assert "code: grid.not_empty" in onto.err
    assert "try: " in onto.err
    next(p for p in Path("saved/blobs").rglob("*") if p.is_file()).write_bytes(b"x")
    torn = offline("grid", "restore", "saved", "--check")
    assert torn.status == 6
    assert "code: grid.backup" in torn.err


def test_a_place_that_can_be_no_backup_is_said_without_advice_about_space(
    offline: Run, state: Path, tmp_path: Path
) -> None:
    (tmp_path / "file").write_text("no directory")
    for out in ("file", "file/below", "x" * 300):
        refused = offline("grid", "backup", out)
        assert refused.status == 8
        assert "code: io.file" in refused.err
        assert "this user may write to" in " ".join(refused.err.split())
        assert "space" not in refused.err


def test_a_grid_moves_to_another_place_in_one_command(
    offline: Run, state: Path, tmp_path: Path
) -> None:
    to = ["--to-db", f"sqlite:///{tmp_path / 'other.sqlite3'}", "--to-blobs", str(tmp_path / "b")]
    would = offline("grid", "migrate", *to, "--check")
    assert would.status == 0, would.err
    assert "grid_of_this_test" in would.out
    assert "would be moved" in would.out
    assert not (tmp_path / "other.sqlite3").exists()
    done = offline("grid", "migrate", *to)
    assert done.status == 0, done.err
    assert "1 blob (1.0 MB) copied now, all read back" in done.out
    assert f"orchestrator start --state-dir {state} --db {to[1]} --blobs {to[3]}" in done.out
    assert not (state / "operator-token").exists(), "the same state directory is as it was"
    again = offline("grid", "migrate", *to)
    assert again.status == 5
    assert "code: grid.moved" in again.err
    assert "grid migrate --undo" in " ".join(again.err.split())
    here = offline("grid", "backup", "saved", "--db", to[1], "--blobs", to[3], "--json").json
    assert here["copied_blobs"] == 1
    undone = offline("grid", "migrate", "--undo")
    assert undone.status == 0, undone.err
    assert f"Never start an orchestrator on {to[1]}" in undone.out
    assert offline("grid", "migrate", "--undo").status == 2
    elsewhere = offline("grid", "migrate", "--to-state-dir", "new", "--json").json
    assert (elsewhere["copied_blobs"], elsewhere["lost"]) == (1, [])
    assert elsewhere["to"]["db"] == f"sqlite:///{tmp_path / 'new' / 'grid.sqlite3'}"
    assert (tmp_path / "new" / "operator-token").read_text() == "dop_secret\n"


def test_a_password_of_a_database_is_not_shown(offline: Run, state: Path) -> None:
    nowhere = "postgresql://grid:secret@127.0.0.1:1/grid"
    refused = offline("grid", "migrate", "--to-db", nowhere)
    assert refused.status == 8
    assert "code: grid.database" in refused.err
    assert "secret@" not in refused.err
    places = (nowhere, "postgresql://grid@db/grid?password=x", "postgresql://grid@db/grid")
    assert [migrate._has_secret(url) for url in places] == [True, True, False]


def test_a_moved_grid_with_a_password_says_how_to_give_it(
    offline: Run, state: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(migrate, "_has_secret", lambda _: True)  # as of a PostgreSQL that is there
    done = offline("grid", "migrate", "--to-db", f"sqlite:///{tmp_path / 'other.sqlite3'}")
    assert done.status == 0, done.err
    said = " ".join(done.out.split())
    assert "DISTRIBAI_ORCHESTRATOR_DB" in said
    assert "config.toml" in said
    assert "--db " not in said
    started = offline("orchestrator", "start", "--grpc-port", "0", "--http-port", "0")
    assert (started.status, "code: grid.moved" in started.err) == (5, True)


def test_a_schema_is_brought_up_to_date_or_only_looked_at(
    offline: Run, home: Path, tmp_path: Path
) -> None:
    place = ["--db", f"sqlite:///{tmp_path / 'old.sqlite3'}"]
    none = offline("grid", "migrate", *place)
    assert none.status == 3
    assert "code: grid.missing" in none.err

    async def make() -> None:
        db = Database(place[1], durable=False)
        async with db.write() as tx:
            await tx.conn.run_sync(lambda c: command.upgrade(alembic_config(c), "0001"))
        await db.close()

    asyncio.run(make())
    for _ in range(2):
        would = offline("grid", "migrate", *place, "--check")
        assert "would be brought from 0001" in would.out
        assert "    0002  " in would.out
    steps = offline("grid", "migrate", *place, "--check", "--json").json["steps"]
    done = offline("grid", "migrate", *place, "--json").json
    assert (done["revision"], done["done"], done["steps"]) == ("0001", True, steps)
    assert [step["revision"] for step in steps][-1] == done["newest"]
    assert "nothing to do" in offline("grid", "migrate", *place).out


@pytest.mark.skipif(os.name != "posix", reason="limits of a process are POSIX")
def test_a_disk_that_takes_no_more_is_named_and_the_backup_goes_on_later(
    state: Path, tmp_path: Path
) -> None:
    """A limit on the size of files stands for a full disk: both refuse a write half-way."""

    def limit() -> None:
        resource.setrlimit(resource.RLIMIT_FSIZE, (500_000, 500_000))

    words = [str(Path(sys.executable).with_name("distribai")), "grid", "backup", "saved"]
    full = subprocess.run(words, preexec_fn=limit, capture_output=True, text=True, check=False)
    assert full.returncode == 8, full.stderr
    assert "code: io.file" in full.stderr
    assert "try: " in full.stderr
    assert not (tmp_path / "saved" / "backup.json").exists()
    done = subprocess.run(words, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr

    restoring = [*words[:2], "restore", "saved", "--state-dir", "new"]
    full = subprocess.run(restoring, preexec_fn=limit, capture_output=True, text=True, check=False)
    assert full.returncode == 8, full.stderr
    assert "try: " in full.stderr
    done = subprocess.run(restoring, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
