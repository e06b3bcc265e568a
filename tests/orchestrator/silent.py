"""A node with error feedback and a canonical copy, over the product's own code, that keeps account:
what it learned, what it sent, what it keeps."""

from __future__ import annotations

import shutil
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import numpy as np

from distribai.core.architectures import manifest_of
from distribai.core.child import RESIDUAL
from distribai.core.spec import BlobRef
from distribai.core.tasks import Assignment, OwnWork
from distribai.merge.delta import DeltaHeader, open_delta, write_delta_with_feedback
from distribai.merge.feedback import Feedback, open_residual, passing
from distribai.merge.weights import Weights
from distribai.node.feedback import FeedbackStore
from distribai.orchestrator.fleet.delivery import weights_ref
from distribai.store.statements import jobs, submissions
from distribai.training.versions import CanonicalCopy
from tests.orchestrator.harness import FakeNode, World

Key = tuple[str, int]


class SilentNode(FakeNode):
    """Its disk outlives ``restart``; ``learned`` and ``sent`` are flat, by task and attempt, of
    every attempt whose result was sent."""

    def __init__(self, world: World, name: str, **kwargs: Any) -> None:
        super().__init__(world, name, **kwargs)
        self.disk = world.root / "nodes" / name
        self.learned: dict[Key, np.ndarray] = {}
        self.sent: dict[Key, np.ndarray] = {}
        self.copies: dict[str, CanonicalCopy] = {}
        self.reached = 0
        self.restart()

    def restart(self) -> None:
        """The daemon and its child died: only the disk is left, and a new session begins."""
        self.store = FeedbackStore(self.disk, 10**9)
        self.copies.clear()
        self.session = ""

    def fetch(self, blobs: Iterable[BlobRef]) -> Mapping[str, Path]:
        root = self.world.root / "blobs" / "sha256"
        return {b.sha256: root / b.sha256[:2] / b.sha256 for b in blobs}

    def canonical(self, task: Assignment) -> Weights:
        """The task's base, reached by the cheapest way and checked by its hash."""
        manifest = manifest_of(task.spec.model.family, task.spec.model.config)
        if task.job_id not in self.copies:
            self.copies[task.job_id] = CanonicalCopy(
                task.job_id, manifest, task.spec.seed, from_seed=True
            )
        copy = self.copies[task.job_id]
        copy.advance(task.base, self.fetch)
        self.reached += 1
        assert copy.weights is not None
        return copy.weights

    async def upload(
        self, task: Assignment, steps: int, tokens_done: int, value: float | None = None
    ) -> BlobRef:
        """What the executor does: prepare, train, adopt, upload, settle."""
        manifest = manifest_of(task.spec.model.family, task.spec.model.config)
        base = self.canonical(task)
        owed = self.store.prepare(task, 0)
        assert owed is not None
        rng = np.random.default_rng([task.attempt, *task.task_id.encode()])
        local = {
            name: (values - rng.normal(0, 0.01, values.shape)).astype(np.float32)
            for name, values in base.items()
        }
        told = DeltaHeader(
            task.job_id, task.task_id, task.attempt, task.round, manifest.hash,
            task.spec.codec_up_of(task.round), tokens_done, steps,
        )  # fmt: skip
        folder = self.disk / "work" / f"{task.task_id}.{task.attempt}"
        folder.mkdir(parents=True, exist_ok=True)
        path = folder / "delta"
        delta, residual = write_delta_with_feedback(
            path,
            manifest,
            base,
            local,
            told,
            Feedback(Path(owed.kept) if owed.kept else None, folder / RESIDUAL),
            [Path(p) for p in owed.lost],
        )
        path = self.store.adopt(task, 0, folder, path, delta, residual)
        await self.world.grid.blobs.put_bytes(path.read_bytes())
        self.store.settle(task, 0)
        shutil.rmtree(folder)
        key = (task.task_id, task.attempt)
        specs = passing(manifest).tensors
        self.learned[key] = np.concatenate([(base[t.name] - local[t.name]).ravel() for t in specs])
        packed = open_delta(path, manifest, {}).packed
        self.sent[key] = np.concatenate(
            [packed.reader(t)(0, t.size, np.empty(t.size, np.float32)).copy() for t in specs]
        )
        return delta

    async def missing(self, job_id: str, task: Assignment) -> tuple[np.ndarray, int, int]:
        """What was learned but neither merged nor kept, by element; how many of its deltas were
        merged, and how many were not. ``task`` is any of the job's, as a pattern for the next."""
        async with self.world.grid.db.read() as tx:
            own = await submissions.own_work(tx, job_id, self.id, 10**6)
        fates = tuple(OwnWork(*key, merged) for key, merged in own.items())
        merged = [w for w in fates if w.merged and (w.task_id, w.attempt) in self.sent]
        next_task = Assignment(
            **{
                name: getattr(task, name)
                for name in ("job_id", "attempt", "round", "phase", "spec", "base", "data")
            },
            task_id="task_next",
            own=tuple(w for w in fates if w.merged),
        )
        owed = self.store.prepare(next_task, 0)
        assert owed is not None
        manifest = manifest_of(task.spec.model.family, task.spec.model.config)
        specs = passing(manifest).tensors
        there = np.zeros(sum(t.size for t in specs))
        if owed.kept:
            kept = open_residual(Path(owed.kept), manifest).arrays
            there += np.concatenate([kept[t.name].ravel() for t in specs])
        for path in owed.lost:
            packed = open_delta(Path(path), manifest, {}).packed
            there += np.concatenate(
                [packed.reader(t)(0, t.size, np.empty(t.size, np.float32)).copy() for t in specs]
            )
        for one in merged:
            there += self.sent[one.task_id, one.attempt]
        total = sum(self.learned.values(), np.zeros_like(there))
        return total - there, len(merged), len(self.learned) - len(merged)

    async def newest(self, job_id: str, task: Assignment) -> str:
        """The hash of the newest version, reached here."""
        async with self.world.grid.db.read() as tx:
            job = await jobs.get(tx, job_id)
            assert job is not None
            ref = await weights_ref(tx, job, job.version, 10)
        copy = self.copies.get(job_id)
        if copy is None:
            manifest = manifest_of(task.spec.model.family, task.spec.model.config)
            copy = CanonicalCopy(job_id, manifest, task.spec.seed)
        copy.advance(ref, self.fetch)
        return copy.hash
