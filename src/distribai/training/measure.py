"""How fast a device is: matrix products and copies, a third of a second of each."""

from __future__ import annotations

from collections.abc import Callable
from typing import Final

import torch

from distribai.core.child import Measured

BUDGET_S: Final = 0.3
"""Seconds that each of the two measurements takes, and a warm-up besides."""

SIDES: Final = {"cpu": 512, "mps": 2048, "cuda": 4096}
"""Side of the square matrices: large enough that starting a product costs nothing."""

COPY_BYTES: Final = 64 << 20


def measure(device: str, threads: int, clock: Callable[[], float]) -> Measured:
    """Measure ``device`` (torch's name for it) with so many CPU threads.

    The best of all repetitions counts: whatever else the machine does can only slow one down.

    Raises:
        RuntimeError: the device cannot do it (torch's own words), memory above all.
    """
    if threads > 0:
        torch.set_num_threads(threads)
    kind = device.split(":")[0]
    side = SIDES[kind]
    left = torch.rand(side, side, dtype=torch.float32, device=device)
    out = torch.empty_like(left)
    seconds = _best(lambda: torch.matmul(left, left, out=out), kind, clock)
    gflops = 2 * side**3 / seconds / 1e9
    source = torch.rand(COPY_BYTES // 4, dtype=torch.float32, device=device)
    target = torch.empty_like(source)
    seconds = _best(lambda: target.copy_(source), kind, clock)
    # Read once, written once.
    return Measured(gflops, 2 * COPY_BYTES / seconds / 1e9)


def _best(work: Callable[[], object], kind: str, clock: Callable[[], float]) -> float:
    """The shortest time of ``work`` within the budget, in seconds."""
    work()
    _wait(kind)
    best, end = float("inf"), clock() + BUDGET_S
    while True:
        began = clock()
        work()
        _wait(kind)
        now = clock()
        best = min(best, max(now - began, 1e-9))
        if now >= end:
            return best


def _wait(kind: str) -> None:
    """Wait until the device has done what it was given."""
    if kind == "cuda":
        torch.cuda.synchronize()
    elif kind == "mps":
        torch.mps.synchronize()
