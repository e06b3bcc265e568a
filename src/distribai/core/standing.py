"""When a node's failures are its own, and it is set apart until somebody has looked.

A job that cannot work fails wherever it runs, and says nothing about a node. So only those jobs
count in which *another* node's work was accepted, and one job is never enough, whatever fails in
it. On a grid of a single node nothing counts at all.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Final

QUARANTINE_JOBS: Final = 3
"""Different jobs that a node fails, in which others did not, before it is quarantined: two may be
chance, and each one costs its round a re-issued slot."""

WINDOW_S: Final = 24 * 3600.0
"""Older failures are forgotten."""


def verdict(failed: Mapping[str, str], others_could: Collection[str]) -> tuple[bool, str]:
    """Whether a node is to be quarantined, and why, or why not.

    Args:
        failed: what the node failed with last in each job, by job, within :data:`WINDOW_S`.
        others_could: of these jobs, those in which another node's work was accepted.
    """
    counted = {job: why for job, why in failed.items() if job in others_could}
    if len(counted) < QUARANTINE_JOBS:
        return False, (
            f"it failed {len(counted)} of {QUARANTINE_JOBS} jobs in which others did not fail"
        )
    causes = "; ".join(sorted(set(counted.values())))
    return True, f"it failed {len(counted)} jobs in which other nodes did not: {causes}"
