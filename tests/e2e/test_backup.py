"""A grid is saved under load, dies, and goes on from any of its backups, with the same nodes."""

from __future__ import annotations

import signal
from pathlib import Path

import pytest

from tests.e2e.audit import audit
from tests.e2e.harness import EVERYTHING, GridProcesses, grid, wait_for
from tests.e2e.test_grid import completed, create, job

pytestmark = pytest.mark.e2e


def end_orchestrator(g: GridProcesses, how: signal.Signals) -> None:
    assert g.orchestrator is not None
    g.orchestrator.send_signal(how)
    g.orchestrator.wait(60)
    assert g.orchestrator.stdout is not None
    g.orchestrator.stdout.close()


def test_a_grid_goes_on_from_any_backup_that_was_made_while_it_trained(tmp_path: Path) -> None:
    with grid(tmp_path, nodes=2) as g:
        # What the codecs of both ways left is in the backup, and on the nodes' disks.
        job_id = create(g, "saved", 40, "--preset", "fast")
        saved = {}
        for version in (1, 3):
            wait_for(f"version {version}", lambda least=version: job(g, job_id)["version"] >= least)
            out = tmp_path / f"backup{version}"
            g.cli("grid", "backup", str(out))
            saved[version] = out
        # Into the first one's directory once more: what it had is not copied again.
        again = g.json("grid", "backup", str(saved[1]))
        assert 0 < again["copied_blobs"] < again["blobs"]
        # The last rounds may or may not be over; either way they are lost with this disk.
        end_orchestrator(g, signal.SIGKILL)

        link = g.ready["join_link"]
        for number, out in enumerate(saved.values()):
            if number:
                end_orchestrator(g, signal.SIGTERM)
            state = tmp_path / f"restored{number}"
            g.cli("grid", "restore", str(out), "--state-dir", str(state))
            g.start_orchestrator("--state-dir", str(state))
            assert g.ready["join_link"] == link
            assert g.ready["operator_token"].startswith("dop_")
            done = completed(g, job_id)
            assert done["version"] == done["rounds_total"] == 4
            assert audit(state, job_id) == 4
            assert [n.poll() for n in g.nodes] == [None, None], "no node was restarted"


@pytest.mark.skipif(
    not EVERYTHING,
    reason="make chaos runs it; tests/cli and tests/orchestrator move grids in small",
)
def test_a_grid_moves_to_another_address_and_its_nodes_follow_with_the_new_link(
    tmp_path: Path,
) -> None:
    with grid(tmp_path, nodes=1) as g:
        job_id = create(g, "moved", 30)
        wait_for("the first version", lambda: job(g, job_id)["version"] >= 1)
        before = [n["id"] for n in g.json("nodes", "list")]
        end_orchestrator(g, signal.SIGTERM)
        g.cli("grid", "backup", str(tmp_path / "backup"))
        link = g.ready.pop("join_link")
        g.nodes[0].send_signal(signal.SIGKILL)
        g.nodes[0].wait()

        state = tmp_path / "moved"
        g.cli("grid", "restore", str(tmp_path / "backup"), "--state-dir", str(state))
        g.ready.clear()  # other ports: another address
        g.start_orchestrator("--state-dir", str(state))
        assert g.ready["join_link"] != link
        killed = g.nodes.pop()
        assert killed.stdout is not None
        killed.stdout.close()
        g.start_node()  # in the state directory of the killed one, with the new link
        assert completed(g, job_id)["version"] == 3
        assert audit(state, job_id) == 3
        assert [n["id"] for n in g.json("nodes", "list")] == before
