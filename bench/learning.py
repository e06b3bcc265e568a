"""Whether it learns: DiLoCo over K nodes against data-parallel training on the same tokens.

Three sides, each with the learning rates that are best for it on a grid of the same size (tuned at
full length on the first seed): the product's default recipe over K nodes, data-parallel training
with the same inner optimizer, and data-parallel training with AdamW. Data-parallel means one model
and a batch of K times the nodes', for the same number of steps: equal tokens, and the very same
samples in each round.

The nodes' side is the product's own code: ``InnerLoop``, deltas and updates as files,
``merge_round``, the split of ``core.paradigms.diloco``. Only processes and wire are left out, since
they change no figure.
"""

from __future__ import annotations

import argparse
import multiprocessing
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from concurrent.futures import FIRST_COMPLETED, Future, ProcessPoolExecutor, wait
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import fmean, stdev
from typing import Any

import numpy as np

from bench import common
from distribai.core.architectures import family
from distribai.core.paradigms import Member, paradigm
from distribai.core.plain import to_plain
from distribai.core.ranges import SamplePool
from distribai.core.spec import DataSpec, JobSpec, ModelSpec
from distribai.data import builtin, formats
from distribai.data.reader import SampleReader
from distribai.data.shards import DatasetManifest, prepare
from distribai.data.tokenizers import ByteTokenizer
from distribai.merge.delta import DeltaHeader, open_delta, write_delta
from distribai.merge.outer import merge_round, outer_coefficients
from distribai.merge.update import UpdateHeader, apply_update, write_update
from distribai.merge.version0 import make_version0
from distribai.merge.weights import Weights, trainable, weights_hash

NAME = "learning"
HELP = "held-out loss of DiLoCo over that of data-parallel training, all sides tuned"

NODES = 4
HELD_OUT = 2048
QUICK_HELD_OUT = 256
"""Held-out sequences that a final loss is over, at most."""

EVALUATION_BATCH = 32

GRIDS: dict[str, tuple[tuple[float, float], ...]] = {
    "diloco": ((0.007, 0.003), (0.012, 0.005), (0.02, 0.0085)),
    "ddp": ((0.004, 0.007), (0.007, 0.012), (0.012, 0.02)),
    "adamw_ddp": ((0.0012, 0.0), (0.002, 0.0), (0.0035, 0.0)),
}
"""Learning rates (AdamW's, Muon's) that each side is tuned over."""


@dataclass(frozen=True, slots=True)
class Data:
    """The prepared data set, as a worker process gets it."""

    manifest: DatasetManifest
    paths: dict[str, Path]
    held_out: int


@dataclass(frozen=True, slots=True)
class Trial:
    """One training run of one side."""

    side: str
    lr: float
    muon_lr: float
    seed: int


@dataclass(frozen=True, slots=True)
class Result:
    """``seconds`` are of CPU; ``bytes_node`` is what one node moved, both ways; 0 for data-parallel
    sides."""

    trial: Trial
    loss: float
    seconds: float
    bytes_node: float


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The benchmark's own options."""
    parser.add_argument("--text", metavar="FILE", help="train on this file, not on stdlib")
    parser.add_argument("--rounds", type=int, default=60)
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--workers", type=int, default=2, help="processes, one thread each")


def run(args: argparse.Namespace) -> dict[str, Any]:
    """Tune each side, run its best rates on every seed, and compare."""
    spec = _spec(args)
    grids = {side: grid[: 1 if args.quick else len(grid)] for side, grid in GRIDS.items()}
    seeds = range(1 if args.quick else args.seeds)
    with tempfile.TemporaryDirectory(prefix="distribai-bench-") as folder:
        data = _prepare(spec, args, Path(folder))
        with ProcessPoolExecutor(
            args.workers, multiprocessing.get_context("spawn"), initializer=_one_thread
        ) as pool:
            tuning, final = _tune_and_repeat(
                lambda trial: pool.submit(train, spec, trial, data, folder), grids, seeds
            )
    return _summary(spec, args, grids, tuning, final)


def _tune_and_repeat(
    submit: Callable[[Trial], Future[Result]],
    grids: dict[str, tuple[tuple[float, float], ...]],
    seeds: range,
) -> tuple[list[Result], list[Result]]:
    """The tuning trials of each side, and its best rates on every seed.

    A side's other seeds start as soon as its own grid is done, so that no worker idles.
    """
    waiting = {submit(Trial(s, *lr, 0)) for s, grid in grids.items() for lr in grid}
    tuning: list[Result] = []
    final: list[Result] = []
    while waiting:
        ended, waiting = wait(waiting, return_when=FIRST_COMPLETED)
        for result in (_told(f.result()) for f in ended):
            side = result.trial.side
            if result.trial.seed:
                final.append(result)
                continue
            tuning.append(result)
            grid = [r for r in tuning if r.trial.side == side]
            if len(grid) == len(grids[side]):
                best = min(grid, key=lambda r: r.loss)
                final.append(best)
                waiting |= {submit(replace(best.trial, seed=s)) for s in seeds[1:]}
    return tuning, final


def train(spec: JobSpec, trial: Trial, data: Data, folder: str) -> Result:
    """One trial, in a worker process."""
    start = time.process_time()
    moved = 0.0
    if trial.side == "diloco":
        spec = replace(
            spec,
            seed=trial.seed,
            optimizer=replace(spec.optimizer, lr=trial.lr, muon_lr=trial.muon_lr),
        )
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
    split = paradigm(spec.paradigm)
    members = [Member(f"node_{k}", 0) for k in range(NODES)]
    nodes = [_Node(spec, data) for _ in members]
    manifest = nodes[0].live.manifest
    theta = make_version0(manifest, spec.seed)
    held = {n: a.copy() for n, a in theta.items()}
    momentum = {t.name: np.zeros(t.shape, np.float32) for t in trainable(manifest).tensors}
    update = {t.name: np.zeros_like(theta[t.name]) for t in manifest.travelling}
    pool, moved = SamplePool(), 0.0
    with tempfile.TemporaryDirectory(dir=folder) as place:
        for number in range(spec.round_count):
            slots, pool, _ = split.slots(spec, number, members, pool)
            deltas, tokens = [], []
            for slot, node in zip(slots, nodes, strict=True):
                path = Path(place) / f"{slot.rank}.delta"
                header = DeltaHeader(
                    "bench",
                    f"task_{slot.rank}",
                    1,
                    number,
                    manifest.hash,
                    spec.codec_up_of(number),
                    slot.steps * spec.batch * spec.seq_len,
                    slot.steps,
                )
                local = node.train(held, slot.inner_step_offset, slot.steps, slot.samples)
                moved += write_delta(path, manifest, held, local, header).size / NODES
                deltas.append(open_delta(path, manifest, header))
                tokens.append(header.tokens)
            eta, mu = outer_coefficients(spec.outer, number, False, spec.round_count - 1 - number)
            before = momentum if number else None
            merge_round(manifest, theta, before, deltas, tokens, eta, mu, theta, momentum, update)
            path = Path(place) / "update"
            claim = UpdateHeader("bench", number + 1, manifest.hash, spec.codec_down_of(number))
            moved += write_update(path, manifest, update, claim).size
            held = apply_update(manifest, held, path, expect=claim)
    if weights_hash(manifest, held) != weights_hash(manifest, theta):
        raise RuntimeError("the nodes' canonical copy differs from the orchestrator's")
    return theta, moved


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


def _spec(args: argparse.Namespace) -> JobSpec:
    """The product's defaults, over as many rounds as asked for."""
    config = to_plain(family("decoder_transformer").PROFILES["tiny"])
    model = ModelSpec("decoder_transformer", config, "tiny")
    spec = JobSpec(NAME, model, DataSpec(), steps=1)
    if args.quick:
        spec = replace(spec, rounds=replace(spec.rounds, inner_steps=5))
    return replace(spec, steps=(2 if args.quick else args.rounds) * spec.rounds.inner_steps)


def _prepare(spec: JobSpec, args: argparse.Namespace, folder: Path) -> Data:
    source = [Path(args.text)] if args.text else None
    documents = formats.read_files(source, "text") if source else builtin.documents("stdlib")
    place = folder / "data"
    place.mkdir()
    manifest, paths = prepare(
        documents, ByteTokenizer(), spec.seq_len, spec.data.held_out, spec.seed, place
    )
    shards = {s.blob.sha256: p for s, p in zip(manifest.shards, paths, strict=True)}
    return Data(manifest, shards, QUICK_HELD_OUT if args.quick else HELD_OUT)


def _summary(
    spec: JobSpec,
    args: argparse.Namespace,
    grids: dict[str, tuple[tuple[float, float], ...]],
    tuning: list[Result],
    final: list[Result],
) -> dict[str, Any]:
    losses = {
        side: [r.loss for r in sorted(final, key=lambda r: r.trial.seed) if r.trial.side == side]
        for side in grids
    }
    moved = fmean(r.bytes_node for r in final if r.trial.side == "diloco")
    manifest = family(spec.model.family).manifest(
        family(spec.model.family).PROFILES[spec.model.profile]
    )
    ring = 16 * (NODES - 1) / NODES * manifest.parameters * spec.steps
    by_seed = [a / b for a, b in zip(losses["diloco"], losses["ddp"], strict=True)]
    bytes_ratio = ring / moved
    best = {r.trial.side: r.trial for r in final}
    common.table(
        ["side", "lr", "muon lr", "held-out loss", "of data-parallel"],
        [
            [s, best[s].lr, best[s].muon_lr, fmean(x), fmean(x) / fmean(losses["ddp"])]
            for s, x in losses.items()
        ],
    )
    return {
        "loss_ratio_ddp": fmean(losses["diloco"]) / fmean(losses["ddp"]),
        "loss_ratio_adamw_ddp": fmean(losses["diloco"]) / fmean(losses["adamw_ddp"]),
        "loss_ratio_dense": None,
        "loss_ratio_ddp_by_seed": by_seed,
        "bytes_ratio_ddp": bytes_ratio,
        "bytes_ratio_ddp_steady": bytes_ratio,
        "seeds": len(by_seed),
        "tuned": {side: [list(lr) for lr in grid] for side, grid in grids.items()},
        "settings": {
            "nodes": NODES,
            "rounds": spec.round_count,
            "spec": to_plain(spec),
            "text": args.text or "stdlib",
            "quick": args.quick,
        },
        "samples": {
            "held_out_loss": losses,
            "tuning": [
                {
                    "side": r.trial.side,
                    "lr": r.trial.lr,
                    "muon_lr": r.trial.muon_lr,
                    "loss": r.loss,
                    "cpu_s": round(r.seconds, 1),
                }
                for r in tuning
            ],
            "cpu_s": round(sum(r.seconds for r in {*tuning, *final}), 1),
        },
        "spread": stdev(by_seed) / fmean(by_seed) if len(by_seed) > 1 else 0.0,
        "notes": [
            "loss_ratio_dense is null: the default codecs are dense fp32 already",
            "no weights are sent at the start (version 0 is made from the seed) and there is no "
            "probation, so bytes_ratio_ddp_steady equals bytes_ratio_ddp",
            "spread is over seeds; a repeated run on the same processor gives the same losses, "
            "whatever else the machine does",
            "cpu_s is that of all trials, one thread each: half of it is the time on two cores",
        ],
    }


def _told(result: Result) -> Result:
    trial = result.trial
    print(
        f"{trial.side:10} lr {trial.lr:g} muon {trial.muon_lr:g} seed {trial.seed}: "
        f"{result.loss:.4f} in {result.seconds:.0f} s of CPU",
        file=sys.stderr,
        flush=True,
    )
    return result


def _one_thread() -> None:
    import torch

    torch.set_num_threads(1)
