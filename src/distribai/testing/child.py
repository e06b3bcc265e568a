"""A training child without torch: real daemons and a real orchestrator run a whole job in seconds.

It speaks :mod:`distribai.core.child`, reads the job's real samples, keeps the real canonical copy
and writes real deltas; only the training is pretended. Each step takes the weights a little nearer
to a target that the job's seed decides, plus a nudge that the step's very tokens decide, so the
same task gives the same bytes wherever and however often it runs, and the loss falls. Give its
command to a daemon in place of the program's own child::

    Daemon(settings, command=pretend.command(step_s=0.01))      # in this process
    python -m distribai.testing.faults --pretend 0.01 -- node start --join ...  # in its own

It writes no checkpoints: an attempt that goes on after a crash begins at its first step.
"""

from __future__ import annotations

import hashlib
import json
import os
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import BinaryIO

import numpy as np

from distribai.core.architectures import manifest_of
from distribai.core.child import Done, LogLine, Measure, Measured, ProgressLine, Ready, Run
from distribai.core.plain import from_plain
from distribai.core.ranges import split
from distribai.core.tasks import Assignment, Outcome, Progress
from distribai.data.reader import SampleReader
from distribai.data.shards import DatasetManifest
from distribai.errors import DistribAIError, InternalFault
from distribai.merge.delta import DeltaHeader
from distribai.merge.version0 import make_version0
from distribai.merge.weights import Weights
from distribai.training.channel import Channel, ChannelClosed
from distribai.training.encoding import write_for
from distribai.training.versions import CanonicalCopy, reach

RATE = 0.03
"""Share of the way to the target that one step goes."""

NUDGE = 1e-3
"""Standard deviation of what a step's tokens add to each trainable value."""

TARGET_SEED = 0x7A72657467656174
"""Combined with the job's seed: the target is another draw of version 0."""


def command(step_s: float = 0.0) -> tuple[str, ...]:
    """What starts it; a step takes at least ``step_s`` seconds."""
    return (sys.executable, "-P", "-m", "distribai.testing.child", str(step_s))


class PretendChild:
    """Does tasks from a channel, one at a time.

    Args:
        channel: to the daemon; its reader is already running.
        step_s: seconds that a step takes at least.
    """

    def __init__(self, channel: Channel, step_s: float) -> None:
        self._channel = channel
        self._step_s = step_s
        self._copies: dict[str, CanonicalCopy] = {}

    def serve(self) -> None:
        """Announce the child and do tasks until the daemon is gone."""
        try:
            self._channel.send(Ready("pretended", ("cpu",)))
            while True:
                asked = self._channel.next_run()
                if isinstance(asked, Measure):
                    self._channel.send(Measured(0.0, 0.0, "nothing here is really trained"))
                else:
                    self._channel.send(self.do(asked))
        except ChannelClosed:
            return

    def do(self, run: Run) -> Done:
        """Do one task, from its weights to its outcome; what goes wrong is in the outcome."""
        task = run.assignment
        try:
            self._channel(0.0)
            if task.phase == "train":
                return self._train(run)
            weights = self._reach(run)
            if task.phase == "evaluate":
                metrics = {"held_out_loss": _loss(task, weights), "held_out_tokens": 1.0}
                return Done(self._outcome(task, metrics=metrics))
            return Done(self._outcome(task, text="pretended"))
        except DistribAIError as problem:
            self._copies.pop(task.job_id, None)
            self._channel.send(LogLine("warning", problem.message))
            return Done(
                Outcome(
                    task.task_id,
                    task.attempt,
                    "failed",
                    error_code=problem.code,
                    reason=problem.message,
                )
            )

    def _outcome(self, task: Assignment, **fields: object) -> Outcome:
        base = self._copies[task.job_id].hash
        return Outcome(task.task_id, task.attempt, "done", base_hash=base, **fields)  # type: ignore[arg-type]

    def _reach(self, run: Run) -> Weights:
        """The canonical weights of the task's base version, checked by their hash."""
        task = run.assignment
        if task.job_id not in self._copies:
            manifest = manifest_of(task.spec.model.family, task.spec.model.config)
            self._copies[task.job_id] = CanonicalCopy(
                task.job_id,
                manifest,
                task.spec.seed,
                from_seed=task.spec.model.init is None,
            )
        copy = self._copies[task.job_id]
        reach(copy, run, self._channel.fetch, self._channel.send)
        if copy.weights is None:
            raise InternalFault("internal.fault", "The canonical copy is empty after a sync.")
        return copy.weights

    def _train(self, run: Run) -> Done:
        task = run.assignment
        base = self._reach(run)
        manifest = manifest_of(task.spec.model.family, task.spec.model.config)
        local = {name: np.array(values, copy=True) for name, values in base.items()}
        target = _target(task)
        first = last = _distance(local, target)
        began, steps = time.monotonic(), 0
        for rows in self._batches(task):
            mark = time.monotonic()
            _step(local, target, rows)
            steps += 1
            last = _distance(local, target)
            time.sleep(self._step_s)
            took = time.monotonic() - mark
            rate = rows.shape[0] * task.spec.seq_len / max(took, 1e-6)
            self._channel.send(
                ProgressLine(
                    Progress(task.task_id, task.attempt, steps, task.steps, last + 1.0, rate)
                )
            )
            if not self._channel(took, task.steps - steps):
                break
        tokens = steps * task.spec.batch * task.spec.seq_len
        header = DeltaHeader(
            job_id=task.job_id,
            task_id=task.task_id,
            attempt=task.attempt,
            base_version=task.base.version,
            manifest_hash=manifest.hash,
            codec=task.spec.codec_up_of(task.round),
            tokens=tokens,
            steps=steps,
        )
        path = Path(run.out_dir) / f"{task.task_id}.{task.attempt}.delta.safetensors"
        blob, residual = write_for(run, path, manifest, base, local, header)
        outcome = self._outcome(
            task,
            delta=blob,
            samples=split(task.samples, steps * task.spec.batch)[0],
            steps=steps,
            tokens=tokens,
            metrics={
                "loss_first": first + 1.0,
                "loss_last": last + 1.0,
                "seconds": max(time.monotonic() - began, 1e-3),
            },
        )
        return Done(outcome, str(path), residual)

    def _batches(self, task: Assignment) -> Iterator[np.ndarray]:
        if task.data is None:
            raise InternalFault("protocol.malformed", "The task names no data set.")
        path = self._channel.fetch([task.data.manifest])[task.data.manifest.sha256]
        manifest = from_plain(DatasetManifest, json.loads(path.read_text()))
        paths = self._channel.fetch([shard.blob for shard in manifest.shards])
        reader = SampleReader(manifest, paths, task.spec.seed)
        return reader.batches(task.samples, task.spec.batch)


def _target(task: Assignment) -> Weights:
    manifest = manifest_of(task.spec.model.family, task.spec.model.config)
    return make_version0(manifest, task.spec.seed ^ TARGET_SEED)


def _step(local: Weights, target: Weights, rows: np.ndarray) -> None:
    """One step, in place; only what is trained in fp32 moves."""
    digest = hashlib.sha256(np.ascontiguousarray(rows).tobytes()).digest()
    noise = np.random.Generator(np.random.PCG64(int.from_bytes(digest, "little")))
    for name, values in local.items():
        if values.dtype == np.float32:
            nudge = noise.standard_normal(values.shape, np.float32) * np.float32(NUDGE)
            values += (target[name] - values) * np.float32(RATE) + nudge


def _distance(weights: Weights, target: Weights) -> float:
    """How far the weights are from the target, as a share of its own size squared."""
    floats = [name for name, values in target.items() if values.dtype == np.float32]
    apart = sum(float(np.square(weights[n] - target[n], dtype=np.float64).sum()) for n in floats)
    size = sum(float(np.square(target[n], dtype=np.float64).sum()) for n in floats)
    return apart / max(size, 1e-12)


def _loss(task: Assignment, weights: Weights) -> float:
    """The pretended held-out loss: 1 at the target, about 2 or 3 at the start."""
    return 1.0 + _distance(weights, _target(task))


def main(arguments: list[str], stdin: BinaryIO, stdout: BinaryIO) -> int:
    """Serve a daemon until it closes its end; the process's exit status."""
    channel = Channel(stdin, stdout)
    channel.start()
    PretendChild(channel, float(arguments[0]) if arguments else 0.0).serve()
    return 0 if channel.fault is None else 2


if __name__ == "__main__":
    words = os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)  # whatever else is printed is no message
    sys.exit(main(sys.argv[1:], sys.stdin.buffer, words))
