"""``distribai demo``: it trains, ends with status 0 and leaves nothing behind, also on Ctrl-C."""

from __future__ import annotations

import signal
import subprocess
from pathlib import Path

import pytest
from safetensors.numpy import load_file

from tests.e2e.harness import CAP_S, CLI, clean_environment, descendants, wait_for

pytestmark = pytest.mark.e2e


def start(directory: Path, *arguments: str) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [*CLI, "demo", "--dir", str(directory), *arguments],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env=clean_environment(),
    )


def test_the_quick_demo_trains_and_shows_its_figures(tmp_path: Path) -> None:
    # Two rounds instead of four: CI's own step runs the whole of it.
    demo = start(tmp_path / "demo", "--quick", "--steps", "40")
    out, err = demo.communicate(timeout=2 * CAP_S)
    assert demo.returncode == 0, err
    for words in ("held-out loss", "times as much", "model.safetensors", "A sample"):
        assert words in out
    assert load_file(tmp_path / "demo" / "model.safetensors")


@pytest.mark.parametrize("moment", ["at once", "while it trains"])
def test_ctrl_c_ends_everything_with_status_0(tmp_path: Path, moment: str) -> None:
    demo = start(tmp_path / "demo")
    if moment == "while it trains":
        wait_for(
            "three training children",
            lambda: sum("training-child" in c.cmdline() for c in descendants(demo.pid)) >= 3,
        )
    else:
        wait_for("an orchestrator", lambda: descendants(demo.pid))
    below = descendants(demo.pid)
    demo.send_signal(signal.SIGINT)
    out, err = demo.communicate(timeout=CAP_S)
    assert demo.returncode == 0, err
    assert "Stopped." in out
    wait_for("no process is left", lambda: not any(p.is_running() for p in below), 10)


def test_a_directory_that_is_not_a_demos_is_left_alone(tmp_path: Path) -> None:
    (tmp_path / "thesis.txt").write_text("years of work")
    demo = start(tmp_path)
    _, err = demo.communicate(timeout=CAP_S)
    assert demo.returncode != 0
    assert "not an earlier demo" in err
    assert (tmp_path / "thesis.txt").read_text() == "years of work"
