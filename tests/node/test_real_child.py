"""The daemon with the real training child: two rounds of a small job, and ends in the middle."""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import AsyncIterator
from dataclasses import replace
from pathlib import Path

import pytest

from distribai.core.child import Done
from distribai.core.ranges import SampleRange
from distribai.core.tasks import Assignment, Outcome
from distribai.wire import convert
from distribai.wire.v1 import distribai_pb2 as pb
from tests.node.helpers import BlobServer, ScriptedOrchestrator, eventually, serving
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


STEPS = 24
OFTEN = {"threads": 1, "device": "cpu", "checkpoint_s": 1e-6}


class Long:
    """A job whose one round is long enough to be interrupted."""

    def __init__(self, grid: Grid, tmp_path: Path) -> None:
        folder = tmp_path / "job"
        folder.mkdir()
        made = training.make_spec()
        spec = replace(made, steps=STEPS, rounds=replace(made.rounds, inner_steps=STEPS))
        job = training.Grid(folder, spec)
        self.grid, self.state = grid, tmp_path / "state"
        self.task = job.task("long", steps=STEPS, samples=(SampleRange(0, STEPS * training.B),))
        for path in job.blobs.values():
            grid.server.put(path.read_bytes())

    async def paused_after_a_checkpoint(self) -> None:
        """The child stands still somewhere between two steps, and its checkpoint is on disk."""
        await eventually(lambda: list(self.state.glob("work/*/checkpoint.json")))
        self.grid.daemon.governor.pause()
        executor = self.grid.daemon._worker._executors["package"]
        before = -1
        while before != executor._kept_steps:  # type: ignore[attr-defined]
            before = executor._kept_steps  # type: ignore[attr-defined]
            await asyncio.sleep(0.5)
        assert 0 < before < STEPS

    async def result(self) -> pb.TaskResult:
        result = await self.grid.peer.hear("task_result")
        assert isinstance(result, pb.TaskResult)
        self.grid.peer.acknowledge(result)
        await eventually(lambda: not list(self.grid.daemon._worker.hands))
        return result


def lavish(monkeypatch: pytest.MonkeyPatch) -> None:
    """Checkpoints may take as long as they like."""
    monkeypatch.setattr("distribai.node.daemon.CHECKPOINT_SHARE", 1e9)


async def test_a_child_that_is_killed_in_the_middle_costs_nothing(
    grid: Grid, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    lavish(monkeypatch)
    long = Long(grid, tmp_path)
    await grid.up(threads=1, device="cpu", checkpoint_s=0.0)
    grid.peer.assign(long.task)
    whole = await long.result()
    await grid.stop()

    daemon = await grid.up(share=0.05, **OFTEN)
    executor = daemon._worker._executors["package"]
    grid.peer.assign(replace(long.task, attempt=2))
    await long.paused_after_a_checkpoint()
    os.kill(executor._child.pid, signal.SIGKILL)  # type: ignore[attr-defined]
    daemon.governor._share = 1.0  # no more need to be slow
    daemon.governor.contribute()
    result = await long.result()
    assert executor._resumed_at > 0  # type: ignore[attr-defined]
    assert (result.status, result.reason, result.steps) == ("done", "", STEPS)
    assert _tensors(grid, result) == _tensors(grid, whole)
    assert result.metrics["loss_first"] == whole.metrics["loss_first"]
    assert result.metrics["loss_last"] == whole.metrics["loss_last"]


async def test_a_daemon_that_ends_in_the_middle_goes_on_from_the_checkpoint(
    grid: Grid, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    lavish(monkeypatch)
    long = Long(grid, tmp_path)
    await grid.up(share=0.05, **OFTEN)
    grid.peer.assign(long.task)
    await long.paused_after_a_checkpoint()
    await grid.stop()
    daemon = grid.start(**OFTEN)
    await grid.join(keep=[pb.TaskInHand(task_id=long.task.task_id, attempt=1)])
    result = await long.result()
    assert daemon._worker._executors["package"]._resumed_at > 0  # type: ignore[attr-defined]
    assert (result.status, result.reason, result.steps) == ("done", "", STEPS)
    await grid.stop()
    await grid.up(threads=1, device="cpu", checkpoint_s=0.0)
    grid.peer.assign(replace(long.task, attempt=2))
    whole = await long.result()
    assert _tensors(grid, result) == _tensors(grid, whole)


def _tensors(grid: Grid, result: pb.TaskResult) -> bytes:
    """The tensors' bytes of a delta; its header names the attempt."""
    data = grid.server.blobs[result.delta.sha256]
    length = int.from_bytes(data[:8], "little")
    return data[8 + length :]
