"""Loss against bytes: what longer rounds and coarser codecs cost, at equal tokens.

A small model (width 64, two layers, 0.13 million parameters) over four nodes and 800 steps: dense
rounds of several lengths, rounds of 20 steps in every codec both ways, and those codecs in longer
rounds. One seed and one learning rate for all, the default's, so it tells apart differences of
about half a percent. The nodes' side is that of ``bench learning``. ``--plot`` draws the curve of
docs/explanation/silence.md.
"""

from __future__ import annotations

import argparse
import multiprocessing
import tempfile
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from typing import Any

from bench import common
from bench._training import (
    NODES,
    Result,
    Trial,
    one_thread,
    prepared,
    ring_bytes,
    small_model,
    train,
)
from distribai.api.recipe import recipe_of
from distribai.core.plain import to_plain
from distribai.core.plan import parameter_count
from distribai.core.spec import JobSpec
from distribai.data import builtin

NAME = "curve"
HELP = "held-out loss against bytes, by codec and length of rounds"

STEPS, QUICK_STEPS = 800, 40
HELD_OUT, QUICK_HELD_OUT = 2048, 128
RATES = (0.012, 0.005)
"""AdamW's and Muon's, the middle ones of ``bench learning``'s grid."""

DENSE = "fp32"
POINTS: dict[tuple[str, str], tuple[int, ...]] = {
    ("fp32", "fp32"): (10, 20, 40, 80),
    ("int8", "int8"): (20,),
    ("int4", "int4"): (20,),
    ("int3", "int3"): (20, 40, 80),
    ("int2", "int3"): (20, 40, 80),
    ("int2", "int2"): (20, 40, 80),
    ("sparse256", "sparse256"): (20,),
    ("sparse", "sparse"): (20,),
}
"""Lengths of rounds by codec up and down."""

QUICK_POINTS: dict[tuple[str, str], tuple[int, ...]] = {
    ("fp32", "fp32"): (20,),
    ("int2", "int3"): (20,),
}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The benchmark's own options."""
    parser.add_argument("--plot", metavar="FILE", help="draw it as SVG (needs matplotlib)")
    parser.add_argument("--workers", type=int, default=2, help="processes, one thread each")
    parser.add_argument(
        "--point", metavar="UP/DOWN/H", help="this one alone, and dense rounds of its length"
    )
    parser.add_argument("--steps", type=int, default=0, help=f"inner steps of each run: {STEPS}")


def run(args: argparse.Namespace) -> dict[str, Any]:
    """Train each point once."""
    wanted = QUICK_POINTS if args.quick else POINTS
    points = [(up, down, inner) for (up, down), lengths in wanted.items() for inner in lengths]
    if args.point:
        up, down, inner = args.point.split("/")
        points = [(DENSE, DENSE, int(inner)), (up, down, int(inner))]
    steps = args.steps or (QUICK_STEPS if args.quick else STEPS)
    specs = [_spec(*point, steps) for point in points]
    with tempfile.TemporaryDirectory(prefix="distribai-bench-") as folder:
        held_out = QUICK_HELD_OUT if args.quick else HELD_OUT
        data = prepared(builtin.documents("stdlib"), specs[0], Path(folder), held_out)
        with ProcessPoolExecutor(
            args.workers, multiprocessing.get_context("spawn"), initializer=one_thread
        ) as pool:
            waiting = [
                pool.submit(train, spec, Trial("diloco", *RATES, 0), data, folder) for spec in specs
            ]
            results = [future.result() for future in waiting]
    rows = [_row(point, spec, r) for point, spec, r in zip(points, specs, results, strict=True)]
    dense = {row["inner_steps"]: row["loss"] for row in rows if row["up"] == DENSE}
    for row in rows:
        row["loss_ratio_dense"] = row["loss"] / dense[row["inner_steps"]]
    keys = list(rows[0])
    common.table(keys, [[row[key] for key in keys] for row in rows])
    if args.plot:
        _plot(rows, Path(args.plot))
    return {
        "points": rows,
        "settings": {
            "nodes": NODES,
            "parameters": parameter_count(specs[0]),
            "spec": to_plain(specs[0]),
            "quick": args.quick,
        },
        "spread": 0.0,
        "notes": ["one seed: differences below half a percent say nothing"],
    }


def _spec(up: str, down: str, inner_steps: int, steps: int) -> JobSpec:
    values: dict[str, Any] = {
        "name": NAME,
        "steps": steps,
        "batch": 4,
        "model": {"architecture_config": to_plain(small_model())},
        "rounds": {"inner_steps": inner_steps, "codec_up": up, "codec_down": down},
    }
    return recipe_of(values, "the benchmark").to_spec({})


def _row(point: tuple[str, str, int], spec: JobSpec, result: Result) -> dict[str, Any]:
    up, down, inner_steps = point
    return {
        "up": up,
        "down": down,
        "inner_steps": inner_steps,
        "bytes_ratio_ddp": ring_bytes(spec) / result.bytes_node,
        "loss": result.loss,
    }


def _plot(rows: list[dict[str, Any]], path: Path) -> None:
    import matplotlib

    matplotlib.use("svg")
    # Middle grey reads on white and on black pages; text stays text.
    grey = "#808080"
    keys = ("text.color", "axes.labelcolor", "axes.edgecolor", "xtick.color", "ytick.color")
    with matplotlib.rc_context(dict.fromkeys(keys, grey) | {"svg.fonttype": "none"}):
        from matplotlib import pyplot

        figure, axes = pyplot.subplots(figsize=(7, 4.5), layout="constrained")
        pairs = dict.fromkeys((row["up"], row["down"]) for row in rows)
        # Lines lie close together: the first and the last of several points say their rounds.
        several = [pair for pair in pairs if sum((r["up"], r["down"]) == pair for r in rows) > 1]
        beside = dict.fromkeys(several[:1], (-8, 8)) | dict.fromkeys(several[-1:], (2, -14))
        for up, down in pairs:
            line = [row for row in rows if (row["up"], row["down"]) == (up, down)]
            x, y = [row["bytes_ratio_ddp"] for row in line], [row["loss"] for row in line]
            axes.plot(x, y, marker="o", label=up if up == down else f"{up} up, {down} down")
            if offset := beside.get((up, down)):
                for place, row in zip(zip(x, y, strict=True), line, strict=True):
                    text = f"H {row['inner_steps']}"
                    axes.annotate(text, place, offset, textcoords="offset points", fontsize=8)
        axes.set_xscale("log")
        axes.xaxis.set_major_formatter("{x:g}")
        axes.set_xlabel("times fewer bytes than data-parallel training in fp32, K = 4")
        axes.set_ylabel("held-out loss at equal tokens")
        axes.grid(alpha=0.3)
        axes.legend(framealpha=0)
        path.parent.mkdir(parents=True, exist_ok=True)
        figure.savefig(path, transparent=True, metadata={"Date": None})
