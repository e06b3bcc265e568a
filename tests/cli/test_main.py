"""What happens around every command: words, statuses, what is imported."""

from __future__ import annotations

import logging
import os
import subprocess
import sys
from pathlib import Path

import pytest
import structlog

from distribai import __version__
from distribai.cli import logs, output
from distribai.errors import CODES
from tests.cli.conftest import Run

HEAVY = (
    "torch",
    "numpy",
    "grpc",
    "sqlalchemy",
    "fastapi",
    "textual",
    "httpx",
    "pydantic",
    "structlog",
    "yaml",
    "obstore",
)


def python(code: str, *words: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-c", code, *words], capture_output=True, text=True, check=False
    )


def test_help_imports_nothing_heavy_and_is_quick() -> None:
    code = (
        "import resource, sys\n"
        "from distribai.cli.main import main\n"
        "sys.argv = ['distribai', '--help']\n"
        "assert main() == 0\n"
        "used = resource.getrusage(resource.RUSAGE_SELF)\n"
        f"found = [m for m in {HEAVY!r} if m in sys.modules]\n"
        "print(found, used.ru_utime + used.ru_stime, file=sys.stderr)\n"
    )
    done = python(code)
    assert done.returncode == 0, done.stderr
    assert "orchestrator" in done.stdout
    found, _, seconds = done.stderr.strip().rpartition(" ")
    assert found == "[]"
    # The goal of the product, not a duration of this machine: 0.4 s of CPU, doubled for a busy one.
    assert float(seconds) < 0.8


@pytest.mark.parametrize(
    "words",
    [
        (),
        ("job",),
        ("job", "create", "--help"),
        ("submit", "--help"),
        ("orchestrator", "start", "--help"),
        ("node", "start", "--help"),
        ("config", "show", "--help"),
        ("demo", "--help"),
    ],
)
def test_every_command_explains_itself(offline: Run, words: tuple[str, ...]) -> None:
    done = offline(*words)
    assert done.status == 0
    assert done.out.startswith("Usage: distribai")
    assert done.err == ""


@pytest.mark.parametrize(
    "words",
    [
        ("jobb",),
        ("job", "create"),
        ("job", "create", "name", "many"),
        ("job", "list", "--jsn"),
        ("job", "show"),
        ("job", "decline", "x"),
        ("submit",),
        ("health", "superfluous"),
    ],
)
def test_wrong_words_are_told_on_stderr_with_status_2(offline: Run, words: tuple[str, ...]) -> None:
    done = offline(*words)
    assert done.status == 2
    assert done.out == ""
    lines = done.err.splitlines()
    assert lines[0].startswith("error: ")
    assert any(line.startswith("try: `distribai ") for line in lines)
    assert lines[-1] == "code: usage.invalid"


def test_an_unreachable_grid_is_said_with_what_to_try(offline: Run) -> None:
    done = offline("job", "list", "--url", "http://127.0.0.1:9")
    assert done.status == 8
    assert "code: grid.unreachable" in done.err
    assert "distribai orchestrator start" in done.err
    assert "DISTRIBAI_URL" in done.err


def test_a_defect_is_reported_with_its_traceback_in_a_file(
    offline: Run, home: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def broken() -> str:
        raise RuntimeError("a defect of ours")

    monkeypatch.setattr("platform.python_version", broken)
    done = offline("version")
    assert done.status == 70
    assert "code: internal.fault" in done.err
    assert "Traceback" not in done.err
    (report,) = (home / "state" / "crashes").iterdir()
    assert str(report) in done.err
    assert "a defect of ours" in report.read_text()
    shown = offline("--debug", "version")
    assert shown.status == 70
    assert "Traceback" in shown.err
    assert len(list((home / "state" / "crashes").iterdir())) == 1


def test_debug_shows_the_traceback_of_an_error(
    offline: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("DISTRIBAI_DEBUG", "1")
    done = offline("errors", "nothing")
    assert "Traceback" in done.err
    assert done.status == 3


def test_an_interrupt_ends_with_130(offline: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupted() -> str:
        raise KeyboardInterrupt

    monkeypatch.setattr("platform.python_version", interrupted)
    done = offline("version")
    assert (done.status, done.err) == (130, "Interrupted.\n")


def test_a_reader_that_leaves_is_no_error() -> None:
    reading, writing = os.pipe()
    os.close(reading)
    code = "import sys; from distribai.cli.main import main; sys.exit(main(['errors']))"
    done = subprocess.run(
        [sys.executable, "-c", code],
        stdout=writing,
        stderr=subprocess.PIPE,
        text=True,
        check=False,
    )
    os.close(writing)
    assert (done.returncode, done.stderr) == (141, "")


@pytest.mark.skipif(not Path("/dev/full").is_char_device(), reason="Linux has such a device")
def test_a_full_disk_behind_stdout_is_no_defect() -> None:
    code = "import sys; from distribai.cli.main import main; sys.exit(main(['errors']))"
    with open("/dev/full", "w") as full:
        done = subprocess.run(
            [sys.executable, "-c", code],
            stdout=full,
            stderr=subprocess.PIPE,
            text=True,
            check=False,
        )
    assert (done.returncode, "code: io.file" in done.stderr) == (2, True)


def test_a_command_without_stdout_is_no_defect() -> None:
    code = "import sys; from distribai.cli.main import main; sys.exit(main(['errors']))"
    done = subprocess.run(
        ["sh", "-c", f"exec '{sys.executable}' -c \"{code}\" >&-"],
        capture_output=True,
        text=True,
        check=False,
    )
    assert (done.returncode, done.stderr) == (0, "")


def test_version_and_error_codes_are_told(offline: Run) -> None:
    assert offline("version", "--json").json["distribai"] == __version__
    assert offline("--version").out.strip() == __version__
    assert offline("errors", "spec.steps").out.strip() == CODES["spec.steps"]
    assert {e["code"] for e in offline("errors", "--json").json} == set(CODES)
    near = offline("errors", "spec.step")
    assert near.status == 3
    assert "Did you mean spec.steps?" in near.err


def test_settings_are_shown_with_their_sources_and_without_secrets(
    offline: Run, home: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("DISTRIBAI_TOKEN", "secret-token")
    monkeypatch.setenv("DISTRIBAI_LIVENESS_OFFLINE_S", "4")
    done = offline("config", "show")
    assert "secret-token" not in done.out + done.err
    found = {row["name"]: row for row in offline("config", "show", "--json").json}
    assert found["liveness.offline_s"] == {
        "name": "liveness.offline_s",
        "value": 4.0,
        "source": "DISTRIBAI_LIVENESS_OFFLINE_S",
    }
    assert found["client.token"]["value"] == "(hidden)"
    assert found["orchestrator.http_port"]["source"] == "default"


def test_a_wrong_setting_stops_every_command(offline: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DISTRIBAI_LIVENESS_OFLINE_S", "4")
    done = offline("config", "show")
    assert (done.status, done.out) == (2, "")
    assert "DISTRIBAI_LIVENESS_OFFLINE_S" in done.err


def test_the_installed_command_is_this_one() -> None:
    command = Path(sys.executable).with_name("distribai")
    done = subprocess.run([command, "--version"], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout.strip() == __version__


def test_an_unset_path_is_shown_as_nothing(offline: Run) -> None:
    rows = {row["name"]: row for row in offline("config", "show", "--json").json}
    assert rows["node.state_dir"]["value"] == ""
    assert rows["orchestrator.state_dir"]["value"] != ""


def test_why_is_left_out_when_the_message_says_it() -> None:
    assert not output.adds_something("The model is too large.", "This model is TOO LARGE for us.")
    assert output.adds_something("Nobody answered in time.", "The node is gone.")


def test_counts_have_their_plural() -> None:
    told = [output.plural(n, "node") for n in (0, 1, 2)]
    assert told == ["0 nodes", "1 node", "2 nodes"]


def test_a_log_on_a_terminal_is_short_sentences() -> None:
    entry = {
        "timestamp": "10:00:00",
        "level": "info",
        "event": "task ended",
        "task": "task_0123456789abcdef",
        "status": "done",
        "why": "",
    }
    assert logs.sentence(None, "", entry) == "10:00:00 task ended: task task_01234567, status done"
    entry |= {"level": "warning", "why": "several\x1b[2J words " * 10}
    lines = logs.sentence(None, "", entry).splitlines()
    assert lines[0].startswith("10:00:00 warning: task ended")
    assert len(lines) > 1
    assert all(len(line) < 120 and "\x1b" not in line for line in lines)
    assert logs.sentence(None, "", {"event": "x", "exception": "Tr\n  ace"}) == "x\nTr\n  ace"


def test_no_library_logs_addresses_not_even_with_debug() -> None:
    """Those that a bucket's blobs are fetched by are secrets."""
    root = logging.getLogger()
    before = root.handlers[:], root.level, structlog.get_config()
    try:
        logs.configure(debug=True)
        assert root.isEnabledFor(logging.DEBUG)
        for name in ("httpx", "httpcore.http11"):
            assert not logging.getLogger(name).isEnabledFor(logging.INFO)
    finally:
        root.handlers[:] = before[0]
        root.setLevel(before[1])
        structlog.configure(**before[2])
