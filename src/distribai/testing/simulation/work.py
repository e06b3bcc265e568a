"""What a virtual node sends in: real deltas of a real, very small model."""

from __future__ import annotations

import itertools
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

import numpy as np

from distribai.core.architectures import manifest_of
from distribai.core.child import RESIDUAL
from distribai.core.ranges import Ranges, SampleRange
from distribai.core.spec import BlobRef
from distribai.core.tasks import Assignment, Outcome
from distribai.merge.delta import DeltaHeader, write_delta, write_delta_with_feedback
from distribai.merge.feedback import Feedback
from distribai.merge.weights import Weights, open_weights
from distribai.node.feedback import FeedbackStore, has_feedback
from distribai.orchestrator.context import Grid
from distribai.store.statements import jobs
from distribai.testing.simulation.stores import PacedBlobs

SIZE = 0.001
"""Standard deviation of the values of a delta."""


class Workshop:
    """Makes outcomes; keeps the weights of the latest versions, which many nodes start from."""

    def __init__(self, grid: Grid, blobs: PacedBlobs) -> None:
        self._grid, self._blobs = grid, blobs
        self._numbers = itertools.count()
        self._bases: dict[tuple[str, int], Weights] = {}

    async def trained(
        self, task: Assignment, device: int, steps: int, seconds: float, kept: FeedbackStore
    ) -> Outcome:
        """The outcome of ``steps`` inner steps that took ``seconds``; its delta is in the store,
        what its codec did not send is ``kept``, as on a real node."""
        tokens = steps * task.spec.batch * task.spec.seq_len
        return Outcome(
            task_id=task.task_id,
            attempt=task.attempt,
            status="done",
            delta=await self._delta(task, device, steps, tokens, kept),
            samples=first(task.samples, steps * task.spec.batch),
            steps=steps,
            tokens=tokens,
            base_hash=task.base.weights_hash,
            metrics={"loss_first": 5.0, "loss_last": 4.0, "seconds": seconds},
        )

    def judged(self, task: Assignment) -> Outcome:
        """The outcome of an evaluation or a sample."""
        metrics: Mapping[str, float] = {}
        if task.phase == "evaluate":
            metrics = {"held_out_loss": 3.0 + 1.0 / (1 + task.round), "held_out_tokens": 64.0}
        return Outcome(
            task_id=task.task_id,
            attempt=task.attempt,
            status="done",
            base_hash=task.base.weights_hash,
            metrics=metrics,
            text="" if task.phase == "evaluate" else str(task.params.get("prompt", "")),
        )

    async def _delta(
        self, task: Assignment, device: int, steps: int, tokens: int, kept: FeedbackStore
    ) -> BlobRef:
        spec = task.spec
        manifest = manifest_of(spec.model.family, spec.model.config)
        base = await self._base(task)
        rng = np.random.default_rng([task.attempt, *task.task_id.encode()])
        local = {
            name: (value - rng.normal(0.0, SIZE, value.shape)).astype(np.float32)
            for name, value in base.items()
        }
        header = DeltaHeader(
            job_id=task.job_id,
            task_id=task.task_id,
            attempt=task.attempt,
            base_version=task.round,
            manifest_hash=manifest.hash,
            codec=spec.codec_up_of(task.round),
            tokens=tokens,
            steps=steps,
        )
        folder = self._grid.scratch / f"work-{next(self._numbers)}"
        folder.mkdir()
        path = folder / "delta"
        owed = kept.prepare(task, device) if has_feedback(task) else None
        if owed is None:
            ref = write_delta(path, manifest, base, local, header)
            await self._blobs.put_upload(path, ref)
            return ref
        feedback = Feedback(Path(owed.kept) if owed.kept else None, folder / RESIDUAL)
        lost = [Path(p) for p in owed.lost]
        ref, rest = write_delta_with_feedback(path, manifest, base, local, header, feedback, lost)
        own = kept.adopt(task, device, folder, path, ref, rest)
        sent = folder / "sent"
        sent.write_bytes(own.read_bytes())
        await self._blobs.put_upload(sent, ref)
        kept.settle(task, device)
        return ref

    async def _base(self, task: Assignment) -> Weights:
        key = (task.job_id, task.round)
        if key not in self._bases:
            async with self._grid.db.read() as tx:
                row = await jobs.version(tx, *key)
            assert row is not None, "a task is made for a version that exists"
            manifest = manifest_of(task.spec.model.family, task.spec.model.config)
            path = self._blobs.path(row.weights_sha)
            self._bases = {k: v for k, v in self._bases.items() if k[1] >= task.round - 1}
            self._bases[key] = {
                name: np.array(value) for name, value in open_weights(path, manifest).items()
            }
        return self._bases[key]


def first(ranges: Ranges, count: int) -> Ranges:
    """The first ``count`` positions of ``ranges``, which hold at least as many."""
    taken: list[SampleRange] = []
    for r in ranges:
        if count <= 0:
            break
        taken.append(replace(r, stop=min(r.stop, r.start + count)))
        count -= len(taken[-1])
    return tuple(taken)
