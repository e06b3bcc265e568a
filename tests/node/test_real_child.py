"""The daemon with the real training child: two rounds of a small job."""

from __future__ import annotations

from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from distribai.core.child import Done
from distribai.core.tasks import Assignment, Outcome
from distribai.wire import convert
from tests.node.helpers import BlobServer, ScriptedOrchestrator, serving
from tests.node.test_daemon import Grid
from tests.training import daemon as training


@pytest.fixture
async def grid(tmp_path: Path) -> AsyncIterator[Grid]:
    async with ScriptedOrchestrator() as orchestrator, serving(BlobServer()) as server:
        made = Grid(orchestrator, server, tmp_path)
        made.command = ()
        yield made
        await made.stop()


async def test_a_node_keeps_step_with_the_merge_for_two_rounds(grid: Grid, tmp_path: Path) -> None:
    folder = tmp_path / "job"
    folder.mkdir()
    job = training.Grid(folder, training.make_spec())
    await grid.up(threads=1, device="cpu")

    async def do(task: Assignment) -> Outcome:
        for path in job.blobs.values():
            grid.server.put(path.read_bytes())
        grid.peer.assign(task)
        result = await grid.peer.hear("task_result")
        grid.peer.acknowledge(result)
        return convert.outcome_from_wire(result)[0]

    losses = []
    for number in range(2):
        outcome = await do(job.task(f"train{number}", start=number * 8))
        assert (outcome.status, outcome.reason) == ("done", "")
        assert outcome.base_hash == job.hash
        assert outcome.delta is not None
        delta = folder / f"delta{number}.safetensors"
        delta.write_bytes(grid.server.blobs[outcome.delta.sha256])
        job.merge([Done(outcome, str(delta))])
        checked = await do(job.task(f"check{number}", "evaluate", params={"batches": 3}))
        assert (checked.status, checked.base_hash) == ("done", job.hash)
        losses.append(checked.metrics["held_out_loss"])
    assert losses[1] < losses[0] < 6
    fetched = [path for method, path, _ in grid.server.requests if method == "GET"]
    assert len(fetched) == len(set(fetched))
