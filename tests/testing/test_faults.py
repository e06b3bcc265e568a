from __future__ import annotations

import errno
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from distribai import durable, points
from distribai.testing import faults
from distribai.testing.faults import Fault, Hit, Injector, choose, parse, read_record

PAGE = Path(__file__).resolve().parents[2] / "docs" / "how-to" / "faults.md"

WRITER = """
import sys
from pathlib import Path
from distribai import durable, points
from distribai.testing.faults import Injector, parse
points.install(Injector([parse(sys.argv[1], sys.argv[2])]))
durable.write(Path(sys.argv[3]), b"new" * 1000, point="file")
"""
"""A program that writes a file and is disturbed meanwhile."""


@pytest.mark.parametrize(
    ("action", "text", "fault"),
    [
        ("kill", "blob.put.flushed", Fault("kill", "blob.put.flushed")),
        ("kill", "commit.*:3", Fault("kill", "commit.*", 3)),
        ("full", "blob.*:2:5", Fault("full", "blob.*", 2, times=5)),
        ("sleep", "x.y:1:0.5", Fault("sleep", "x.y", 1, seconds=0.5)),
    ],
)
def test_faults_are_read_from_their_options(action: faults.Action, text: str, fault: Fault) -> None:
    assert parse(action, text) == fault


@pytest.mark.parametrize("text", ["", ":2", "a:0", "a:b", "a:1:2:3", "a:1:-1"])
def test_what_is_no_fault_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match=r"."):
        parse("kill", text)


def test_a_fault_happens_at_its_time_and_only_while_its_file_is_there(tmp_path: Path) -> None:
    gate = tmp_path / "gate"
    gate.touch()
    injector = Injector([Fault("full", "a.*", 2, times=2)], only_while=gate)
    injector("a.b")
    injector("c.b")
    with pytest.raises(OSError, match=r"a\.c") as caught:
        injector("a.c")
    assert caught.value.errno == errno.ENOSPC
    gate.unlink()
    injector("a.b")


def test_a_record_tells_how_often_each_point_was_reached(tmp_path: Path) -> None:
    record = tmp_path / "points.txt"
    assert read_record(record) == {}
    injector = Injector(record=record)
    for name in ("a", "b", "a"):
        injector(name)
    injector.close()
    assert read_record(record) == {"a": 2, "b": 1}


def test_a_plan_has_every_point_once_and_is_the_same_for_the_same_seed() -> None:
    reached = {f"point{i}": i + 1 for i in range(50)}
    plan = choose(reached, 7)
    assert plan == choose(reached, 7)
    assert {hit.point for hit in plan} == set(reached)
    assert all(1 <= hit.nth <= reached[hit.point] for hit in plan)
    assert plan != choose(reached, 8)
    few = choose(reached, 7, 5)
    assert len(few) == 5
    assert str(Hit("a.b", 2)) == "a.b:2"


@pytest.mark.parametrize(
    ("moment", "left"),
    [
        ("written", b"old"),
        ("flushed", b"old"),
        ("renamed", b"new" * 1000),
        ("durable", b"new" * 1000),
    ],
)
def test_a_file_that_a_killed_process_was_writing_is_the_old_one_or_the_new_one(
    tmp_path: Path, moment: str, left: bytes
) -> None:
    path = tmp_path / "file"
    path.write_bytes(b"old")
    command = [sys.executable, "-c", WRITER, "kill", f"file.{moment}", str(path)]
    assert subprocess.run(command, check=False).returncode == -signal.SIGKILL
    assert path.read_bytes() == left
    durable.write(path, b"later", point="file")
    assert path.read_bytes() == b"later"
    assert [p.name for p in tmp_path.iterdir()] == ["file"], "what lay aside is used up"


def test_on_a_full_disk_the_old_file_stays_and_nothing_lies_about(tmp_path: Path) -> None:
    path = tmp_path / "file"
    path.write_bytes(b"old")
    points.install(Injector([Fault("full", "file.written")]))
    try:
        with pytest.raises(OSError, match="injected"):
            durable.write(path, b"new", point="file")
    finally:
        points.install(None)
    assert path.read_bytes() == b"old"
    assert [p.name for p in tmp_path.iterdir()] == ["file"]


@pytest.mark.skipif(sys.platform != "linux", reason="reads the process's state from /proc")
def test_a_frozen_process_goes_on_when_it_is_told_to(tmp_path: Path) -> None:
    path = tmp_path / "file"
    command = [sys.executable, "-c", WRITER, "stop", "file.flushed", str(path)]
    with subprocess.Popen(command) as writer:
        state = Path(f"/proc/{writer.pid}/stat")
        while state.read_text().rsplit(")", 1)[1].split()[0] != "T":
            assert writer.poll() is None
            time.sleep(0.01)
        assert not path.exists()
        writer.send_signal(signal.SIGCONT)
        assert writer.wait() == 0
    assert path.read_bytes() == b"new" * 1000


def test_the_hosts_clock_is_wrong_by_what_the_file_says(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    offset = tmp_path / "offset"
    monkeypatch.setattr(time, "time", time.time)  # put back afterwards
    right = time.time()
    faults.step_clock(offset)
    assert abs(time.time() - right) < 3600
    offset.write_text("-86400")
    assert time.time() < right - 80000
    offset.write_text("")
    assert abs(time.time() - right) < 3600


def test_a_command_needs_its_dashes_and_its_faults_their_form() -> None:
    for words in (["orchestrator", "start"], ["--kill", "a:0", "--", "version"]):
        command = [sys.executable, "-m", "distribai.testing.faults", *words]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        assert done.returncode == 2
        assert "error:" in done.stderr


EXAMPLES = re.findall(r"```python\n(.*?)```", PAGE.read_text(encoding="utf-8"), re.DOTALL)


@pytest.mark.e2e
@pytest.mark.parametrize("code", EXAMPLES, ids=["a start that is killed", "a bad line"])
def test_the_pages_examples_run(tmp_path: Path, code: str) -> None:
    script = tmp_path / "example.py"
    script.write_text(code)
    done = subprocess.run(
        [sys.executable, str(script)], capture_output=True, text=True, check=False, cwd=tmp_path
    )
    assert done.returncode == 0, done.stderr
