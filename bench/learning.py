"""Whether it learns: DiLoCo over K nodes against data-parallel training on the same tokens.

Three sides, each with the learning rates that are best for it on a grid of the same size (tuned at
full length on the first seed): the product's default recipe over K nodes, data-parallel training
with the same inner optimizer, and data-parallel training with AdamW. Data-parallel means one model
and a batch of K times the nodes', for the same number of steps: equal tokens, and the very same
samples in each round.

The nodes' side is the product's own code: ``InnerLoop``, deltas and updates as files with error
feedback, ``merge_files``, the split of ``core.paradigms.diloco``. Only processes and wire are left
out, since they change no figure.

With another recipe than the default the question is what its silence costs: its own side against
*dense* rounds, fp32 both ways with the same H and the default's outer step, both tuned on the same
grid, over ten rounds (with a schedule of that length), so that the whole takes 50 minutes. The
model is larger then.
"""

from __future__ import annotations

import argparse
import multiprocessing
import os
import sys
import tempfile
from collections.abc import Callable
from concurrent.futures import FIRST_COMPLETED, Future, ProcessPoolExecutor, wait
from dataclasses import replace
from pathlib import Path
from statistics import fmean, stdev
from typing import Any

from bench import common
from bench._training import (
    NODES,
    Data,
    Result,
    Trial,
    one_thread,
    prepared,
    ring_bytes,
    train,
    wide_model,
)
from distribai.api.presets import PRESETS
from distribai.api.recipe import recipe_of
from distribai.core.architectures import family
from distribai.core.plain import to_plain
from distribai.core.plan import parameter_count
from distribai.core.spec import JobSpec
from distribai.data import builtin, formats

NAME = "learning"
HELP = "held-out loss of DiLoCo over that of data-parallel training, all sides tuned"

KEEP_PAGES = {"MALLOC_MMAP_THRESHOLD_": str(2**30), "MALLOC_TRIM_THRESHOLD_": str(2**32)}

HELD_OUT = 2048
QUICK_HELD_OUT = 256
"""Held-out sequences that a final loss is over, at most."""

GRIDS: dict[str, tuple[tuple[float, float], ...]] = {
    "diloco": ((0.007, 0.003), (0.012, 0.005), (0.02, 0.0085)),
    "dense": ((0.007, 0.003), (0.012, 0.005), (0.02, 0.0085)),
    "ddp": ((0.004, 0.007), (0.007, 0.012), (0.012, 0.02)),
    "adamw_ddp": ((0.0012, 0.0), (0.002, 0.0), (0.0035, 0.0)),
}
"""Learning rates (AdamW's, Muon's) that each side is tuned over."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The benchmark's own options."""
    parser.add_argument("--text", metavar="FILE", help="train on this file, not on stdlib")
    parser.add_argument("--recipe", choices=PRESETS, default="default")
    parser.add_argument("--rounds", type=int, default=0, help="60; 40 with another recipe")
    parser.add_argument("--inner-steps", type=int, default=0, help="instead of the recipe's")
    parser.add_argument(
        "--batch",
        type=int,
        default=0,
        help="sequences of a node and step: 8; 2 with another recipe",
    )
    parser.add_argument("--profile", default="", help="size of the model; tiny, or 1.5M parameters")
    parser.add_argument("--codec-up", default="", help="instead of the recipe's")
    parser.add_argument("--codec-down", default="", help="instead of the recipe's")
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument(
        "--rate", type=int, choices=(0, 1, 2), help="no tuning: this one of the grid"
    )
    parser.add_argument(
        "--tuning-rounds", type=int, default=10, help="that another recipe's rates are tuned on"
    )
    parser.add_argument("--workers", type=int, default=2, help="processes, one thread each")


def run(args: argparse.Namespace) -> dict[str, Any]:
    """Tune each side, run its best rates on every seed, and compare."""
    spec = _spec(args)
    sides = ("diloco", "ddp", "adamw_ddp") if args.recipe == "default" else ("diloco", "dense")
    few = slice(1, 2) if args.quick else slice(None)
    if args.rate is not None:
        few = slice(args.rate, args.rate + 1)
    grids = {side: GRIDS[side][few] for side in sides}
    seeds = range(1 if args.quick else args.seeds)
    # Read by glibc when a worker starts: it keeps its pages, which saves some 5 % of small steps.
    os.environ.update(KEEP_PAGES)
    with tempfile.TemporaryDirectory(prefix="distribai-bench-") as folder:
        data = _prepare(spec, args, Path(folder))
        with ProcessPoolExecutor(
            args.workers, multiprocessing.get_context("spawn"), initializer=one_thread
        ) as pool:
            tuning, final = _tune_and_repeat(
                lambda trial: pool.submit(train, spec, trial, data, folder),
                grids,
                seeds,
                _tuning_rounds(args),
            )
    return _summary(spec, args, grids, tuning, final)


def _tune_and_repeat(
    submit: Callable[[Trial], Future[Result]],
    grids: dict[str, tuple[tuple[float, float], ...]],
    seeds: range,
    tuning_rounds: int,
) -> tuple[list[Result], list[Result]]:
    """The tuning trials of each side, and its best rates on every seed.

    A side's seeds start as soon as its own grid is done, so that no worker idles. Trials at full
    length count as the first seed's; those over ``tuning_rounds`` do not.
    """
    waiting = {submit(Trial(s, *lr, 0, tuning_rounds)) for s, grid in grids.items() for lr in grid}
    tuning: list[Result] = []
    final: list[Result] = []
    while waiting:
        ended, waiting = wait(waiting, return_when=FIRST_COMPLETED)
        for result in (_told(f.result()) for f in ended):
            side = result.trial.side
            if result.trial.seed or result.trial.rounds != tuning_rounds:
                final.append(result)
                continue
            tuning.append(result)
            grid = [r for r in tuning if r.trial.side == side]
            if len(grid) < len(grids[side]):
                continue
            best = min(grid, key=lambda r: r.loss)
            if not tuning_rounds:
                final.append(best)
            more = seeds if tuning_rounds else seeds[1:]
            waiting |= {submit(replace(best.trial, seed=seed, rounds=0)) for seed in more}
    return tuning, final


def _spec(args: argparse.Namespace) -> JobSpec:
    """The recipe's figures, over as many rounds as asked for."""
    plain = args.recipe == "default"
    config = wide_model()
    if plain or args.profile:
        config = family("decoder_transformer").PROFILES[args.profile or "tiny"]
    values: dict[str, Any] = {
        "name": NAME,
        "steps": 1,
        "batch": args.batch or (8 if plain else 2),
        "preset": args.recipe,
        "model": {"architecture_config": to_plain(config)},
        "rounds": {},
    }
    chosen = {"inner_steps": args.inner_steps or (5 if args.quick else 0)}
    chosen |= {"codec_up": args.codec_up, "codec_down": args.codec_down}
    values["rounds"] = {name: value for name, value in chosen.items() if value}
    spec = recipe_of(values, "the benchmark").to_spec({})
    rounds = 2 if args.quick else args.rounds or (60 if plain else 40)
    return replace(spec, steps=rounds * spec.rounds.inner_steps)


def _prepare(spec: JobSpec, args: argparse.Namespace, folder: Path) -> Data:
    source = [Path(args.text)] if args.text else None
    documents = formats.read_files(source, "text") if source else builtin.documents("stdlib")
    return prepared(documents, spec, folder, QUICK_HELD_OUT if args.quick else HELD_OUT)


def _tuning_rounds(args: argparse.Namespace) -> int:
    """Rounds of a tuning trial; 0: all of the job's."""
    return 0 if args.quick or args.recipe == "default" else args.tuning_rounds


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
    mean = {side: fmean(values) for side, values in losses.items()}

    def over(side: str) -> float | None:
        return mean["diloco"] / mean[side] if side in mean else None

    other = "ddp" if "ddp" in losses else "dense"
    by_seed = [a / b for a, b in zip(losses["diloco"], losses[other], strict=True)]
    bytes_ratio = ring_bytes(spec) / moved
    best = {r.trial.side: r.trial for r in final}
    common.table(
        ["side", "lr", "muon lr", "held-out loss", f"of {other}"],
        [[s, best[s].lr, best[s].muon_lr, mean[s], mean[s] / mean[other]] for s in losses],
    )
    common.say(f"{bytes_ratio:.0f} times fewer bytes than fp32 ring all-reduce.")
    return {
        "loss_ratio_ddp": over("ddp"),
        "loss_ratio_adamw_ddp": over("adamw_ddp"),
        "loss_ratio_dense": over("dense"),
        "loss_ratio_ddp_by_seed": by_seed if other == "ddp" else None,
        "loss_ratio_dense_by_seed": by_seed if other == "dense" else None,
        "bytes_ratio_ddp": bytes_ratio,
        "bytes_ratio_ddp_steady": bytes_ratio,
        "seeds": len(by_seed),
        "tuned": {side: [list(lr) for lr in grid] for side, grid in grids.items()},
        "settings": {
            "nodes": NODES,
            "recipe": args.recipe,
            "parameters": parameter_count(spec),
            "rounds": spec.round_count,
            "spec": to_plain(spec),
            "text": args.text or "stdlib",
            "tuning_rounds": _tuning_rounds(args),
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
            "a ratio is null where its other side was not run: the default recipe is compared with "
            "data-parallel training, other recipes with dense rounds",
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
