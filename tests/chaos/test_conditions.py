"""What home machines and laptops do to a grid, each with real processes: it goes on, and its
records are those of a quiet day. Clocks: ``test_clock``; torn files: ``test_damage``; kill -9:
``test_points``.
"""

from __future__ import annotations

import hashlib
import os
import shutil
import signal
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import httpx
import pytest

from distribai.client import Client
from tests.chaos.storm import Storm, Verdict
from tests.e2e.harness import EVERYTHING, descendants, wait_for

pytestmark = [
    pytest.mark.e2e,
    pytest.mark.skipif(
        not EVERYTHING,
        reason="make chaos runs them; the seeded storm has most of them in every run",
    ),
]

ROUNDS = 6


@contextmanager
def storm(root: Path, *options: str, on_node: tuple[str, ...] = ()) -> Iterator[Storm]:
    """Three nodes that pretend to train, behind proxies."""
    made = Storm(root)
    failed = True
    try:
        made.begin(*options, on_node=on_node)
        yield made
        failed = False
    finally:
        stubborn = made.end()
        if failed:
            for log in sorted(root.glob("*.log")):
                sys.stderr.write(f"\n--- {log.name}\n{log.read_text()[-4000:]}")
    assert not stubborn, f"had to be killed: {stubborn}"


def assert_unharmed(verdict: Verdict) -> None:
    assert verdict.problems == []
    assert verdict.version == ROUNDS


def refusal(grid: Storm) -> str:
    """The code of the error that an upload gets, empty if it gets none."""
    data = os.urandom(100)
    wanted = {"sha256": hashlib.sha256(data).hexdigest(), "size": len(data)}
    headers = {"Authorization": f"Bearer {grid.token}"}
    with httpx.Client(base_url=grid.ready["url"], headers=headers) as http:
        answer = http.post("/api/v1/blobs", json=wanted)
        if answer.status_code == 201:
            answer = http.patch(
                f"/api/v1/blobs/uploads/{answer.json()['upload_id']}",
                content=data,
                headers={
                    "Upload-Offset": "0",
                    "Content-Type": "application/offset+octet-stream",
                },
            )
    return "" if answer.is_success else str(answer.json()["code"])


def kinds(grid: Storm, job: str) -> list[str]:
    """The kinds of all events of a job."""
    with Client(grid.ready["url"], grid.token) as client:
        return [event.kind for event in client.events(job)]


def test_a_full_disk_of_the_orchestrator_holds_the_job_up_until_there_is_room(
    tmp_path: Path,
) -> None:
    full = tmp_path / "full"
    with storm(tmp_path, "--full", "blob.*:1:100000", "--while", str(full)) as grid:
        job = grid.create(ROUNDS)
        grid.reach(job, 2)
        full.touch()
        wait_for("it refuses uploads", lambda: refusal(grid) == "blob.store")
        held = grid.record(job)
        assert held is not None
        assert held.state == "running", "a full disk fails no job"
        full.unlink()
        assert_unharmed(grid.finish(job))


def test_a_full_disk_of_a_node_costs_attempts_and_never_the_daemon(tmp_path: Path) -> None:
    full = tmp_path / "full"
    fault = ("--full", "node.*:1:100000", "--while", str(full))
    with storm(tmp_path, on_node=fault) as grid:
        job = grid.create(ROUNDS)
        grid.reach(job, 1)
        full.touch()
        grid.reach(job, 3)
        full.unlink()
        assert_unharmed(grid.finish(job))
        assert grid.nodes[0].poll() is None


def test_a_node_frozen_beyond_its_lease_changes_nothing_when_it_thaws(tmp_path: Path) -> None:
    with storm(tmp_path) as grid:
        job = grid.create(ROUNDS)
        grid.reach(job, 1)
        frozen = grid.nodes[0]
        for process in descendants(frozen.pid):
            process.suspend()
        frozen.send_signal(signal.SIGSTOP)
        with Client(grid.ready["url"], grid.token) as client:
            wait_for(
                "it counts as gone",
                lambda: [n for n in client.nodes() if n.liveness == "offline"],
            )
        frozen.send_signal(signal.SIGCONT)
        for process in descendants(frozen.pid):
            process.resume()
        assert_unharmed(grid.finish(job))
        assert frozen.poll() is None


def test_a_node_without_a_network_for_a_while_comes_back_with_its_work(tmp_path: Path) -> None:
    with storm(tmp_path) as grid:
        job = grid.create(ROUNDS)
        grid.reach(job, 1)
        grid.wires.do(1, "cut")
        grid.reach(job, 3)
        grid.wires.do(1, "heal")
        assert_unharmed(grid.finish(job))


def test_a_slow_network_loses_nothing(tmp_path: Path) -> None:
    with storm(tmp_path) as grid:
        job = grid.create(ROUNDS)
        grid.wires.slow(2, bytes_per_s=400_000.0, delay_s=0.02)
        assert_unharmed(grid.finish(job))


def test_a_training_child_that_the_kernel_kills_for_memory_is_replaced(tmp_path: Path) -> None:
    with storm(tmp_path) as grid:
        job = grid.create(ROUNDS)
        grid.reach(job, 1)
        for child in descendants(grid.nodes[0].pid):
            child.kill()
        assert_unharmed(grid.finish(job))
        assert grid.nodes[0].poll() is None


def test_an_orchestrator_that_is_told_to_stop_and_started_again_goes_on(tmp_path: Path) -> None:
    with storm(tmp_path) as grid:
        job = grid.create(ROUNDS)
        grid.reach(job, 2)
        assert grid.orchestrator is not None
        grid.orchestrator.send_signal(signal.SIGTERM)
        assert grid.orchestrator.wait(60) == 0
        assert grid.orchestrator.stdout is not None
        grid.orchestrator.stdout.close()
        grid.start()
        assert_unharmed(grid.finish(job))
        assert "round.abandoned" not in kinds(grid, job)


def test_what_a_power_cut_leaves_on_the_disk_is_a_grid_that_goes_on(tmp_path: Path) -> None:
    """As far as a test can: the state directory is copied file by file while everything runs, and
    an orchestrator starts on the copy, in the place of the one that is killed."""
    with storm(tmp_path / "grid") as grid:
        job = grid.create(ROUNDS)
        grid.reach(job, 2)
        assert grid.orchestrator is not None
        grid.orchestrator.send_signal(signal.SIGSTOP)  # all files at one instant
        shutil.copytree(grid.state, tmp_path / "copy")
        grid.orchestrator.kill()
        grid.orchestrator.wait(60)
        assert grid.orchestrator.stdout is not None
        grid.orchestrator.stdout.close()
        shutil.rmtree(grid.state)
        (tmp_path / "copy").rename(grid.state)
        grid.start()
        assert_unharmed(grid.finish(job))
