"""Weights, samples, health, and how commands find their grid."""

from __future__ import annotations

import io
import os
import stat
import subprocess
import sys
from datetime import UTC, datetime
from pathlib import Path

import pytest

from distribai import tls
from distribai.cli import job_live, job_views, output
from distribai.cli.connection import (
    Credentials,
    authority,
    read_credentials,
    read_kept,
    resolve,
    write_credentials,
)
from distribai.cli.node import in_first_free
from distribai.cli.nodes import device_words
from distribai.cli.orchestrator import save_credentials
from distribai.config import Home, load
from distribai.errors import Conflict, Integrity, UsageError
from distribai.orchestrator.certificates import ensure_authority
from distribai.orchestrator.context import Grid
from distribai.sections import NodeSettings
from tests.cli.conftest import Run
from tests.http.stand_in import OPERATOR, Orchestrator, job_record, node_record, running, spec


@pytest.fixture
async def weights(grid: Grid, rooms: Orchestrator) -> bytes:
    data = bytes(range(256)) * 20
    rooms.jobs["job_a"] = job_record("job_a", spec())
    rooms.weights["job_a"] = [
        await grid.blobs.put_bytes(b"version 0"),
        await grid.blobs.put_bytes(data),
    ]
    return data


def test_weights_are_written_whole(run: Run, weights: bytes, tmp_path: Path) -> None:
    done = run("export-weights", "my-model", "--format", "safetensors", "--out", "m.safetensors")
    assert (done.status, done.out) == (0, "m.safetensors\n")
    assert (tmp_path / "m.safetensors").read_bytes() == weights
    assert "Version 1" in done.err
    words = ("export-weights", "my-model", "--out", "0", "--version", "0", "--json")
    assert run(*words).json["version"] == 0
    assert (tmp_path / "0").read_bytes() == b"version 0"


def test_only_a_file_is_replaced(run: Run, weights: bytes, tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    (tmp_path / "directory").mkdir()
    for out in ("pipe", "directory", "", "."):
        done = run("export-weights", "my-model", "--out", out)
        assert (done.status, "io.file" in done.err) == (2, True), done.err
    assert stat.S_ISFIFO((tmp_path / "pipe").stat().st_mode)
    assert {p.name for p in tmp_path.iterdir()} >= {"pipe", "directory"}


@pytest.mark.parametrize(
    ("words", "status", "code"),
    [
        ("my-model --out x --format pickle", 2, "usage.format"),
        ("my-model --out x --version 9", 3, "job.no_weights"),
        ("nothing --out x", 3, "job.unknown"),
        ("my-model --out missing/x", 2, "io.file"),
    ],
)
def test_an_export_that_cannot_be_leaves_nothing(
    run: Run, weights: bytes, tmp_path: Path, words: str, status: int, code: str
) -> None:
    done = run("export-weights", *words.split())
    assert (done.status, done.out) == (status, "")
    assert f"code: {code}" in done.err
    assert not (tmp_path / "x").exists()


def test_a_sample_is_printed_without_control_of_the_terminal(run: Run, weights: bytes) -> None:
    done = run("generate", "my-model", "--prompt", "-\tdef \x1b[2J", "--max-tokens", "3")
    assert done.status == 0
    assert "\x1b" not in done.out
    assert "-\tdef " in done.out
    words = ("generate", "my-model", "--prompt", "a", "--seed", "4", "--json")
    assert run(*words).json["text"] == "a/1/200/0.8/4"
    assert "version 0" not in done.err


def test_a_sample_of_a_job_that_was_not_trained_says_so(run: Run, weights: bytes) -> None:
    done = run("generate", "my-model", "--prompt", "a", "--version", "0")
    assert done.status == 0
    assert "before any training" in done.err


def test_a_sample_that_no_node_makes_is_said(run: Run, rooms: Orchestrator, weights: bytes) -> None:
    rooms.answer = "queued"
    done = run("generate", "my-model", "--prompt", "a")
    assert done.status == 8
    assert "code: task.timeout" in done.err
    assert "distribai nodes list" in done.err


def test_health_has_a_status(run: Run, rooms: Orchestrator) -> None:
    rooms.nodes = [node_record("a")]
    fine = run("health")
    assert fine.status == 0
    assert "1 online" in fine.out
    rooms.problems = ("The disk is full.",)
    ill = run("health")
    assert (ill.status, ill.err) == (1, "problem: The disk is full.\n")
    assert run("health", "--json").json["ok"] is False


class TestCredentials:
    @pytest.fixture
    def place(self, home: Path) -> Home:
        return Home(home / "state", home / "config.toml", home / "cache")

    def test_commands_of_the_same_user_find_the_grid(
        self, offline: Run, served: tuple[str, object], grid: Grid, rooms: Orchestrator, place: Home
    ) -> None:
        path = write_credentials(place, Credentials(served[0], OPERATOR, "/grid"))
        assert stat.S_IMODE(path.stat().st_mode) == 0o600
        assert offline("health").status == 0
        found = {row["name"]: row for row in offline("config", "show", "--json").json}
        assert found["client.url"]["source"] == found["client.token"]["source"] == str(path)

    def test_the_token_goes_to_its_own_grid_alone(
        self, place: Home, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        write_credentials(place, Credentials("http://127.0.0.1:1", "secret", "/grid"))
        monkeypatch.setenv("DISTRIBAI_URL", "http://elsewhere:1")
        assert resolve().client().token == ""
        monkeypatch.setenv("DISTRIBAI_URL", "http://127.0.0.1:1/")
        assert resolve().client().token == "secret"

    def test_the_ca_is_believed_for_its_own_grid_alone(
        self, place: Home, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        path = write_credentials(place, Credentials("https://127.0.0.1:1", "t", "/grid", "PEM"))
        assert resolve()["client.ca"].source == str(path)
        assert authority(resolve()) == "PEM"
        monkeypatch.setenv("DISTRIBAI_URL", "https://elsewhere:1")
        assert authority(resolve()) == ""
        monkeypatch.setenv("DISTRIBAI_CA", "neither a file nor a hash")
        with pytest.raises(UsageError) as caught:
            authority(resolve())
        assert caught.value.field == "client.ca"

    def test_a_ca_that_was_fetched_is_kept_under_its_hash_and_checked_again(
        self, place: Home, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
    ) -> None:
        made = ensure_authority(tmp_path / "ca", datetime.now(UTC)).cert_pem
        fetched: list[str] = []

        def fetch_ca(url: str, pin: str) -> str:
            fetched.append(url)
            return made

        monkeypatch.setattr(tls, "fetch_ca", fetch_ca)
        monkeypatch.setenv("DISTRIBAI_URL", "https://grid:1/")
        monkeypatch.setenv("DISTRIBAI_CA", tls.fingerprint(made))
        assert [authority(resolve()) for _ in range(2)] == [made, made]
        assert fetched == ["https://grid:1"]
        (kept,) = place.cache.glob("ca-*.pem")
        kept.write_text(ensure_authority(tmp_path / "other", datetime.now(UTC)).cert_pem)
        with pytest.raises(Integrity) as caught:
            authority(resolve())
        assert caught.value.code == "grid.ca"

    def test_a_later_start_keeps_the_token_and_tells_the_new_address(self, place: Home) -> None:
        settings = load()
        assert save_credentials(settings, "http://h:1", "token", "/a") == str(place.credentials)
        save_credentials(settings, "http://h:2", "", "/a")
        assert read_credentials(place) == Credentials("http://h:2", "token", "/a")
        assert save_credentials(settings, "http://h:3", "", "/another") == ""
        assert read_credentials(place) == Credentials("http://h:2", "token", "/a")

    def test_grids_of_one_machine_take_turns_and_none_loses_its_key(
        self, place: Home, capsys: pytest.CaptureFixture[str]
    ) -> None:
        settings = load()
        save_credentials(settings, "http://h:1", "first", "/a")
        save_credentials(settings, "http://h:2", "second", "/b")
        assert "spoke to http://h:1 until now" in capsys.readouterr().err
        assert read_credentials(place) == Credentials("http://h:2", "second", "/b")
        save_credentials(settings, "http://h:1", "", "/a")
        assert read_credentials(place) == Credentials("http://h:1", "first", "/a")

    def test_a_login_elsewhere_outlives_a_grid_that_is_started_here(
        self, place: Home, capsys: pytest.CaptureFixture[str]
    ) -> None:
        far = Credentials("https://far:1", "key", "")
        write_credentials(place, far)
        assert save_credentials(load(), "http://h:1", "mine", "/a") == ""
        assert read_credentials(place) == far
        assert "logged in to https://far:1" in capsys.readouterr().err
        assert read_kept(place, "/a") == Credentials("http://h:1", "mine", "/a")

    def test_a_file_that_makes_no_sense_is_no_credentials(self, place: Home) -> None:
        place.credentials.parent.mkdir(parents=True)
        for text in ("", "[]", "{}", "null"):
            place.credentials.write_text(text)
            assert read_credentials(place) is None


def test_each_node_of_a_machine_takes_a_directory_of_its_own(tmp_path: Path) -> None:
    held = {"1", "2"}

    def run_node(settings: NodeSettings) -> int:
        if settings.state_dir.name in held:
            raise Conflict("node.locked", "Another node runs there.")
        return int(settings.state_dir.name)

    assert in_first_free(tmp_path, NodeSettings(state_dir=Path()), run_node) == 3

    def refuses(settings: NodeSettings) -> int:
        raise Conflict("node.fenced", "Another one took over.")

    with pytest.raises(Conflict, match="took over"):
        in_first_free(tmp_path, NodeSettings(state_dir=Path()), refuses)


def test_a_node_without_a_link_is_told_where_to_get_one(home: Path) -> None:
    command = [Path(sys.executable).with_name("distribai"), "node", "start"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout) == (2, "")
    assert "code: node.join" in done.stderr


def test_devices_are_told_for_people() -> None:
    from distribai.api.answers import DeviceRecord

    cpu = DeviceRecord(index=0, type="cpu", name="x86_64", memory_mb=1, threads=1)
    gpu = DeviceRecord(index=0, type="cuda", name="H200", memory_mb=1, threads=1)
    assert device_words(cpu) == "cpu, 1 thread"
    assert device_words(gpu) == "cuda, H200"


def test_the_live_display_says_what_the_lines_say() -> None:
    from rich.console import Console

    from distribai.api.answers import JobRecord

    record = JobRecord.model_validate(output.plain(running(job_record("job_a", spec()))))
    console = Console(width=80, record=True, file=io.StringIO())
    console.print(job_live.panel(record))
    text = console.export_text()
    for words in ("running", "3 of 20, step 25 of 50, 1 of 3 in", "3.2500", "12.3k tokens/s"):
        assert words in text
    assert record.round is not None
    merged = record.model_copy(
        update={"round": record.round.model_copy(update={"state": "merged"})}
    )
    assert ("ETA", "3m20s") in job_live.live_facts(merged)
    assert "ETA 3m20s" in job_views.progress_line(merged), "known between two rounds too"
    one = record.model_copy(update={"nodes_working": 1})
    assert "  1 node at work  " in job_views.progress_line(one)
    waiting = record.model_copy(update={"round": None, "waiting_for": "2 more nodes"})
    assert ("waiting for", "2 more nodes") in job_live.live_facts(waiting)
    assert "waiting for 2 more nodes" in job_views.progress_line(waiting)


@pytest.mark.parametrize(
    ("count", "text"),
    [
        (0, "0 B"),
        (999, "999 B"),
        (1000, "1.0 kB"),
        (99_949, "99.9 kB"),
        (99_951, "100 kB"),
        (999_600, "1.0 MB"),
        (12_345_678, "12.3 MB"),
        (5e9, "5.0 GB"),
        (2e15, "2000.0 TB"),
    ],
)
def test_bytes_are_told_for_people(count: float, text: str) -> None:
    assert output.size(count) == text


@pytest.mark.parametrize(
    ("seconds", "text"),
    [(None, "-"), (-1, "0s"), (41, "41s"), (200, "3m20s"), (7500, "2h05m"), (273_600, "3d04h")],
)
def test_durations_are_told_for_people(seconds: float | None, text: str) -> None:
    assert output.duration(seconds) == text


def test_a_temperature_that_is_no_number_is_refused(run: Run, weights: bytes) -> None:
    done = run("generate", "my-model", "--prompt", "a", "--temperature", "nan")
    assert (done.status, "usage.invalid" in done.err) == (2, True)
