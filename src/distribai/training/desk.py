"""What a training child keeps warm for one job, and how it does the phases of a task.

Kept from task to task: the built model, the canonical copy, the optimizer (with its moments where
the job keeps them), the micro-batch that fits, and the open data set.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np

from distribai.core.child import Done, FromChild, Run
from distribai.core.plain import from_plain
from distribai.core.ranges import split, total
from distribai.core.spec import BlobRef, JobSpec
from distribai.core.tasks import DatasetRef, Outcome
from distribai.data import tokenizers
from distribai.data.reader import SampleReader
from distribai.data.shards import DatasetManifest
from distribai.errors import InternalFault, UsageError
from distribai.merge.delta import DeltaHeader
from distribai.merge.weights import Weights
from distribai.training import models
from distribai.training.checkpoint import Budget, Checkpointer
from distribai.training.encoding import write_for
from distribai.training.generate import generate
from distribai.training.loop import (
    NEWCOMER_WARMUP,
    Gate,
    InnerLoop,
    Plan,
    Report,
    Trained,
    held_out_loss,
)
from distribai.training.optimizers import InnerOptimizer, muon_names
from distribai.training.versions import CanonicalCopy, Fetch, Tell, reach

HELD_OUT_BATCHES = 16
"""Held-out batches of an evaluation that does not say how many."""


def _nobody(_message: FromChild) -> None:
    """Who hears of nothing."""


class Desk:
    """One job on one device.

    Args:
        job_id: the job's id.
        spec: the job's spec.
        device: torch's name of the device.
        clock: seconds, monotonic.

    Raises:
        InvalidSpec: the model cannot be built here.
    """

    def __init__(self, job_id: str, spec: JobSpec, device: str, clock: Callable[[], float]) -> None:
        self.spec, self.device = spec, device
        self.live = models.build(spec.model.family, spec.model.config, device)
        self.canonical = CanonicalCopy(
            job_id, self.live.manifest, spec.seed, from_seed=spec.model.init is None
        )
        names = muon_names(spec.model.family, spec.model.config)
        self.optimizer = InnerOptimizer(spec.optimizer, self.live.module, names)
        self.loop = InnerLoop(
            self.live.module,
            self.optimizer,
            device,
            spec.resources.precision,
            clock,
            buffers=self.live.buffers(),
            compiled=spec.resources.compile,
        )
        self._data: tuple[DatasetRef, DatasetManifest, SampleReader] | None = None
        self._has_moments = False
        self._clock, self._budget = clock, Budget(clock)

    def train(
        self,
        run: Run,
        fetch: Fetch,
        gate: Gate,
        report: Report,
        tell: Tell = _nobody,
    ) -> Done:
        """H inner steps and the delta's file; from the checkpoint in ``run.out_dir`` on, if one
        fits. ``tell`` hears of checkpoints.

        Raises:
            InternalFault: the assignment contradicts itself, or the loss is not finite.
            OutOfMemory: one sequence does not fit.
        """
        task, batch = run.assignment, self.spec.batch
        base = self._reach(run, fetch, tell)
        if task.steps < 1 or total(task.samples) != task.steps * batch:
            raise InternalFault(
                "protocol.malformed",
                f"{total(task.samples)} samples were assigned for {task.steps} steps of {batch}.",
            )
        _, reader = self._open_data(task.data, fetch)
        keep = Checkpointer(
            Path(run.out_dir),
            task,
            run.checkpoints,
            self.live,
            self.optimizer,
            self._budget,
            self._clock,
            tell,
        )
        keep.newcomer = self._renew_moments()
        start = keep.resume()
        steps_before = 0 if start is None else start.mark.steps
        plan = Plan(
            schedule=self.spec.schedule,
            total=self.spec.steps,
            offset=task.inner_step_offset,
            steps=task.steps,
            batch=batch,
            clip=self.spec.optimizer.clip,
            rewarm=NEWCOMER_WARMUP if keep.newcomer and task.inner_step_offset else 0,
        )
        rows = reader.batches(split(task.samples, steps_before * batch)[1], batch)
        self._budget.begin()
        known = None if start is None else (start.mark, start.losses)
        done = self.loop.run(plan, rows, gate, report, keep, known, run.progress_s)
        self._budget.end()
        self._has_moments = self.spec.rounds.moments == "keep"
        return self._hand_in(run, base, done)

    def _hand_in(self, run: Run, base: Weights, done: Trained) -> Done:
        """The delta's file, and what is said of it."""
        task = run.assignment
        header = DeltaHeader(
            job_id=task.job_id,
            task_id=task.task_id,
            attempt=task.attempt,
            base_version=task.base.version,
            manifest_hash=self.live.manifest.hash,
            codec=self.spec.codec_up_of(task.round),
            tokens=done.tokens,
            steps=done.steps,
        )
        path = Path(run.out_dir) / f"{task.task_id}.{task.attempt}.delta.safetensors"
        blob, residual = write_for(
            run, path, self.live.manifest, base, self.live.store(base), header
        )
        outcome = Outcome(
            task.task_id,
            task.attempt,
            "done",
            delta=blob,
            samples=split(task.samples, done.steps * self.spec.batch)[0],
            steps=done.steps,
            tokens=done.tokens,
            base_hash=self.canonical.hash,
            metrics={
                "loss_first": done.loss_first,
                "loss_last": done.loss_last,
                "seconds": done.seconds,
            },
        )
        return Done(outcome, str(path), residual)

    def evaluate(self, run: Run, fetch: Fetch, gate: Gate, tell: Tell = _nobody) -> Outcome:
        """Held-out loss over the first ``params["batches"]`` batches: the same for any version.

        Raises:
            InternalFault: the task has no data.
        """
        task = run.assignment
        self._reach(run, fetch, tell)
        manifest, reader = self._open_data(task.data, fetch)
        size, count = self.spec.batch, int(task.params.get("batches", HELD_OUT_BATCHES))
        rows = min(size * max(1, count), manifest.held_out_sequences)

        def batches() -> Iterator[np.ndarray]:
            for start in range(0, rows, size):
                gate(0.0)
                yield reader.held_out_batch(start, min(size, rows - start))

        loss, tokens = held_out_loss(
            self.live.module, batches(), self.device, self.spec.resources.precision
        )
        return Outcome(
            task.task_id,
            task.attempt,
            "done",
            base_hash=self.canonical.hash,
            metrics={"held_out_loss": loss, "held_out_tokens": float(tokens)},
        )

    def generate(self, run: Run, fetch: Fetch, gate: Gate, tell: Tell = _nobody) -> Outcome:
        """A sample after ``params["prompt"]``.

        Raises:
            UsageError: ``usage.invalid``: nothing to start from.
        """
        task = run.assignment
        self._reach(run, fetch, tell)
        source = self.spec.data.tokenizer
        tokenizer = tokenizers.load(fetch([source])[source.sha256] if source else None)
        end = tokenizer.end_of_document
        prompt = [int(t) for t in tokenizer.encode(str(task.params.get("prompt", "")))]
        if not prompt and end is not None:
            prompt = [end]
        if not prompt:
            raise UsageError(
                "usage.invalid",
                "The prompt is empty and the tokenizer has no token that starts a text.",
                "Give a prompt.",
                field="prompt",
            )
        tokens = generate(
            self.live.module,
            prompt,
            int(task.params.get("max_tokens", 200)),
            temperature=float(task.params.get("temperature", 0.8)),
            seed=int(task.params.get("seed", 0)),
            context=self.spec.seq_len,
            device=self.device,
            stop=-1 if end is None else end,
            gate=gate,
        )
        return Outcome(
            task.task_id,
            task.attempt,
            "done",
            base_hash=self.canonical.hash,
            text=tokenizer.decode(tokens),
        )

    def _reach(self, run: Run, fetch: Fetch, tell: Tell) -> Weights:
        """The canonical weights of the task's base, loaded into the live model."""
        reach(self.canonical, run, fetch, tell)
        weights = self.canonical.weights
        if weights is None:
            raise InternalFault("internal.fault", "The canonical copy is empty after a sync.")
        self.live.load(weights)
        return weights

    def _renew_moments(self) -> bool:
        """Fresh moments where the job wants them; whether this node is a newcomer to kept ones."""
        keep = self.spec.rounds.moments == "keep"
        newcomer = keep and not self._has_moments
        if not keep or newcomer:
            self.optimizer.reset()
        # Until this round has ended well: a cancelled one must not leave its moments behind.
        self._has_moments = False
        return newcomer

    def _open_data(
        self, data: DatasetRef | None, fetch: Fetch
    ) -> tuple[DatasetManifest, SampleReader]:
        if data is None:
            raise InternalFault("protocol.malformed", "The task names no data set.")
        if self._data is None or self._data[0] != data:
            path = fetch([data.manifest])[data.manifest.sha256]
            manifest = from_plain(DatasetManifest, json.loads(path.read_text()))
            shards: list[BlobRef] = [s.blob for s in manifest.shards]
            self._data = (data, manifest, SampleReader(manifest, fetch(shards), self.spec.seed))
        return self._data[1], self._data[2]
