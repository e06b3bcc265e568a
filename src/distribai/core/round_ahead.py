"""One round of a job on certain machines, in seconds: who does how many steps, when it merges."""

from __future__ import annotations

import heapq
import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Final

from distribai.core.known import TYPICAL, Basis, Known
from distribai.core.pace import EFFICIENCY
from distribai.core.paradigms import diloco
from distribai.core.spec import JobSpec
from distribai.core.steps import StepWork, seconds_after
from distribai.core.traffic import MBPS, within

WORTH_SAYING: Final = 0.1
"""Share of what the others need from which on it is said that they wait for a device."""


@dataclass(frozen=True, slots=True)
class Draft:
    """A device, with its seconds: of a step, of a round's update and delta."""

    known: Known
    step_s: float
    step_basis: Basis
    up_mbps: float
    down_mbps: float
    link_basis: Basis
    download_s: float
    upload_s: float

    def seconds(self, steps: int) -> float:
        """From the assignment to the delta's arrival, with so many steps."""
        return self.download_s + steps * self.step_s + self.upload_s

    def steps_in(self, seconds: float) -> int:
        """Steps after which the delta arrives within ``seconds`` of the assignment."""
        left = seconds - self.download_s - self.upload_s
        return max(0, int(left / self.step_s + 1e-9))


def drafts_of(
    machines: Sequence[Known], work: StepWork, legs: tuple[float, float]
) -> tuple[list[Draft], float]:
    """A draft of each machine for steps of ``work`` and ``legs`` bytes a round, up and down; and
    the median seconds of a step where something is known of them, 0 where nothing is."""
    found: list[tuple[float, Basis] | None] = [_step(known, work) for known in machines]
    told = [step[0] for step in found if step is not None]
    usual = statistics.median(told) if told else 0.0
    drafts = []
    for known, step in zip(machines, found, strict=True):
        seconds, basis = step or (
            usual or work.seconds(_typical_rate(known), known.type),
            "typical",
        )
        up = within(known.up_mbps or TYPICAL.up_mbps, known.up_limit_mbps)
        down = within(known.down_mbps or TYPICAL.down_mbps, known.down_limit_mbps)
        drafts.append(
            Draft(
                known,
                seconds,
                basis,
                up,
                down,
                "measured" if known.up_mbps and known.down_mbps else "typical",
                legs[1] / (down * MBPS),
                legs[0] / (up * MBPS),
            )
        )
    return drafts, usual


def _typical_rate(known: Known) -> float:
    return TYPICAL.cpu_operations_per_s if known.type == "cpu" else TYPICAL.operations_per_s


def _step(known: Known, work: StepWork) -> tuple[float, Basis] | None:
    """Seconds of a step, as far as something is known of the device."""
    benchmark = known.gflops * 1e9 * EFFICIENCY
    reached = seconds_after(known.reached, work, benchmark or _typical_rate(known), known.type)
    if reached is not None:
        return reached, "measured"
    return (work.seconds(benchmark, known.type), "benchmark") if benchmark else None


@dataclass(frozen=True, slots=True)
class Part:
    """A device's part of a round: the steps that it does (0: nothing of it comes in time to count),
    when its delta arrives (infinity: never), in seconds from the assignment, and for how long all
    others are done and wait for it."""

    draft: Draft
    steps: int
    arrives: float
    awaited_s: float = 0.0


def round_ahead(spec: JobSpec, drafts: Sequence[Draft]) -> tuple[list[Part], float]:
    """Each device's part, and the seconds from the assignment until the round merges.

    Who is at work when the quorum is in hands in what it has, after one step at least. Work that
    arrives later than ``rounds.staleness`` rounds after the merge is superseded.
    """
    parts = _split(spec, drafts)
    merges = _merges_after(spec, [p.arrives for p in parts])
    told = []
    last = heapq.nlargest(2, (p.arrives for p in parts if p.arrives <= merges))
    for part in parts:
        others = [t for t in last if t < part.arrives or last.count(t) > 1]
        awaited = min(part.arrives, merges) - max(others, default=math.inf)
        lost = part.arrives > merges * (1 + spec.rounds.staleness)
        told.append(replace(part, steps=0 if lost else part.steps, awaited_s=max(0.0, awaited)))
    return told, merges


def _split(spec: JobSpec, drafts: Sequence[Draft]) -> list[Part]:
    """Each device's share by speed, or what it has done when the quorum ends it."""
    full = spec.rounds.inner_steps
    fastest = min(d.seconds(full) for d in drafts)
    shares = [min(full, max(least_steps(spec), d.steps_in(fastest))) for d in drafts]
    ends = sorted(d.seconds(n) for d, n in zip(drafts, shares, strict=True))
    quorum = ends[diloco.quorum_count(len(ends), spec.rounds.quorum) - 1]
    parts = []
    for draft, share in zip(drafts, shares, strict=True):
        end = draft.seconds(share)
        if end > quorum * (1 + diloco.FINISH_SHARE):
            share = max(1, min(share, draft.steps_in(quorum + draft.upload_s)))
            end = max(quorum + draft.upload_s, draft.seconds(share))
        parts.append(Part(draft, share, end))
    return parts


def least_steps(spec: JobSpec) -> int:
    """The least inner steps that a node of a full round is given."""
    full = spec.rounds.inner_steps
    return min(full, math.ceil(spec.rounds.min_inner_steps * full))


def _merges_after(spec: JobSpec, arrivals: Sequence[float]) -> float:
    """Seconds until the round merges, as the orchestrator decides it, with the grace that it has
    learned from a few rounds like this one."""
    rounds, expected = spec.rounds, len(arrivals)
    times = sorted(arrivals)
    offsets = diloco.arrival_offsets(times, expected, rounds.quorum) * diloco.GRACE_MIN_HISTORY
    grace, _ = diloco.grace(offsets, rounds)
    for count in range(diloco.quorum_count(expected, rounds.quorum), expected):
        decision = diloco.merge_decision(
            times[count - 1],
            times[:count],
            expected,
            rounds.quorum,
            grace,
            minimum=spec.workers_min,
            opened=0.0,
            at_work=expected - count,
        )
        if decision.action == "merge":
            return times[count - 1]
        enough = count >= spec.workers_min  # else it waits on, for the next one
        if enough and decision.until is not None and decision.until < times[count]:
            return decision.until
    return times[-1]
