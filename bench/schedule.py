"""Matching queued tasks and free devices: seconds for each size, and how they grow."""

from __future__ import annotations

import argparse
import random
import statistics
import time
from typing import Any

from bench import common
from distribai.core.needs import Capacity, Needs
from distribai.core.scheduling import FreeDevice, QueuedTask, match
from distribai.core.turns import TIERS

NAME = "schedule"
HELP = "Match ten thousand queued tasks against ten thousand devices within one tick's second."

REACH_S = 1.0
"""A tick's second, for the largest size."""

JOBS, ORGANIZATIONS = 200, 20
NOW = 10_000.0


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """What the command line takes besides ``--quick`` and ``--json``."""
    parser.add_argument("--repetitions", type=int, default=7, help="of each measurement")


def picture(size: int, crowded: bool, seed: int = 0) -> tuple[list[QueuedTask], list[FreeDevice]]:
    """``size`` tasks of 200 jobs, half of them with needs beside memory, against as many devices,
    no two alike; ``crowded``: a tenth of the devices, so that most tasks wait."""
    rng = random.Random(seed)
    needs = [
        Needs(
            disk_mb=rng.choice([0, 1000, 50_000]),
            gflops=rng.choice([0.0, 20.0, 100.0]),
            standing=rng.choice(["any", "trusted"]),
        )
        if job % 2
        else Needs()
        for job in range(JOBS)
    ]
    tasks = []
    for i in range(size):
        job = rng.randrange(JOBS)
        tasks.append(
            QueuedTask(
                f"task_{i:06}",
                f"job_{job}",
                rng.choice(["train", "train", "evaluate", "generate"]),
                rng.choice(TIERS),
                NOW - rng.random() * 8000,
                memory_mb=rng.choice([500, 1000, 4000, 8000]),
                base_version=rng.randrange(5),
                preferred=(f"node_{rng.randrange(size):06}", 0) if rng.random() < 0.5 else None,
                needs=needs[job],
                organization=f"org_{job % ORGANIZATIONS}",
                weight=rng.choice([0.5, 1.0, 4.0]),
                cost=rng.choice([5.0, 60.0, 600.0]),
            )
        )
    devices = [
        FreeDevice(
            f"node_{i:06}",
            0,
            rng.choice(["cpu", "cpu", "cuda"]),
            rng.choice([2000, 8000, 16_000, 0]),
            {f"job_{rng.randrange(JOBS)}": rng.randrange(5)},
            Capacity(
                disk_mb=rng.randrange(200_000),
                gflops=rng.random() * 500,
                trusted=rng.random() < 0.9,
            ),
        )
        for i in range(size // 10 if crowded else size)
    ]
    return tasks, devices


def run(args: argparse.Namespace) -> dict[str, Any]:
    """Measure; the result for the JSON line."""
    sizes = [1000, 10_000] if args.quick else [1000, 3000, 10_000, 30_000]
    repetitions = 3 if args.quick else args.repetitions
    rows, figures = [], {}
    for size in sizes:
        for crowded in (False, True):
            tasks, devices = picture(size, crowded)
            seconds, matched = [], 0
            for _ in range(repetitions):
                # CPU time: what else the machine does is not the matching's.
                began = time.process_time()
                matches, reasons = match(tasks, devices, NOW)
                seconds.append(time.process_time() - began)
                matched = len(matches)
                assert matched + len(reasons) == size
            median = statistics.median(seconds)
            name = f"{size} tasks, {len(devices)} devices"
            rows.append((name, matched, median, max(seconds), 1e6 * median / size))
            figures[f"{size}x{len(devices)}"] = {"seconds": seconds, "matched": matched}
    common.table(("size", "matched", "median s", "worst s", "us a task"), rows)
    worst = max(figures["10000x10000"]["seconds"] + figures["10000x1000"]["seconds"])
    common.say(f"Ten thousand tasks: {worst:.3f} s at worst, of {REACH_S:g} s.")
    spreads = [max(f["seconds"]) / min(f["seconds"]) - 1 for f in figures.values()]
    return {
        "figures": figures,
        "worst_10000_s": worst,
        "reach_s": REACH_S,
        "reached": worst <= REACH_S,
        "spread": statistics.median(spreads),
        "noisy": False,
    }
