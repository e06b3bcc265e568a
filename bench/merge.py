"""The mean and the outer step against what memory bandwidth allows.

A merge of K deltas must read 4K bytes of deltas and read and write theta and momentum: (4K + 16)
bytes a parameter. Blocked numpy ``y += a x`` with the same threads, at 12 bytes an element, says
how fast memory is for numpy here; of several block sizes the fastest counts. ``axpy_ratio`` is the
time that the merge would take at that speed over the time it takes: 1 is at the bound. With the
update written there are 4 bytes more, counted in its own bound. ``axpy_ratio_cpu`` is the same by
CPU time, which other processes disturb less.

With encoded deltas the same is merged between files, as an orchestrator does it: decoding, mean,
outer step, and the update encoded with error feedback. ``ms_files`` is the time, ``peak_mb``
what the process's memory rose by (Linux's high-water mark, files' pages included), for 4 and for 32
deltas: it must not grow with their number. Each is measured in a process of its own, not the one
that wrote the files, so that no memory that was freed before is used again unseen. ``axpy_ratio``
and ``axpy_ratio_cpu`` there are those of decoding, mean and outer step, without writing: the bound
is the bytes of the encoded deltas and 16 a parameter.

Theta and momentum are overwritten in place: writing elsewhere would make the processor read the old
contents of the target as well, which neither side's count includes.
"""

from __future__ import annotations

import argparse
import multiprocessing
import statistics
import tempfile
import threading
import time
import tracemalloc
from collections.abc import Callable, Mapping
from concurrent.futures import ProcessPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from bench import common
from distribai.core.codecs import feeds_back
from distribai.core.tensors import ParameterManifest, TensorSpec
from distribai.merge.codecs import codec
from distribai.merge.delta import Delta, DeltaHeader, open_delta, write_delta
from distribai.merge.feedback import Feedback
from distribai.merge.outer import UpdateHeader, merge_files, merge_round
from distribai.merge.packed import Packed
from distribai.merge.version0 import make_version0
from distribai.merge.weights import write_weights

NAME = "merge"
HELP = "mean and outer step against what memory bandwidth allows"
ENCODED, ENCODED_DELTAS = ("fp32", "int8", "int4", "int3", "int2", "sparse"), (4, 32)
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
    encoded = _encoded(args)
    common.table(
        [
            "codec",
            "deltas",
            "axpy_ratio",
            "by CPU time",
            "ms",
            "times fp32",
            "peak MB",
            "MB of theta",
        ],
        [
            [
                *(e["codec"], e["deltas"], e["axpy_ratio"], e["axpy_ratio_cpu"]),
                *(e["ms_files"], e["times_fp32"], e["peak_mb"], e["theta_mb"]),
            ]
            for e in encoded
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
        "encoded": encoded,
        "by_threads": {
            str(t): {k: v for k, v in r.items() if k != "samples"} for t, r in by_threads.items()
        },
    }


class Axpy:
    """Blocked ``y += a x`` over as many vectors as bytes would move, so that none is found in a
    cache from the last pass over it."""

    def __init__(self, parameters: int, bound_bytes: int) -> None:
        self.parameters = parameters
        passes = max(1, round(bound_bytes / 12 / parameters))
        self.bytes = 12 * parameters * passes
        rng = np.random.default_rng(0)
        self.vectors = [(_vector(rng, parameters), _vector(rng, parameters)) for _ in range(passes)]

    def run(self, block: int, threads: int) -> None:
        """Blocked ``y += a x``, over all pairs of vectors."""
        edges = [self.parameters * i // threads for i in range(threads + 1)]
        if threads == 1:
            self._range(block, 0, self.parameters)
            return
        workers = [
            threading.Thread(target=self._range, args=(block, edges[i], edges[i + 1]))
            for i in range(threads)
        ]
        for worker in workers:
            worker.start()
        for worker in workers:
            worker.join()

    def _range(self, block: int, start: int, stop: int) -> None:
        scratch, a = np.empty(block, np.float32), np.array(1e-3, np.float32)
        for x, y in self.vectors:
            for lo in range(start, stop, block):
                hi = min(lo + block, stop)
                product, target = scratch[: hi - lo], y[lo:hi]
                np.multiply(x[lo:hi], a, product)
                np.add(target, product, target)

    def fastest_block(self, threads: int) -> int:
        """The block size at which it runs fastest here."""
        best = {b: min(_seconds(partial(self.run, b, threads)) for _ in range(5)) for b in BLOCKS}
        return min(best, key=lambda b: best[b])


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
        self.axpy = Axpy(self.parameters, self.bound_bytes("equal"))

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

    def peak_extra_mb(self, case: str) -> float:
        """Peak of what one merge allocates, MB, as numpy reports it to tracemalloc."""
        tracemalloc.start()
        before = tracemalloc.get_traced_memory()[0]
        self.merge(case, 1)
        peak = tracemalloc.get_traced_memory()[1]
        tracemalloc.stop()
        return round((peak - before) / 1e6, 3)


def _encoded(args: argparse.Namespace) -> list[dict[str, Any]]:
    """Merges between files, by codec and number of deltas."""
    found = []
    parameters = min(args.parameters, 1_000_000) if args.quick else args.parameters
    for deltas in ENCODED_DELTAS:
        dense = 0.0
        for name in ENCODED:
            with tempfile.TemporaryDirectory(prefix="distribai-bench-") as folder:
                case = (Path(folder), _manifest(parameters), deltas, name)
                _in_a_process(write_files, *case)
                one = _in_a_process(merge_between_files, *case)
                one |= _in_a_process(merge_against_bound, *case, 3 if args.quick else 7)
            dense = dense or one["ms_files"]
            found.append({**one, "times_fp32": one["ms_files"] / dense})
    return found


def _in_a_process(work: Callable[..., Any], *args: Any) -> Any:
    with ProcessPoolExecutor(1, multiprocessing.get_context("spawn")) as pool:
        return pool.submit(work, *args).result()


def write_files(place: Path, manifest: ParameterManifest, count: int, name: str) -> None:
    """Weights, and ``count`` deltas from them in a codec."""
    base = make_version0(manifest, 0)
    write_weights(place / "theta", manifest, base)
    rng = np.random.default_rng(0)
    local = {n: a + rng.standard_normal(a.shape, np.float32) for n, a in base.items()}
    for k in range(count):
        write_delta(place / f"d{k}", manifest, base, local, _told(manifest, k, name))


def _told(manifest: ParameterManifest, k: int, name: str) -> DeltaHeader:
    return DeltaHeader("bench", f"t{k}", 1, 0, manifest.hash, name, 1 + k, 1)


def _opened(place: Path, manifest: ParameterManifest, count: int, name: str) -> list[Delta]:
    return [
        open_delta(place / f"d{k}", manifest, _told(manifest, k, name), scan=False)
        for k in range(count)
    ]


def merge_between_files(
    place: Path, manifest: ParameterManifest, count: int, name: str
) -> dict[str, Any]:
    """One round over files that are there, the update in the same codec, in this process."""
    deltas = _opened(place, manifest, count, name)
    _forget_peak()
    start, before = time.perf_counter(), _resident("VmRSS")
    merge_files(
        manifest,
        place / "theta",
        None,
        deltas,
        [d.header.tokens for d in deltas],
        ETA,
        MU,
        out_theta=place / "theta1",
        out_momentum=place / "momentum1",
        out_update=place / "update1",
        header=UpdateHeader("bench", 1, manifest.hash, name),
        feedback=Feedback(None, place / "kept1") if feeds_back(name) else None,
    )
    seconds = time.perf_counter() - start
    return {
        "codec": name,
        "deltas": count,
        "ms_files": 1e3 * seconds,
        "peak_mb": _resident("VmHWM") - before,
        "theta_mb": 4 * manifest.parameters / 1e6,
    }


def merge_against_bound(
    place: Path, manifest: ParameterManifest, count: int, name: str, repetitions: int
) -> dict[str, Any]:
    """Decoding, mean and outer step, one thread, theta and momentum in place, against the bound."""
    deltas = _opened(place, manifest, count, name)
    tokens = [d.header.tokens for d in deltas]
    theta = make_version0(manifest, 0)
    momentum = {n: np.zeros_like(a) for n, a in theta.items()}
    encoded = sum((place / f"d{k}").stat().st_size for k in range(count))
    bound = encoded + 16 * manifest.parameters
    axpy = Axpy(manifest.parameters, bound)
    block = axpy.fastest_block(1)
    merge = partial(merge_round, manifest, theta, momentum, deltas, tokens, ETA, MU)
    work = {"axpy": partial(axpy.run, block, 1), "merge": partial(merge, theta, momentum)}
    samples, cpu_s = _alternate(work, repetitions)
    share = bound / axpy.bytes
    by_cpu = share * cpu_s["axpy"] / cpu_s["merge"]
    by_clock = share / samples.ratio("merge")
    return {"axpy_ratio": by_clock, "axpy_ratio_cpu": by_cpu, "axpy_spread": samples.spread}


def _resident(what: str) -> float:
    """Memory of this process, MB: ``VmRSS`` now, ``VmHWM`` its peak since :func:`_forget_peak`."""
    status = Path("/proc/self/status").read_text()
    line = next(line for line in status.splitlines() if line.startswith(what))
    return int(line.split()[1]) / 1024


def _forget_peak() -> None:
    Path("/proc/self/clear_refs").write_text("5")


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
    block = job.axpy.fastest_block(threads)
    cases = {case: partial(job.merge, case, threads) for case in job.CASES}
    work = {"axpy": partial(job.axpy.run, block, threads), **cases}
    samples, cpu_s = _alternate(work, repetitions)
    axpy_bytes = job.axpy.bytes
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


def _alternate(
    work: Mapping[str, Callable[[], None]], repetitions: int
) -> tuple[common.Samples, dict[str, float]]:
    """Seconds of each against ``axpy``, and the medians of its CPU seconds."""
    cpu: dict[str, list[float]] = {name: [] for name in work}

    def timed(name: str) -> float:
        start = time.process_time()
        seconds = _seconds(work[name])
        cpu[name].append(time.process_time() - start)
        return seconds

    samples = common.alternate({name: partial(timed, name) for name in work}, "axpy", repetitions)
    return samples, {name: statistics.median(values) for name, values in cpu.items()}


def _seconds(work: Callable[[], None]) -> float:
    start = time.perf_counter()
    work()
    return time.perf_counter() - start
