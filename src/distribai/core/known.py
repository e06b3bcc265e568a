"""What is known of the machines that a forecast is about, and what is assumed of the others."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final, Literal

from distribai.core.steps import Reached

Basis = Literal["measured", "benchmark", "typical"]


@dataclass(frozen=True, slots=True)
class Typical:
    """A machine of which nothing is known: a home's GPU and cable line; or, where it is known to
    have no GPU, two threads of a CPU (a small model in PyTorch, measured)."""

    up_mbps: float = 10.0
    down_mbps: float = 40.0
    operations_per_s: float = 2e12
    cpu_operations_per_s: float = 8e10


TYPICAL: Final = Typical()


@dataclass(frozen=True, slots=True)
class Known:
    """What is known of one device and its machine; None, 0 or empty: nothing.

    ``reached`` are steps of earlier jobs, the youngest first; ``gflops`` its benchmark's matrix
    products, 10^9 a second. ``up_mbps`` and ``down_mbps`` are its share of the machine's link as
    measured, ``up_limit_mbps`` and ``down_limit_mbps`` of what its owner gives. ``month_left``
    bytes may still move this month, None: any number. ``stands_in``: it is not here; a typical one
    of which nothing is known is meant.
    """

    node_id: str = ""
    device: int = 0
    type: str = ""
    reached: tuple[Reached, ...] = ()
    gflops: float = 0.0
    up_mbps: float = 0.0
    down_mbps: float = 0.0
    up_limit_mbps: float = 0.0
    down_limit_mbps: float = 0.0
    memory_mb: int = 0
    month_left: int | None = None
    stands_in: bool = False


@dataclass(frozen=True, slots=True)
class Overhead:
    """Seconds of a round that no node computes or transfers in, and from what they are known."""

    seconds: float
    basis: Basis
