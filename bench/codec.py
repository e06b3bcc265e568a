"""Codecs: bits per parameter, speed against memcpy, and the error that a codec makes.

A tensor of normal numbers is encoded and decoded in alternation with a copy of it, one thread each.
``*_memcpy_ratio`` is the time of the copy over that of the codec: 1 is as fast as copying fp32.
``relative_error`` is the norm of what got lost over that of the values, ``theory`` what it should
be: for bf16 and integers from uniformly distributed rounding errors (a step over root 12), for int3
and int2 from the best four or two levels of normal numbers' magnitudes, for sparse codecs the
energy of normal numbers that are not among the largest, and of two magnitudes that stand for those
that are.
"""

from __future__ import annotations

import argparse
import math
import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from bench import common
from distribai.core.codecs import SCALE
from distribai.core.tensors import ParameterManifest, TensorSpec
from distribai.merge.codecs import Codec, codecs
from distribai.merge.codecs.integers import BLOCK, STEP
from distribai.merge.codecs.sparse import LEVELS
from distribai.merge.update import UpdateHeader, write_update

NAME = "codec"
HELP = "size, speed and error of each codec"

QUICK_PARAMETERS = 1_000_000

PIECE = 1 << 17
"""Elements that a merge decodes at a time."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The benchmark's own options."""
    parser.add_argument("--parameters", type=int, nargs="+", default=[100_000, 10_000_000])
    parser.add_argument("--repetitions", type=int, default=15)


def run(args: argparse.Namespace) -> dict[str, Any]:
    """Each codec at each size; the headline is the largest."""
    if args.quick:
        args.repetitions = 3
        args.parameters = [min(size, QUICK_PARAMETERS) for size in args.parameters]
    by_size: dict[str, dict[str, dict[str, float]]] = {}
    spread = 0.0
    for parameters in args.parameters:
        values = np.random.default_rng(0).standard_normal(parameters).astype(np.float32)
        found = {}
        for name, how in codecs().items():
            found[name], noise = _measure(how, values, args.repetitions)
            spread = max(spread, noise)
        by_size[str(parameters)] = found
        common.say(f"{parameters} parameters")
        keys = list(next(iter(found.values())))
        common.table(["codec", *keys], [[n, *(f[k] for k in keys)] for n, f in found.items()])
    return {
        "settings": {
            "parameters": args.parameters,
            "repetitions": args.repetitions,
            "threads": 1,
            "quick": args.quick,
        },
        "samples": by_size,
        "spread": spread,
        "noisy": spread > common.NOISY,
        **by_size[str(args.parameters[-1])],
    }


def _measure(
    how: Codec, values: NDArray[np.float32], repetitions: int
) -> tuple[dict[str, float], float]:
    spec = TensorSpec("w", values.shape)
    parts = {p.suffix: p for p in how.parts(spec)}
    target = np.empty_like(values)
    stored = how.encode(values)
    read = how.reader(spec, {s: a.reshape(parts[s].shape) for s, a in stored.items()})

    def decode() -> None:
        scratch = np.empty(min(PIECE, values.size), np.float32)
        for start in range(0, values.size, PIECE):
            stop = min(start + PIECE, values.size)
            read(start, stop, scratch[: stop - start])

    copies, encodes, decodes = [], [], []
    for _ in range(repetitions):
        copies.append(_seconds(lambda: np.copyto(target, values)))
        encodes.append(_seconds(lambda: how.encode(values)))
        copies.append(_seconds(lambda: np.copyto(target, values)))
        decodes.append(_seconds(decode))
    copy = statistics.median(copies)
    arrived = np.concatenate(
        [
            read(at, min(at + PIECE, values.size), np.empty(min(PIECE, values.size - at), "f4"))
            for at in range(0, values.size, PIECE)
        ]
    )
    total, header = _file_bytes(how, values, spec)
    halves = statistics.median(copies[0::2]) / statistics.median(copies[1::2])
    return {
        "bits_per_parameter": 8 * total / values.size,
        "header_share": header / total,
        "encode_memcpy_ratio": copy / statistics.median(encodes),
        "decode_memcpy_ratio": copy / statistics.median(decodes),
        "relative_error": _norm(values - arrived) / _norm(values),
        "theory": _theory(how.name, values, stored),
    }, abs(halves - 1)


def _seconds(work: Callable[[], object]) -> float:
    began = time.perf_counter()
    work()
    return time.perf_counter() - began


def _file_bytes(how: Codec, values: NDArray[np.float32], spec: TensorSpec) -> tuple[int, int]:
    """Bytes of an update file with this one tensor, and of what in it is no value."""
    manifest = ParameterManifest((spec,))
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "update"
        claim = UpdateHeader("bench", 1, manifest.hash, how.name)
        total = write_update(path, manifest, {"w": values}, claim).size
    return total, total - sum(a.nbytes for a in how.encode(values).values())


def _norm(values: NDArray[np.float32]) -> float:
    return math.sqrt(float(np.dot(values.astype(np.float64), values.astype(np.float64))))


def _theory(name: str, values: NDArray[np.float32], stored: Any) -> float:
    total = _norm(values)
    if name == "fp32":
        return 0.0
    if name == "bf16":  # a unit is 2^-7 of the power of two below
        units = np.exp2(np.floor(np.log2(np.abs(values[values != 0]))) - 7)
        return _norm(units) / math.sqrt(12) / total
    if STEP in stored:
        steps = np.repeat(stored[STEP], BLOCK)[: values.size]
        return _norm(steps) / math.sqrt(12) / total
    if SCALE in stored:
        return _halves_theory(int(name.removeprefix("int")))
    assert LEVELS in stored
    return _sparse_theory(int(name.removeprefix("sparse") or 64) / 4096)


def _halves_theory(bits: int) -> float:
    """Relative error of half-odd levels that send just as much of normal numbers as there is: the
    tangent of the angle between numbers and levels, at the step that makes it smallest."""
    grid = np.linspace(0.0, 8.0, 40_001)
    density = np.exp(-(grid**2) / 2)
    density /= density.sum()
    found = []
    for step in np.linspace(0.1, 2.0, 191):
        level = np.minimum(np.floor(grid / step), 2 ** (bits - 1) - 1) + 0.5
        cosine2 = float(density @ (grid * level)) ** 2 / float(
            (density @ level**2) * (density @ grid**2)
        )
        found.append(math.sqrt(1 / cosine2 - 1))
    return min(found)


def _sparse_theory(share: float) -> float:
    """Relative error of keeping the largest ``share`` of normal numbers at two magnitudes."""
    grid = np.linspace(0.0, 12.0, 1_200_001)
    density = np.sqrt(2 / np.pi) * np.exp(-(grid**2) / 2)
    mass = np.cumsum(density) * (grid[1] - grid[0])
    bound = float(grid[np.searchsorted(mass, 1 - share)])
    kept = grid > bound
    middle = bound
    for _ in range(50):  # two-means of the kept ones
        upper = kept & (grid > middle)
        lower = kept & ~upper
        high = float(np.average(grid[upper], weights=density[upper]))
        low = float(np.average(grid[lower], weights=density[lower])) if lower.any() else bound
        middle = (low + high) / 2
    level = np.where(grid > middle, high, low)
    rest = np.where(kept, (grid - level) ** 2, grid**2)
    return math.sqrt(float(np.sum(rest * density) / np.sum(grid**2 * density)))
