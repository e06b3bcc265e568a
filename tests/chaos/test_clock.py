"""The host's clock is stepped under a running orchestrator, and set back before the next start."""

from __future__ import annotations

import json
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from distribai.client import Client
from distribai.testing import faults
from tests.e2e.harness import clean_environment

pytestmark = pytest.mark.e2e

DAY_S = 86400.0


@contextmanager
def orchestrator(root: Path, clock: Path, token: str = "") -> Iterator[tuple[Client, str]]:
    """A real one on the host's clock as ``clock`` bends it; its client, and its token."""
    arguments = ["orchestrator", "start", "--json", "--grpc-port", "0", "--http-port", "0"]
    with (root / "log").open("a") as log:
        process = subprocess.Popen(
            faults.command("--clock", str(clock), arguments=arguments),
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=log,
            env={**clean_environment(), "DISTRIBAI_HOME": str(root)},
            text=True,
        )
    try:
        assert process.stdout is not None
        line = process.stdout.readline()
        assert line, (root / "log").read_text()
        ready = json.loads(line)
        token = ready["operator_token"] or token
        with Client(ready["url"], token) as client:
            yield client, token
    finally:
        process.terminate()
        process.wait(60)
        if process.stdout is not None:
            process.stdout.close()


def test_no_step_of_the_hosts_clock_moves_the_grids_time(tmp_path: Path) -> None:
    clock = tmp_path / "clock"
    with orchestrator(tmp_path, clock) as (client, token):
        before = client.health().now
        clock.write_text(str(-DAY_S))
        back = client.health().now
        clock.write_text(str(DAY_S))
        ahead = client.health().now
    assert before <= back <= ahead < before + DAY_S / 2
    clock.write_text(str(DAY_S))
    with orchestrator(tmp_path, clock, token) as (client, _):
        tomorrow = client.health().now
    assert tomorrow > before + DAY_S / 2, "a start reads the host's clock"
