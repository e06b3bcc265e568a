from __future__ import annotations

import importlib
import os
import subprocess
import sys
from pathlib import Path

import pytest

from distribai import spawn
from distribai.spawn import ENTRIES, Entry


def test_a_child_is_this_interpreter_with_one_entry() -> None:
    command = spawn.command("cli", "health", "--json")
    assert command[0] == sys.executable
    assert command[-3:] == ["cli", "health", "--json"]
    assert "-m" not in command


def test_a_frozen_program_starts_itself(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "frozen", True, raising=False)
    command = spawn.command("training-child", "x")
    assert command == [sys.executable, "--distribai-child", "training-child", "x"]
    assert spawn.is_child(command)
    assert not spawn.is_child([sys.executable, "--version"])


def test_an_unknown_entry_is_refused() -> None:
    with pytest.raises(KeyError):
        spawn.command("os:system")


@pytest.mark.parametrize("entry", ENTRIES)
def test_every_entry_names_a_module_of_this_program(entry: str) -> None:
    module = ENTRIES[entry].target.split(":")[0]
    assert module.startswith("distribai.")
    assert ENTRIES[entry].dies in ("kill", "terminate")


@pytest.mark.parametrize("flag", [[], ["--distribai-child"]])
def test_a_child_runs_its_entry_with_its_arguments_and_exits_with_its_status(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, flag: list[str]
) -> None:
    (tmp_path / "entry_for_test.py").write_text("import sys\ndef main(): return len(sys.argv)\n")
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setitem(ENTRIES, "test", Entry("entry_for_test:main", "kill"))
    monkeypatch.setattr(sys, "argv", ["program", *flag, "test", "a", "b"])
    monkeypatch.delenv(spawn.PARENT, raising=False)
    importlib.invalidate_caches()
    with pytest.raises(SystemExit) as ended:
        spawn.child()
    assert ended.value.code == 3
    assert sys.argv == ["test", "a", "b"]


def test_a_child_does_not_import_what_lies_in_its_working_directory(tmp_path: Path) -> None:
    (tmp_path / "structlog.py").write_text("raise SystemExit('hijacked')")
    command = spawn.command("training-child")
    code = command.index("-c") + 1
    command[code:] = ["import structlog, os; print(os.environ['DISTRIBAI_PARENT_PID'])"]
    ran = subprocess.run(
        command, cwd=tmp_path, env=spawn.environment(), check=True, capture_output=True, text=True
    )
    assert int(ran.stdout) == os.getpid()
