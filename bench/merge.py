"""The mean and the outer step against what memory bandwidth allows.

A merge of K deltas must read 4K bytes of deltas and read and write theta and momentum: (4K + 16)
bytes a parameter. Blocked numpy ``y += a x`` with the same threads, at 12 bytes an element, says
how fast memory is for numpy here; of several block sizes the fastest counts. ``axpy_ratio`` is the
time that the merge would take at that speed over the time it takes: 1 is at the bound. With the
update written there are 4 bytes more, counted in its own bound. ``axpy_ratio_cpu`` is the same by
CPU time, which other processes disturb less.

Theta and momentum are overwritten in place: writing elsewhere would make the processor read the old
contents of the target as well, which neither side's count includes.
"""

from __future__ import annotations

import argparse
import statistics
import threading
import time
import tracemalloc
from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np
from numpy.typing import NDArray

from bench import common
from distribai.core.tensors import ParameterManifest, TensorSpec
from distribai.merge.codecs import codec
from distribai.merge.delta import Delta, DeltaHeader
from distribai.merge.outer import merge_round
from distribai.merge.packed import Packed

NAME = "merge"
HELP = "mean and outer step against what memory bandwidth allows"
BLOCKS = (16384, 32768, 65536)
ETA, MU = 0.75, 0.5  # exact in fp32; speed does not depend on them


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The benchmark's own options."""
    parser.add_argument("--parameters", type=int, default=10_000_000)
    parser.add_argument("--deltas", type=int, default=8, metavar="K")
    parser.add_argument("--threads", type=int, nargs="+", default=[1, 2])
    parser.add_argument("--repetitions", type=int, default=21)


def run(args: argparse.Namespace) -> dict[str, Any]:
    """Measure each number of threads; the headline is that of one thread."""
    if args.quick:
        args.repetitions = 3
    job = Job(args.parameters, args.deltas)
    by_threads = {t: _measure(job, t, args.repetitions) for t in args.threads}
    common.table(
        ["threads", "case", "axpy_ratio", "by CPU time", "ms", "cpu_s", "axpy GB/s", "spread"],
        [
            [
                *(t, case, r["axpy_ratio"], r["axpy_ratio_cpu"], r["ms"], r["cpu_s"]),
                *(result["axpy_gb_s"], result["spread"]),
            ]
            for t, result in by_threads.items()
            for case, r in result["cases"].items()
        ],
    )
    extra = {case: job.peak_extra_mb(case) for case in ("equal", "weighted")}
    common.say(f"Peak memory beyond the arrays: {max(extra.values()):.2f} MB.")
    first = by_threads[args.threads[0]]
    spread = max(r["spread"] for r in by_threads.values())
    return {
        "settings": {
            "rule": "mean",
            "parameters": args.parameters,
            "deltas": args.deltas,
            "threads": args.threads,
            "repetitions": args.repetitions,
            "headline_threads": args.threads[0],
            "quick": args.quick,
        },
        "samples": {str(t): r["samples"] for t, r in by_threads.items()},
        "spread": spread,
        "noisy": spread > common.NOISY,
        "axpy_ratio": {"mean": {c: first["cases"][c]["axpy_ratio"] for c in Job.CASES}},
        "axpy_ratio_cpu": {"mean": {c: first["cases"][c]["axpy_ratio_cpu"] for c in Job.CASES}},
        "cpu_s": {"mean": {c: first["cases"][c]["cpu_s"] for c in Job.CASES}},
        "peak_extra_mb": {"mean": extra},
        "by_threads": {
            str(t): {k: v for k, v in r.items() if k != "samples"} for t, r in by_threads.items()
        },
    }


class Job:
    """Arrays of one model in the shape of a transformer's: a few large matrices, some vectors."""

    CASES = ("equal", "weighted", "equal+update", "weighted+update")

    def __init__(self, parameters: int, count: int) -> None:
        self.manifest = _manifest(parameters)
        self.parameters = self.manifest.parameters
        self.count = count
        rng = np.random.default_rng(0)

        def arrays() -> dict[str, NDArray[np.float32]]:
            # One buffer with the tensors behind each other, as in a file; also the same kind of
            # memory (huge pages or not) as the vectors of the bound.
            line, found = _vector(rng, self.parameters), {}
            start = 0
            for t in self.manifest.tensors:
                found[t.name] = line[start : start + t.size].reshape(t.shape)
                start += t.size
            return found

        self.theta, self.momentum, self.update = arrays(), arrays(), arrays()
        hash_ = self.manifest.hash
        self.deltas = [
            Delta(
                DeltaHeader("bench", f"t{k}", 1, 0, hash_, "fp32", 1, 1),
                Packed(codec("fp32"), arrays()),
            )
            for k in range(count)
        ]
        # As many vectors as a merge moves bytes, so that none is found in a cache from the last
        # pass over it.
        self.passes = max(1, round(self.bound_bytes("equal") / 12 / self.parameters))
        self.vectors = [
            (_vector(rng, self.parameters), _vector(rng, self.parameters))
            for _ in range(self.passes)
        ]

    def bound_bytes(self, case: str) -> int:
        """Bytes that must move, of all parameters."""
        return (4 * self.count + 16 + 4 * case.endswith("+update")) * self.parameters

    def merge(self, case: str, threads: int) -> None:
        """One round, theta and momentum in place."""
        tokens = [1] * self.count if case.startswith("equal") else list(range(1, self.count + 1))
        merge_round(
            self.manifest,
            self.theta,
            self.momentum,
            self.deltas,
            tokens,
            ETA,
            MU,
            self.theta,
            self.momentum,
            self.update if case.endswith("+update") else None,
            threads=threads,
        )

    def axpy(self, block: int, threads: int) -> None:
        """Blocked ``y += a x``, over all pairs of vectors."""
        edges = [self.parameters * i // threads for i in range(threads + 1)]
        if threads == 1:
            self._axpy_range(block, 0, self.parameters)
            return
        workers = [
            threading.Thread(target=self._axpy_range, args=(block, edges[i], edges[i + 1]))
            for i in range(threads)
        ]
        for worker in workers:
            worker.start()
        for worker in workers:
            worker.join()

    def _axpy_range(self, block: int, start: int, stop: int) -> None:
        scratch, a = np.empty(block, np.float32), np.array(1e-3, np.float32)
        for x, y in self.vectors:
            for lo in range(start, stop, block):
                hi = min(lo + block, stop)
                product, target = scratch[: hi - lo], y[lo:hi]
                np.multiply(x[lo:hi], a, product)
                np.add(target, product, target)

    def peak_extra_mb(self, case: str) -> float:
        """Peak of what one merge allocates, MB, as numpy reports it to tracemalloc."""
        tracemalloc.start()
        before = tracemalloc.get_traced_memory()[0]
        self.merge(case, 1)
        peak = tracemalloc.get_traced_memory()[1]
        tracemalloc.stop()
        return round((peak - before) / 1e6, 3)


def _vector(rng: np.random.Generator, size: int) -> NDArray[np.float32]:
    """Random values that begin on a cache line, as the data of our files do."""
    room = np.empty(size + 16, np.float32)
    first = -room.ctypes.data % 64 // 4
    return rng.random(dtype=np.float32, out=room[first : first + size])


def _manifest(parameters: int) -> ParameterManifest:
    wide = max(64, int((parameters / 10) ** 0.5))
    tensors = []
    for i in range(10):
        tensors.append(TensorSpec(f"blocks.{i}.weight", (wide, wide)))
        tensors.append(TensorSpec(f"blocks.{i}.norm", (wide,)))
    return ParameterManifest(tuple(tensors))


def _measure(job: Job, threads: int, repetitions: int) -> dict[str, Any]:
    block = _fastest_block(job, threads)
    cpu: dict[str, list[float]] = {name: [] for name in ("axpy", *job.CASES)}

    def timed(name: str) -> float:
        start = time.process_time()
        seconds = _seconds(
            lambda: job.axpy(block, threads) if name == "axpy" else job.merge(name, threads)
        )
        cpu[name].append(time.process_time() - start)
        return seconds

    measures = {name: partial(timed, name) for name in cpu}
    samples = common.alternate(measures, "axpy", repetitions)
    axpy_bytes = 12 * job.parameters * job.passes
    cpu_s = {name: statistics.median(values) for name, values in cpu.items()}
    return {
        "cases": {
            case: {
                "axpy_ratio": job.bound_bytes(case) / axpy_bytes / samples.ratio(case),
                "axpy_ratio_cpu": job.bound_bytes(case) / axpy_bytes * cpu_s["axpy"] / cpu_s[case],
                "ms": 1e3 * statistics.median(samples.figures[case]),
                "cpu_s": cpu_s[case],
            }
            for case in job.CASES
        },
        "axpy_gb_s": axpy_bytes / statistics.median(samples.figures["axpy"]) / 1e9,
        "axpy_block": block,
        "spread": samples.spread,
        "samples": samples.rounded(),
    }


def _fastest_block(job: Job, threads: int) -> int:
    best = {b: min(_seconds(partial(job.axpy, b, threads)) for _ in range(5)) for b in BLOCKS}
    return min(best, key=lambda b: best[b])


def _seconds(work: Callable[[], None]) -> float:
    start = time.perf_counter()
    work()
    return time.perf_counter() - start
