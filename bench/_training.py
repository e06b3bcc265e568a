"""One training run of one side of ``bench.learning``: what its worker processes do."""

from __future__ import annotations

import tempfile
import time
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import fmean
from typing import Any

import numpy as np

from distribai.core.architectures import family
from distribai.core.codecs import Schedule, feeds_back
from distribai.core.paradigms import Member, Slot, paradigm
from distribai.core.plan import parameter_count
from distribai.core.ranges import SamplePool
from distribai.core.spec import JobSpec, OuterSpec
from distribai.core.tensors import ParameterManifest
from distribai.data.reader import SampleReader
from distribai.data.shards import DatasetManifest, prepare
from distribai.data.tokenizers import ByteTokenizer
from distribai.merge.delta import (
    Delta,
    DeltaHeader,
    open_delta,
    write_delta,
    write_delta_with_feedback,
)
from distribai.merge.feedback import Feedback
from distribai.merge.outer import MergedFiles, merge_files, outer_coefficients
from distribai.merge.update import UpdateHeader, apply_update
from distribai.merge.version0 import make_version0
from distribai.merge.weights import Weights, weights_hash, write_weights

NODES = 4

EVALUATION_BATCH = 32


@dataclass(frozen=True, slots=True)
class Data:
    """The prepared data set, as a worker process gets it."""

    manifest: DatasetManifest
    paths: dict[str, Path]
    held_out: int


@dataclass(frozen=True, slots=True)
class Trial:
    """One training run of one side, over ``rounds`` rounds (0: all of the job's)."""

    side: str
    lr: float
    muon_lr: float
    seed: int
    rounds: int = 0


@dataclass(frozen=True, slots=True)
class Result:
    """``seconds`` are of CPU; ``bytes_node`` is what one node moved, both ways; 0 for data-parallel
    sides."""

    trial: Trial
    loss: float
    seconds: float
    bytes_node: float


def small_model() -> Any:
    """0.13M parameters of a decoder transformer."""
    return replace(family("decoder_transformer").PROFILES["tiny"], dim=64, heads=2, ffn_dim=200)


def wide_model() -> Any:
    """1.5M parameters, most of them in wide matrices, which take Muon the least time."""
    small = family("decoder_transformer").PROFILES["small"]
    return replace(small, dim=96, heads=3, layers=3, ffn_dim=1600)


def prepared(documents: Iterable[str], spec: JobSpec, folder: Path, held_out: int) -> Data:
    """The documents as a data set of bytes below ``folder``."""
    place = folder / "data"
    place.mkdir()
    manifest, paths = prepare(
        documents, ByteTokenizer(), spec.seq_len, spec.data.held_out, spec.seed, place
    )
    shards = {s.blob.sha256: p for s, p in zip(manifest.shards, paths, strict=True)}
    return Data(manifest, shards, held_out)


def ring_bytes(spec: JobSpec) -> float:
    """Bytes that a data-parallel node sends and receives in fp32, in as many steps (A9)."""
    return 16 * (NODES - 1) / NODES * parameter_count(spec) * spec.steps


def one_thread() -> None:
    """What a worker process does first."""
    import torch

    torch.set_num_threads(1)


def train(spec: JobSpec, trial: Trial, data: Data, folder: str) -> Result:
    """One trial, in a worker process."""
    start = time.process_time()
    moved = 0.0
    if trial.rounds:
        spec = replace(spec, steps=trial.rounds * spec.rounds.inner_steps)
    if trial.side in ("diloco", "dense"):
        spec = replace(
            spec,
            seed=trial.seed,
            optimizer=replace(spec.optimizer, lr=trial.lr, muon_lr=trial.muon_lr),
        )
        if trial.side == "dense":
            rounds = replace(spec.rounds, codec_up="fp32", codec_down="fp32")
            spec = replace(spec, rounds=rounds, outer=OuterSpec())
        weights, moved = _diloco(spec, data, folder)
    else:
        name = "adamw" if trial.side == "adamw_ddp" else spec.optimizer.name
        optimizer = replace(spec.optimizer, name=name, lr=trial.lr, muon_lr=trial.muon_lr)
        batch = spec.batch * NODES
        weights = _data_parallel(
            replace(spec, seed=trial.seed, optimizer=optimizer, batch=batch), data
        )
    loss = _held_out_loss(spec, weights, data)
    return Result(trial, loss, time.process_time() - start, moved)


def _diloco(spec: JobSpec, data: Data, folder: str) -> tuple[Weights, float]:
    """The last version of a job over ``NODES`` nodes, and the bytes that one of them moved."""
    moved = 0.0
    for made in rounds(spec, data, folder):
        moved += fmean(path.stat().st_size for path in made.deltas) + made.update.stat().st_size
    return made.held, moved


@dataclass(frozen=True, slots=True)
class Round:
    """What a round has made: the nodes' deltas and the update, on disk until the next round, and
    the weights that they lead to."""

    manifest: ParameterManifest
    deltas: list[Path]
    update: Path
    held: Weights


def rounds(spec: JobSpec, data: Data, folder: str) -> Iterator[Round]:
    """A job over ``NODES`` nodes, round by round."""
    split = paradigm(spec.paradigm)
    members = [Member(f"node_{k}", 0) for k in range(NODES)]
    nodes = [_Node(spec, data) for _ in members]
    manifest = nodes[0].live.manifest
    held = make_version0(manifest, spec.seed)
    pool = SamplePool()
    with tempfile.TemporaryDirectory(dir=folder) as place:
        files = _Files(Path(place), manifest, spec)
        write_weights(files.path("theta", 0), manifest, held)
        for number in range(spec.round_count):
            slots, pool, _ = split.slots(spec, number, members, pool)
            deltas = []
            for slot, node in zip(slots, nodes, strict=True):
                local = node.train(held, slot.inner_step_offset, slot.steps, slot.samples)
                deltas.append(files.delta(number, slot, held, local))
            made = files.merge(number, deltas)
            update = files.path("update", number + 1)
            held = apply_update(manifest, held, update, in_place=True)
            if weights_hash(manifest, held) != made.weights_hash:
                raise RuntimeError("the nodes' canonical copy differs from the orchestrator's")
            paths = [files.path(f"delta_{slot.rank}", number) for slot in slots]
            yield Round(manifest, paths, update, held)
            files.drop(number)


@dataclass(frozen=True, slots=True)
class _Files:
    """What a job leaves on disk between two rounds, both sides of the wire."""

    place: Path
    manifest: ParameterManifest
    spec: JobSpec

    def path(self, name: str, number: int) -> Path:
        return self.place / f"{name}.{number}"

    def _feedback(self, schedule: Schedule, name: str, number: int) -> Feedback | None:
        if not feeds_back(schedule):
            return None
        kept = self.path(name, number) if number else None
        return Feedback(kept, self.path(name, number + 1))

    def delta(self, number: int, slot: Slot, held: Weights, local: Weights) -> Delta:
        """A node's delta, with its error feedback."""
        path = self.path(f"delta_{slot.rank}", number)
        spec = self.spec
        header = DeltaHeader(
            "bench",
            f"task_{slot.rank}",
            1,
            number,
            self.manifest.hash,
            spec.codec_up_of(number),
            slot.steps * spec.batch * spec.seq_len,
            slot.steps,
        )
        feedback = self._feedback(spec.rounds.codec_up, f"residual_{slot.rank}", number)
        if feedback is None:
            write_delta(path, self.manifest, held, local, header)
        else:
            write_delta_with_feedback(path, self.manifest, held, local, header, feedback)
        return open_delta(path, self.manifest, header)

    def merge(self, number: int, deltas: list[Delta]) -> MergedFiles:
        """The orchestrator's round."""
        spec = self.spec
        eta, mu = outer_coefficients(spec.outer, number, False, spec.round_count - 1 - number)
        return merge_files(
            self.manifest,
            self.path("theta", number),
            self.path("momentum", number) if number else None,
            deltas,
            [delta.header.tokens for delta in deltas],
            eta,
            mu,
            out_theta=self.path("theta", number + 1),
            out_momentum=self.path("momentum", number + 1),
            out_update=self.path("update", number + 1),
            header=UpdateHeader(
                "bench", number + 1, self.manifest.hash, spec.codec_down_of(number)
            ),
            feedback=self._feedback(spec.rounds.codec_down, "kept", number),
        )

    def drop(self, number: int) -> None:
        """Free the disk of a version that has a successor."""
        for path in self.place.glob(f"*.{number}"):
            path.unlink()


def _data_parallel(spec: JobSpec, data: Data) -> Weights:
    """One model over the same samples, ``spec.batch`` sequences a step, without rounds."""
    node = _Node(spec, data)
    theta = make_version0(node.live.manifest, spec.seed)
    samples, _ = SamplePool().take(spec.steps * spec.batch)
    return {**theta, **node.train(theta, 0, spec.steps, samples)}


class _Node:
    """A model, its optimizer and the data of one node."""

    def __init__(self, spec: JobSpec, data: Data) -> None:
        # Imported here: the parent process needs no torch.
        from distribai.training import models
        from distribai.training.loop import InnerLoop
        from distribai.training.optimizers import InnerOptimizer, muon_names

        self._spec = spec
        self.live = models.build(spec.model.family, spec.model.config)
        names = muon_names(spec.model.family, spec.model.config)
        self._optimizer = InnerOptimizer(spec.optimizer, self.live.module, names)
        self._loop = InnerLoop(self.live.module, self._optimizer, "cpu", "fp32", time.perf_counter)
        self._reader = SampleReader(data.manifest, data.paths, spec.seed)

    def train(self, base: Weights, offset: int, steps: int, samples: Any) -> Weights:
        """The weights after ``steps`` steps from ``base``."""
        from distribai.training.loop import Plan

        self.live.load(base)
        if self._spec.rounds.moments == "fresh":
            self._optimizer.reset()
        spec = self._spec
        plan = Plan(spec.schedule, spec.steps, offset, steps, spec.batch, spec.optimizer.clip)
        self._loop.run(plan, self._reader.batches(samples, spec.batch))
        return self.live.store(base)


def _held_out_loss(spec: JobSpec, weights: Weights, data: Data) -> float:
    from distribai.training import models
    from distribai.training.loop import held_out_loss

    live = models.build(spec.model.family, spec.model.config)
    live.load(weights)
    reader = SampleReader(data.manifest, data.paths, spec.seed)
    rows = min(data.held_out, data.manifest.held_out_sequences)

    def batches() -> Iterator[np.ndarray]:
        for start in range(0, rows, EVALUATION_BATCH):
            yield reader.held_out_batch(start, min(EVALUATION_BATCH, rows - start))

    return held_out_loss(live.module, batches(), "cpu", "fp32")[0]
