"""One real job, end to end: separate processes, a newcomer, a loss, exactly-once positions."""

from __future__ import annotations

import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from safetensors.numpy import load_file

from distribai.client import Client
from tests.e2e.audit import audit
from tests.e2e.harness import EVERYTHING, GridProcesses, grid, wait_for

pytestmark = pytest.mark.e2e

SHORT = ["--batch", "4", "--seq-len", "32"]


@pytest.fixture(scope="module")
def idle(tmp_path_factory: pytest.TempPathFactory) -> Iterator[GridProcesses]:
    """A grid without nodes, for all tests that start none of their own."""
    with grid(tmp_path_factory.mktemp("idle"), nodes=0) as g:
        yield g


def create(grid: GridProcesses, name: str, steps: int, *more: str, inner_steps: int = 10) -> str:
    """A job, accepted; its id."""
    job_id: str = grid.json(
        "job", "create", name, str(steps), "--inner-steps", str(inner_steps), *SHORT, *more
    )["id"]
    grid.cli("job", "accept", job_id)
    return job_id


def job(grid: GridProcesses, ref: str) -> dict[str, Any]:
    found: dict[str, Any] = grid.look(lambda client: client.job(ref)).model_dump()
    return found


def completed(grid: GridProcesses, ref: str) -> dict[str, Any]:
    """The job's record once it has completed."""

    def probe() -> dict[str, Any] | None:
        found = job(grid, ref)
        assert found["state"] not in ("failed", "cancelled", "declined"), found["reason"]
        return found if found["state"] == "completed" else None

    return wait_for(f"{ref} completes", probe)


def accepted_training(grid: GridProcesses, ref: str) -> list[dict[str, Any]]:
    tasks = grid.json("job", "tasks", ref)
    return [t for t in tasks if t["phase"] == "train" and t["state"] == "accepted"]


def test_a_grid_trains_a_newcomer_joins_a_lost_node_is_replaced(tmp_path: Path) -> None:
    with grid(tmp_path, nodes=3) as g:
        job_id = create(g, "whole", 150, "--workers-min", "2", "--preset", "fast")
        wait_for("the third version", lambda: job(g, job_id)["version"] >= 3)

        before = job(g, job_id)["version"]
        g.start_node()
        wait_for("the newcomer is online", lambda: g.look(Client.health).nodes_online == 4)
        g.nodes[0].send_signal(signal.SIGKILL)
        g.nodes[0].wait()

        done = completed(g, job_id)
        assert done["version"] == done["rounds_total"] == 15
        assert audit(g.state, job_id) == 15

        names = {n["id"]: n["name"] for n in g.json("nodes", "list")}
        tasks = accepted_training(g, job_id)
        by_node: dict[str, list[int]] = {}
        for task in tasks:
            by_node.setdefault(names[task["node_id"]], []).append(task["round"])
        assert min(by_node["node3"]) > before - 1, "a newcomer starts with a later version"
        assert max(by_node["node0"]) < 14, "the lost node is out of the last rounds"
        assert max(by_node["node3"]) == 14

        losses = [h["loss"] for h in done["held_out"] if h["loss"] is not None]
        assert losses[-1] < losses[0] - 0.3

        versions = {v["version"]: v for v in g.json("job", "versions", job_id)}
        assert set(versions) == set(range(16))

        out = tmp_path / "model.safetensors"
        g.cli("export-weights", job_id, "--format", "safetensors", "--out", str(out))
        weights = load_file(out)
        assert sum(w.size for w in weights.values()) == done["parameters"]
        sample = g.json("generate", job_id, "--prompt", "def ", "--max-tokens", "20")
        assert sample["text"]


def test_a_node_that_says_goodbye_hands_in_what_it_did(tmp_path: Path) -> None:
    with grid(tmp_path, nodes=2) as g:
        job_id = create(g, "goodbye", 200, inner_steps=50)
        wait_for("both train", lambda: job(g, job_id)["nodes_working"] == 2)
        g.nodes[0].send_signal(signal.SIGTERM)
        assert g.nodes[0].wait(60) == 0
        done = completed(g, job_id)
        assert done["version"] == 4
        assert audit(g.state, job_id) == 4


@pytest.mark.skipif(
    not EVERYTHING,
    reason="make chaos runs it; the seeded storm kills the orchestrator in every run",
)
def test_the_orchestrator_can_be_restarted_under_a_running_job(tmp_path: Path) -> None:
    with grid(tmp_path, nodes=2) as g:
        job_id = create(g, "restart", 60)
        wait_for("the second version", lambda: job(g, job_id)["version"] >= 2)
        assert g.orchestrator is not None
        g.orchestrator.send_signal(signal.SIGKILL)
        g.orchestrator.wait()
        assert g.orchestrator.stdout is not None
        g.orchestrator.stdout.close()
        g.start_orchestrator()
        done = completed(g, job_id)
        assert done["version"] == 6
        assert audit(g.state, job_id) == 6


def test_a_recipe_is_planned_refused_and_followed(tmp_path: Path) -> None:
    corpus = tmp_path / "corpus.txt"
    corpus.write_text("the quick brown fox jumps over the lazy dog. " * 400)
    recipe = tmp_path / "job.yaml"
    recipe.write_text(
        "name: fox\nsteps: 20\nseq_len: 32\nbatch: 4\n"
        "data: {files: [corpus.txt]}\nrounds: {inner_steps: 10}\n"
    )
    with grid(tmp_path / "grid", nodes=1) as g:
        shown = g.json("submit", "--recipe", str(recipe), "--dry-run")
        assert shown["plan"]["rounds"] == 2
        assert g.json("job", "list") == []

        done = g.cli("submit", "--recipe", str(recipe), "--yes", "--accept")
        assert "Completed." in done.stderr
        assert job(g, "fox")["state"] == "completed"

        for text, code in (
            ("name: x\nsteps: 0\n", "spec.steps"),
            ("name: x\nsteps: 10\nstepz: 3\n", "spec.invalid"),
            ("name: x\nsteps: ten\n", "spec.invalid"),
            ("name: x\nsteps: 10\nmodel: {architecture_config: "
             "{dim: 30, layers: 1, heads: 4, ffn_dim: 8}}\n", "spec.model"),
            ("name: x\nsteps: 10\ndata: {files: [nowhere.txt]}\n", "data.missing"),
        ):  # fmt: skip
            recipe.write_text(text)
            refused = g.cli("submit", "--recipe", str(recipe), "--yes", check=None)
            assert refused.returncode == 2, refused.stderr
            assert f"code: {code}" in refused.stderr
        for name, content, code in (
            ("empty.txt", b"", "data.empty"),
            ("latin.txt", b"caf\xe9 " * 1000, "data.not_utf8"),
            ("short.txt", b"hello", "data.too_short"),
        ):
            (tmp_path / name).write_bytes(content)
            refused = g.cli("job", "create", "x", "10", "--data", str(tmp_path / name), check=None)
            assert refused.returncode == 2, refused.stderr
            assert f"code: {code}" in refused.stderr
        assert len(g.json("job", "list")) == 1


def test_jobs_wait_for_the_operator_and_can_be_declined_and_cancelled(idle: GridProcesses) -> None:
    first = idle.json("job", "create", "one", "1000")
    second = idle.json("job", "create", "two", "1000")
    assert idle.json("job", "show", first["id"])["state"] == "submitted"
    idle.cli("job", "decline", first["id"], "--why", "not today")
    assert job(idle, "one")["reason"] == "not today"
    idle.cli("job", "accept", "two")
    idle.cli("job", "cancel", second["id"])
    assert job(idle, "two")["state"] == "cancelled"
    assert idle.cli("job", "accept", "one", check=None).returncode == 5
    assert idle.cli("job", "show", "three", check=None).returncode == 3
    assert {j["name"]: j["state"] for j in idle.json("job", "list")} == {
        "one": "declined",
        "two": "cancelled",
    }


def test_a_second_orchestrator_and_a_taken_port_are_refused(
    idle: GridProcesses, tmp_path: Path
) -> None:
    second = idle.cli("orchestrator", "start", "--grpc-port", "0", "--http-port", "0", check=None)
    assert "code: grid.locked" in second.stderr
    port = idle.ready["http"].rsplit(":", 1)[1]
    taken = idle.cli(
        "orchestrator", "start", "--grpc-port", "0", "--http-port", port,
        "--state-dir", str(tmp_path / "other"), check=None,
    )  # fmt: skip
    assert "code: grid.port" in taken.stderr
    undecided = idle.cli(
        "orchestrator", "start", "--tls", "--insecure", "--state-dir", str(tmp_path / "third"),
        check=None,
    )  # fmt: skip
    assert "code: config.invalid" in undecided.stderr
