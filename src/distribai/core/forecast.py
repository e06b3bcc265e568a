"""What a job will be like on the machines that there are.

One round of node k, after its task was assigned::

    download d_k = update's bytes / down        then H_k inner steps of s_k seconds
    upload   u_k = delta's bytes / up           and, once a round, o seconds of overhead: opening,
                                                assigning, applying, hashing, encoding, merging

The grid gives each node ``H_k = clip(round(H speed_k / max speed), H_min, H)`` by what it delivered
before, links included, so that ``d_k + H_k s_k + u_k`` settles where that of the fastest node is.
The quorum ends the training: who is slower stops there and hands in what it has. The round takes
until the last of those arrives, and the overhead; *compute share* is a node's seconds at inner
steps over the seconds that it is in the round.

Seconds of a step come from what the device did before, else from its benchmark; rates from what was
measured. A device of which nothing is known yet is taken to be like those of which something is,
in the median, and where nothing is known of any, from
:data:`distribai.core.known.TYPICAL`; either is then said.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Final

from distribai.core.known import TYPICAL, Basis, Known, Overhead
from distribai.core.pace import EFFICIENCY, FLOPS_PER_WEIGHT
from distribai.core.paradigms import diloco
from distribai.core.plan import (
    evaluation_batches,
    memory_bytes,
    parameter_count,
    plan,
    task_memory_mb,
)
from distribai.core.spec import JobSpec
from distribai.core.traffic import MBPS

ROUND_S: Final = 0.5
"""Overhead of a round of a small model: duties, messages, transactions."""

PARAMETER_S: Final = 6e-8
"""Overhead for each parameter: copying, hashing, encoding, checking, merging and applying on a
machine at home, some ten passes over memory and one over a disk."""

MOST_MACHINES: Final = 500
"""Machines that a forecast looks at: more would take seconds, and nobody would read of them."""

FORWARD: Final = 1 / 3
"""What a batch of a held-out loss takes of a training step's time (Kaplan et al. 2020)."""


@dataclass(frozen=True, slots=True)
class NodeForecast:
    """One device in one round, seconds; ``bytes_up`` and ``bytes_down`` of the whole job.

    ``why_slow`` says for people why it brings little or nothing; it is empty where all is well.
    """

    node_id: str
    device: int
    step_s: float
    step_basis: Basis
    up_mbps: float
    down_mbps: float
    link_basis: Basis
    inner_steps: int
    download_s: float
    compute_s: float
    upload_s: float
    waiting_s: float
    compute_share: float
    bytes_up: int
    bytes_down: int
    why_slow: str = ""


@dataclass(frozen=True, slots=True)
class Forecast:
    """A job on certain machines. ``compute_share`` is that of all nodes together, ``memory_bytes``
    of one node; ``assumed`` are sentences about what is not known."""

    inner_steps: int
    rounds: int
    round_s: float
    hours: float
    compute_share: float
    overhead_s: float
    bytes_up: int
    bytes_down: int
    memory_bytes: int
    nodes: tuple[NodeForecast, ...]
    assumed: tuple[str, ...] = ()


def fastest(spec: JobSpec, machines: Sequence[Known]) -> list[Known]:
    """The machines that a forecast looks at: all, or of more than :data:`MOST_MACHINES` those that
    do a round soonest."""
    if len(machines) <= MOST_MACHINES:
        return list(machines)
    parameters = parameter_count(spec)
    whole = plan(spec, parameters, 1)
    legs = (whole.bytes_up / whole.rounds, whole.bytes_down / whole.rounds)
    steps = spec.rounds.inner_steps
    usual = _usual(machines)
    drafts = [_draft(spec, parameters, known, legs, usual) for known in machines]
    drafts.sort(key=lambda d: d.seconds(steps))
    return [d.known for d in drafts[:MOST_MACHINES]]


def overhead_of(spec: JobSpec, measured: float | None) -> Overhead:
    """The overhead of a round: what was measured in a job of that size, or an estimate."""
    if measured is not None:
        return Overhead(max(0.0, measured), "measured")
    return Overhead(ROUND_S + PARAMETER_S * parameter_count(spec), "typical")


def forecast(
    spec: JobSpec, machines: Sequence[Known], overhead: Overhead, held_out: int | None = None
) -> Forecast:
    """What a valid job is like on ``machines``; see the module's text.

    Of more than ``workers_max`` the fastest take part; of fewer than ``workers_min`` the missing
    ones are typical. Who has too little memory is listed and takes no part. ``held_out`` sequences
    are evaluated after each round, None: not known.

    Raises:
        InvalidSpec: the architecture is not possible.
    """
    need = task_memory_mb(spec)
    able = [m for m in machines if not m.memory_mb or m.memory_mb >= need]
    small = [m for m in machines if m.memory_mb and m.memory_mb < need]
    able += [Known()] * (spec.workers_min - len(able))
    parameters = parameter_count(spec)
    whole = plan(spec, parameters, len(able))
    legs = (whole.bytes_up / whole.rounds, whole.bytes_down / whole.rounds)
    usual = _usual(machines)
    drafts = [_draft(spec, parameters, known, legs, usual) for known in able]
    drafts.sort(key=lambda d: d.seconds(spec.rounds.inner_steps))
    parts = _split(spec, drafts[: spec.workers_max])
    rest = overhead.seconds
    if overhead.basis == "typical":
        batches = evaluation_batches(spec.batch, spec.rounds.inner_steps, held_out)
        rest += FORWARD * batches * min(p.draft.step_s for p in parts) / len(parts)
    length = _merges_after(spec, parts) + rest
    total = (whole.bytes_up, whole.bytes_down)
    nodes = [_node(spec, part, length, rest, total) for part in parts]
    # One that the round does not wait for computes all the while, and no longer than it takes.
    share = sum(n.compute_share for n in nodes) / len(nodes)
    for known in small:
        why = f"memory: it has {known.memory_mb} MB, and a task needs {need} MB"
        idle = _Part(_draft(spec, parameters, known, legs, usual), 0, math.inf)
        nodes.append(replace(_node(spec, idle, length, rest, (0, 0)), why_slow=why))
    return Forecast(
        inner_steps=spec.rounds.inner_steps,
        rounds=whole.rounds,
        round_s=length,
        hours=length * spec.steps / spec.rounds.inner_steps / 3600,
        compute_share=share,
        overhead_s=rest,
        bytes_up=whole.bytes_up,
        bytes_down=whole.bytes_down,
        memory_bytes=memory_bytes(spec, parameters),
        nodes=tuple(nodes),
        assumed=tuple(_assumed(nodes, len(machines), rest, overhead.basis, usual)),
    )


# ------------------------------------------------------------------ one round


@dataclass(frozen=True, slots=True)
class _Draft:
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


def _rate(known: Known) -> tuple[float, Basis] | None:
    """Operations a second in training, as far as something is known of the device."""
    if known.operations_per_s > 0:
        return known.operations_per_s, "measured"
    if known.gflops > 0:
        return known.gflops * 1e9 * EFFICIENCY, "benchmark"
    return None


def _usual(machines: Sequence[Known]) -> float:
    """The median of the rates that are known; 0: none is."""
    rates = [found[0] for known in machines if (found := _rate(known)) is not None]
    return statistics.median(rates) if rates else 0.0


def _draft(
    spec: JobSpec, parameters: int, known: Known, legs: tuple[float, float], usual: float
) -> _Draft:
    operations = FLOPS_PER_WEIGHT * parameters * spec.batch * spec.seq_len
    guess = TYPICAL.cpu_operations_per_s if known.type == "cpu" else TYPICAL.operations_per_s
    rate, basis = _rate(known) or (usual or guess, "typical")
    up = known.up_mbps or TYPICAL.up_mbps
    down = known.down_mbps or TYPICAL.down_mbps
    return _Draft(
        known,
        operations / rate,
        basis,
        up,
        down,
        "measured" if known.up_mbps and known.down_mbps else "typical",
        legs[1] / (down * MBPS),
        legs[0] / (up * MBPS),
    )


@dataclass(frozen=True, slots=True)
class _Part:
    """A device's part of a round: the steps that it does, and when its delta arrives (never:
    infinity), in seconds from the assignment."""

    draft: _Draft
    steps: int
    arrives: float


def _split(spec: JobSpec, drafts: Sequence[_Draft]) -> list[_Part]:
    """Each device's part: its share by speed, or what it has done when the quorum ends it."""
    full = spec.rounds.inner_steps
    fastest = min(d.seconds(full) for d in drafts)
    shares = [min(full, max(least_steps(spec), d.steps_in(fastest))) for d in drafts]
    ends = sorted(d.seconds(n) for d, n in zip(drafts, shares, strict=True))
    quorum = ends[diloco.quorum_count(len(ends), spec.rounds.quorum) - 1]
    parts = []
    for draft, share in zip(drafts, shares, strict=True):
        end = draft.seconds(share)
        if end > quorum * (1 + diloco.FINISH_SHARE):
            share = min(share, draft.steps_in(quorum + draft.upload_s))
            end = quorum + draft.upload_s if share else math.inf
        parts.append(_Part(draft, share, end))
    return parts


def least_steps(spec: JobSpec) -> int:
    """The least inner steps that a node of a full round is given."""
    full = spec.rounds.inner_steps
    return min(full, math.ceil(spec.rounds.min_inner_steps * full))


def _merges_after(spec: JobSpec, parts: Sequence[_Part]) -> float:
    """Seconds until the round merges: when all have arrived, or waiting for the next one has cost
    more than it can bring (:func:`distribai.core.paradigms.diloco.merge_decision`)."""
    arrivals = sorted(p.arrives for p in parts)
    first = diloco.quorum_count(len(parts), spec.rounds.quorum)
    now = arrivals[first - 1]
    for arrived in range(first, len(parts)):
        grace = spec.rounds.grace_max
        if arrived > 1:
            worth = diloco.WORTH * now * (len(parts) - arrived) / arrived
            grace = min(grace, max(diloco.GRACE_LEAST, worth))
        if arrivals[arrived] > arrivals[first - 1] + grace:
            return arrivals[first - 1] + grace
        now = arrivals[arrived]
    return now


def _node(
    spec: JobSpec, part: _Part, length: float, rest: float, total: tuple[int, int]
) -> NodeForecast:
    draft, compute = part.draft, part.steps * part.draft.step_s
    moving = draft.download_s + draft.upload_s
    return NodeForecast(
        node_id=draft.known.node_id,
        device=draft.known.device,
        step_s=draft.step_s,
        step_basis=draft.step_basis,
        up_mbps=draft.up_mbps,
        down_mbps=draft.down_mbps,
        link_basis=draft.link_basis,
        inner_steps=part.steps,
        download_s=draft.download_s,
        compute_s=compute,
        upload_s=draft.upload_s,
        waiting_s=max(0.0, length - compute - moving),
        compute_share=min(1.0, compute / length),
        bytes_up=total[0],
        bytes_down=total[1],
        why_slow=_why_slow(spec, part, length - rest, sum(total)),
    )


def _why_slow(spec: JobSpec, part: _Part, round_s: float, total: int) -> str:
    """The first thing that keeps a device from doing its part, for people."""
    draft, known = part.draft, part.draft.known
    moving, compute = draft.download_s + draft.upload_s, part.steps * draft.step_s
    line = f"at {draft.up_mbps:.3g} Mbit/s up and {draft.down_mbps:.3g} down"
    if moving >= round_s:
        return (
            f"link: a round's bytes take it {duration(moving)} {line}, and the others' whole round "
            f"takes {duration(round_s)}"
        )
    if part.steps < least_steps(spec) and compute >= moving:
        return (
            f"speed: a step takes it {duration(draft.step_s)}; in the others' round it does "
            f"{part.steps} of {spec.rounds.inner_steps}"
        )
    if moving > compute:
        return (
            f"link: it moves bytes for {duration(moving)} of a round, {line}, and computes for "
            f"{duration(compute)}"
        )
    if known.month_left is not None and known.month_left < total:
        rounds = int(known.month_left * spec.round_count / total)
        return f"month: what its owner still gives lasts for {rounds} of {spec.round_count} rounds"
    return ""


def _assumed(
    nodes: Sequence[NodeForecast], machines: int, rest: float, basis: Basis, usual: float
) -> Iterator[str]:
    line = f"{TYPICAL.up_mbps:g} Mbit/s up and {TYPICAL.down_mbps:g} down"
    speed = (
        f"the others' {usual / 1e9:.2g} GFLOP/s reached in training"
        if usual
        else f"{TYPICAL.operations_per_s / 1e9:g} GFLOP/s reached in training "
        f"({TYPICAL.cpu_operations_per_s / 1e9:g} on a CPU)"
    )
    here = [n for n in nodes if n.node_id]
    if not machines:
        yield f"no node is here yet; typical homes are assumed: {line}, {speed}"
    elif len(here) < len(nodes):
        missing = len(nodes) - len(here)
        yield f"{missing} more must come; typical homes are assumed: {line}, {speed}"
    for count, what in (
        (
            sum(n.link_basis == "typical" for n in here),
            f"moved too little to know the link; where it is not known, {line}",
        ),
        (sum(n.step_basis == "typical" for n in here), f"of unknown speed; {speed}"),
        (
            sum(n.step_basis == "benchmark" for n in here),
            f"never trained here; {EFFICIENCY:.0%} of its benchmark",
        ),
    ):
        if count:
            yield f"{count} of {len(here)} nodes {what} is assumed"
    if basis == "typical":
        yield f"{duration(rest)} of a round for merging, evaluating, hashing and messages"


def duration(seconds: float) -> str:
    """Seconds for people, about two digits."""
    for unit, size in (("days", 86400.0), ("h", 3600.0), ("min", 60.0)):
        if seconds >= 2 * size:
            digits = 0 if seconds >= 10 * size else 1
            return f"{seconds / size:.{digits}f} {unit}"
    return f"{seconds:.0f} s" if seconds >= 10 else f"{seconds:.2g} s"
