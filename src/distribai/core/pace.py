"""How long a task may take on a device: from what the device did before, else from its benchmark.

Counted from the assignment, so fetching and sending are part of it, and a task on a slow node gets
as much longer as that node is slower.
"""

from __future__ import annotations

from typing import Final, Literal

from distribai.core.plan import parameter_count
from distribai.core.spec import JobSpec
from distribai.core.tasks import Phase

SLACK: Final = 8.0
"""A task may take so many times what is expected of it: its machine may be somebody's desktop, and
at work for others most of the day. A machine that is gone is noticed by its silence, not by this.
"""

LEAST_SHARE: Final = 0.25
"""Share of the usual deadline that even the fastest device gets: short tasks wait for blobs."""

MOST_S: Final = 30 * 86400.0
"""No deadline is longer: a month."""

EFFICIENCY: Final = 0.1
"""Share of its measured matrix products that a device reaches in training, at least: small models
on CPUs reach 0.1 to 0.3 of them. A wrong guess only lengthens the first deadline on a device."""

FLOPS_PER_WEIGHT: Final = 6
"""Operations per parameter and token in training: 2 forward, 4 backward (Kaplan et al. 2020,
arXiv:2001.08361, section 2.1); evaluation takes the forward third."""

UNKNOWN_COST_S: Final = 60.0
"""What a task is expected to take of which nothing is known."""

Basis = Literal["measured", "benchmark", "unknown"]


def expected_s(
    spec: JobSpec, phase: Phase, steps: int, speed: float | None, gflops: float
) -> tuple[float, Basis]:
    """Seconds that a task is expected to take on a device, and from what.

    Args:
        spec: the job.
        phase: of the task.
        steps: inner steps, or batches of an evaluation; 0 when the phase has none.
        speed: tokens per second that the device reached in training for the job; None: unknown.
        gflops: of its benchmark, 10^9 operations a second; 0: never measured.
    """
    tokens = steps * spec.batch * spec.seq_len
    if phase == "generate" or not tokens:
        return UNKNOWN_COST_S, "unknown"
    share = 1.0 if phase == "train" else 1 / 3
    if speed is not None and speed > 0:
        return share * tokens / speed, "measured"
    if gflops > 0:
        operations = FLOPS_PER_WEIGHT * parameter_count(spec) * tokens * share
        return operations / (gflops * 1e9 * EFFICIENCY), "benchmark"
    return UNKNOWN_COST_S, "unknown"


def deadline_s(expected: float, basis: Basis, usual: float) -> tuple[float, str]:
    """Seconds from its assignment after which an attempt counts as hung, and why so many.

    A benchmark is a claim of the node's: it can only lengthen the ``usual`` deadline. What the grid
    has measured itself shortens it too, down to :data:`LEAST_SHARE`.
    """
    if basis == "unknown":
        return usual, "nothing is known of its speed: the usual deadline"
    least = usual if basis == "benchmark" else LEAST_SHARE * usual
    asked = SLACK * expected
    if asked <= least:
        return least, "it is expected to be done long before: the shortest deadline"
    return (
        min(asked, MOST_S),
        f"{SLACK:g} times the {expected:.0f} s that it is expected to take ({basis})",
    )
