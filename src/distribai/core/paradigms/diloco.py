"""DiLoCo rounds: everybody trains H inner steps apart, then one outer step (algorithms.md A1, A2).

Given the recorded membership, splitting is a pure function, so that a round can be replayed.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from typing import Final

from distribai.core.paradigms import Member, MergeDecision, Slot
from distribai.core.ranges import SamplePool
from distribai.core.spec import JobSpec, RoundSpec

NAME = "diloco"

GRACE_HISTORY: Final = 64
"""Latest arrival offsets that the grace is computed from."""

GRACE_MIN_HISTORY: Final = 3
"""With fewer offsets, median and spread mean nothing."""

GRACE_LEAST: Final = 0.5
"""Seconds; below that a network's own jitter decides."""

FINISH_SHARE: Final = 0.02
"""Share of a round's time that machines of one speed differ by, see :func:`finish_within`."""

WORTH: Final = 0.25
"""How likely it is that waiting for a missing submission brings it, see :func:`merge_decision`."""


def eligible(
    members: Sequence[Member], workers_min: int, workers_max: int
) -> tuple[tuple[Member, ...], str]:
    """Who takes part in the next round.

    Of more than ``workers_max`` the fastest do; a device of unknown speed counts as the fastest,
    so that it gets measured. Ties go by node id and device.

    Returns:
        The members sorted by (node id, device), none when there are fewer than ``workers_min``;
        and the reason.
    """
    if len(members) < workers_min:
        return (), f"{len(members)} of at least {workers_min} workers are here"
    ranked = sorted(
        members, key=lambda m: (-math.inf if m.speed is None else -m.speed, m.node_id, m.device)
    )
    chosen = tuple(sorted(ranked[:workers_max], key=_identity))
    if len(members) > workers_max:
        return chosen, f"the {workers_max} fastest of {len(members)} workers (workers_max)"
    return chosen, f"all {len(members)} workers"


def slots(
    spec: JobSpec, round_number: int, members: Sequence[Member], pool: SamplePool
) -> tuple[list[Slot], SamplePool, str]:
    """Each member's share of round ``round_number`` (from 0).

    Dynamic local updates (arXiv:2401.09135): ``H_k = clip(round(H speed_k / max speed), H_min,
    H)`` with ``H_min = ceil(min_inner_steps H)``; an unknown speed counts as the largest. H is the
    round's own number of steps: the last round may be shorter. Ranks follow (node id, device), and
    the pool is leased in that order.

    Returns:
        One slot per member, the pool without their samples, and the reason.

    Raises:
        ValueError: the job has no such round, there is no member, or a member appears twice.
    """
    full = spec.steps_of_round(round_number)
    ordered = sorted(members, key=_identity)
    if round_number < 0 or full < 1:
        raise ValueError(f"the job has no round {round_number}")
    if not ordered or len(set(map(_identity, ordered))) < len(ordered):
        raise ValueError("a round needs members, each once")
    steps = inner_steps(full, spec.rounds.min_inner_steps, [m.speed for m in ordered])
    shares: list[Slot] = []
    for rank, (member, count) in enumerate(zip(ordered, steps, strict=True)):
        samples, pool = pool.take(count * spec.batch)
        shares.append(
            Slot(
                node_id=member.node_id,
                device=member.device,
                steps=count,
                samples=samples,
                inner_step_offset=round_number * spec.rounds.inner_steps,
                rank=rank,
                world_size=len(ordered),
            )
        )
    slower = sum(count < full for count in steps)
    who = "1 worker does" if len(shares) == 1 else f"{len(shares)} workers do"
    reason = f"{who} {full} inner steps" + (" each" if len(shares) > 1 else "")
    if slower:
        reason += f"; of them {slower} slower fewer (at least {min(steps)})"
    return shares, pool, reason


def inner_steps(full: int, min_share: float, speeds: Sequence[float | None]) -> list[int]:
    """``H_k`` of each speed: between ``ceil(min_share * full)`` and ``full``."""
    known = [s for s in speeds if s is not None and s > 0]
    fastest = max(known, default=0.0)
    least = min(full, _share(min_share, full))
    return [
        full
        if speed is None or not fastest
        else min(full, max(least, round(full * max(0.0, speed) / fastest)))
        for speed in speeds
    ]


def grace(past_offsets: Sequence[float], rounds: RoundSpec) -> tuple[float, str]:
    """Seconds to wait after the quorum: ``clip(median + 3 MAD, grace_min, grace_max)``.

    ``past_offsets`` are those of :func:`arrival_offsets` over the job's rounds, oldest first; only
    the last :data:`GRACE_HISTORY` count. MAD is the median absolute deviation from the median,
    unscaled. With fewer than :data:`GRACE_MIN_HISTORY` offsets it is ``grace_max``: the first
    rounds are the slowest, every node builds its model in them, and to cut one off costs its work,
    while a dead node is dropped by its lease anyway.
    """
    offsets = list(past_offsets)[-GRACE_HISTORY:]
    if len(offsets) < GRACE_MIN_HISTORY:
        return rounds.grace_max, f"grace_max: only {len(offsets)} arrivals are on record"
    median = statistics.median(offsets)
    spread = statistics.median(abs(o - median) for o in offsets)
    wanted = median + 3 * spread
    seconds = min(rounds.grace_max, max(rounds.grace_min, wanted))
    return seconds, f"median {median:.1f} s + 3 MAD of {spread:.1f} s in {len(offsets)} arrivals"


def arrival_offsets(arrivals: Sequence[float], expected: int, quorum: float) -> tuple[float, ...]:
    """Seconds after the quorum at which each later submission of a round came.

    ``arrivals`` include the ones that came too late for the merge: without them the grace could
    only ever shrink. The submission that makes the quorum, and those before it, do not count.
    """
    need = quorum_count(expected, quorum)
    times = sorted(arrivals)
    return tuple(t - times[need - 1] for t in times[need:])


def quorum_count(expected: int, quorum: float) -> int:
    """Submissions that make the quorum: at least one."""
    return _share(quorum, expected)


def merge_decision(
    now: float,
    arrivals: Sequence[float],
    expected: int,
    quorum: float,
    grace_seconds: float,
    minimum: int = 1,
    opened: float | None = None,
    at_work: int = 0,
) -> MergeDecision:
    """Whether a round merges now.

    Args:
        now: the present, in seconds on the clock of ``arrivals``.
        arrivals: when each submission of the round that may still be merged came.
        expected: how many there will be in the end: those of ``arrivals`` and the slots that are
            still at work or queued; dead slots whose samples went back to the pool do not count.
        quorum: share of ``expected`` that starts the grace.
        grace_seconds: from :func:`grace`.
        minimum: submissions that a version must be made of (``workers_min``).
        opened: when the round's members began, None when that says nothing.
        at_work: how many of the missing ones somebody works at or sends now. When the grace is over
            with fewer than ``minimum``, a round that these can still bring there waits for them,
            as long as their leases and deadlines do: there is nothing to merge without them.

    The grace is no longer than it is worth: ``arrived`` idle devices wait for the work of
    ``missing`` ones, each of which has worked since ``opened``, so after ``WORTH elapsed missing /
    arrived`` seconds waiting has cost more than it can save. (Who cannot be done by then hands in
    what it has, so what is lost is only the work of those that cannot be reached.) The cap counts
    while at least two are in: one alone may just be fast.

    Returns:
        ``merge`` when all expected submissions are in or the grace after the quorum is over,
        ``abandon`` when they are too few then and too few are at work, else ``wait``.
    """
    too_few = f"{len(arrivals)} of at least {minimum} submissions are in"
    if len(arrivals) >= expected:
        if not arrivals:
            return MergeDecision("abandon", "no worker is left in the round")
        if len(arrivals) < minimum:
            return MergeDecision("abandon", f"{too_few}, and no other worker is left in the round")
        return MergeDecision("merge", f"all {len(arrivals)} expected submissions are in")
    need = quorum_count(expected, quorum)
    if len(arrivals) < need:
        return MergeDecision(
            "wait", f"{len(arrivals)} of {expected} submissions are in, the quorum is {need}"
        )
    times = sorted(arrivals)
    reached = times[need - 1]
    if opened is not None and len(arrivals) > 1:
        worth = WORTH * (times[-1] - opened) * (expected - len(arrivals)) / len(arrivals)
        grace_seconds = min(grace_seconds, max(GRACE_LEAST, worth))
    until = reached + grace_seconds
    state = f"{len(arrivals)} of {expected} submissions are in"
    if now >= until:
        over = f"the grace of {grace_seconds:.1f} s is over"
        if len(arrivals) >= minimum:
            return MergeDecision("merge", f"{state} and {over}")
        if len(arrivals) + at_work < minimum:
            return MergeDecision("abandon", f"{too_few}, and {over}")
        return MergeDecision("wait", f"{too_few}, and {at_work} of the others are at work")
    return MergeDecision("wait", f"{state}, the quorum is reached, the grace runs", until)


def finish_within(now: float, opened: float) -> float:
    """Seconds that a member may go on training once the quorum is reached; whoever needs longer
    hands in what it has.

    From then on at least as many devices idle as work, so every second costs more than it brings:
    only what is the noise of equal machines is waited for. The grace after that is for submissions
    that are on their way, and for members that cannot be reached.
    """
    return max(GRACE_LEAST, FINISH_SHARE * (now - opened))


def takes_late(base: int, number: int, rounds: RoundSpec) -> tuple[bool, str]:
    """Whether round ``number`` takes work on version ``base`` that its own round did not get (A6).

    Versions in ``[number - staleness, number]`` are taken; of equal ones the round that was
    abandoned and opened again is meant. What the work counts is ``merge.choices.worth``.
    """
    behind = number - base
    if not rounds.staleness:
        return False, "late work is not taken (rounds.staleness is 0)"
    if behind > rounds.staleness:
        return False, f"it is {behind} versions behind, at most {rounds.staleness} are taken"
    return True, f"it is {behind} of at most {rounds.staleness} versions behind"


def can_reissue(now: float, seconds_needed: float, decision: MergeDecision) -> tuple[bool, str]:
    """Whether a dead slot's samples may go to another device in the same round.

    ``seconds_needed`` is the estimate for that device, ``decision`` the round's present one. While
    the quorum is open there is time; afterwards the work must finish before the grace ends.
    Otherwise the samples go back to the pool.
    """
    if decision.action != "wait":
        return False, f"the round does not wait any more: {decision.reason}"
    if decision.until is None:
        return True, "the quorum is still open"
    left = decision.until - now
    if seconds_needed <= left:
        return True, f"it takes {seconds_needed:.0f} s of the {left:.0f} s of grace left"
    return False, f"it would take {seconds_needed:.0f} s, only {left:.0f} s of grace are left"


def _share(share: float, whole: int) -> int:
    """``ceil(share * whole)``, at least 1; 0.07 of 100 is 7, whatever binary fractions say."""
    return max(1, math.ceil(share * whole - 1e-9))


def _identity(member: Member) -> tuple[str, int]:
    return member.node_id, member.device
