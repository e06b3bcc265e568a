"""Where the time of a job's rounds went, from what the grid has on record.

A round is the time from its opening to the next one's. Of it each member computed (inner steps, by
its own report), waited for blobs, sent its delta, and waited for everything else: others, merging,
messages. The first round, in which data is fetched and models are built, does not count where there
are more.
"""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class RoundTimes:
    """A merged round: when it was opened, when the next one was (else when it closed), and how many
    members it had. Database time."""

    number: int
    opened_at: float
    ended_at: float
    members: int


@dataclass(frozen=True, slots=True)
class TaskTimes:
    """An accepted training task's seconds, as its node reports them."""

    round: int
    compute_s: float
    download_s: float
    upload_s: float

    @property
    def seconds(self) -> float:
        """All of them."""
        return self.compute_s + self.download_s + self.upload_s


@dataclass(frozen=True, slots=True)
class Measured:
    """Seconds of one round and node, in the mean of ``rounds`` rounds. ``overhead_s`` is what the
    busiest member of a round neither computes nor transfers in, in the middle of those rounds to
    which every member brought something: the others may have waited for who did not. None: there is
    no such round."""

    rounds: int
    round_s: float
    compute_s: float
    download_s: float
    upload_s: float
    waiting_s: float
    compute_share: float
    overhead_s: float | None


def measure(rounds: Sequence[RoundTimes], tasks: Sequence[TaskTimes]) -> Measured | None:
    """The phases of the rounds, oldest first; None as long as there is nothing to say.

    A member without an accepted task has only waited.
    """
    counted = list(rounds[1:] if len(rounds) > 1 and rounds[0].number == 0 else rounds)
    numbers = {r.number for r in counted}
    done = [t for t in tasks if t.round in numbers]
    whole = sum(r.members * (r.ended_at - r.opened_at) for r in counted)
    members = sum(r.members for r in counted)
    if not done or whole <= 0:
        return None
    brought = {r.number: [t.seconds for t in done if t.round == r.number] for r in counted}
    rest = [
        max(0.0, r.ended_at - r.opened_at - max(brought[r.number]))
        for r in counted
        if len(brought[r.number]) >= max(1, r.members)
    ]
    compute = sum(t.compute_s for t in done)
    download = sum(t.download_s for t in done)
    upload = sum(t.upload_s for t in done)
    return Measured(
        rounds=len(counted),
        round_s=statistics.fmean(r.ended_at - r.opened_at for r in counted),
        compute_s=compute / members,
        download_s=download / members,
        upload_s=upload / members,
        waiting_s=max(0.0, whole - compute - download - upload) / members,
        compute_share=min(1.0, compute / whole),
        overhead_s=statistics.median(rest) if rest else None,
    )
