"""What a job will be like on the machines that there are.

One round of node k, after its task was assigned::

    download d_k = update's bytes / down        then H_k inner steps of s_k seconds
    upload   u_k = delta's bytes / up           and, once a round, o seconds of overhead: opening,
                                                assigning, applying, hashing, encoding, merging

The grid gives each node ``H_k = clip(round(H speed_k / max speed), H_min, H)`` by what it delivered
before, links included, so that ``d_k + H_k s_k + u_k`` settles where that of the fastest node is.
The quorum ends the training: who is slower stops there and hands in what it has. The round takes
until the last of those arrives, or until waiting for it ends (:mod:`distribai.core.round_ahead`),
and the overhead; *compute share* is a node's seconds at inner steps over the seconds that it is in
the round. Before the first round each node fetches the data, and weights to begin with where there
are some.

Seconds of a step come from what the device did before, else from its benchmark
(:mod:`distribai.core.steps`); rates from what was measured, within the owner's limits. A device of
which nothing is known yet is taken to be like those of which something is, in the median, and where
nothing is known of any, from :data:`distribai.core.known.TYPICAL`; either is then said.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Final

from distribai.core.datasets import once_bytes
from distribai.core.known import TYPICAL, Basis, Known, Overhead
from distribai.core.pace import EFFICIENCY
from distribai.core.paradigms import diloco
from distribai.core.plan import (
    evaluation_batches,
    parameter_count,
    plan,
    task_memory_mb,
)
from distribai.core.round_ahead import WORTH_SAYING, Part, drafts_of, least_steps, round_ahead
from distribai.core.spec import JobSpec
from distribai.core.steps import step_work
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

ASKED: Final = 3
"""Of so many machines, those that are waited for longest, it is looked what leaving one out would
bring."""

BETTER_WITHOUT: Final = 1.1
"""Times as many steps an hour that leaving a machine out must bring to be spoken of."""


@dataclass(frozen=True, slots=True)
class NodeForecast:
    """One device in one round, seconds; ``bytes_up`` and ``bytes_down`` of the whole job, without
    what is fetched once.

    ``why_slow`` says for people why it brings little or nothing; it is empty where all is well.
    Of each round ``awaited_s`` pass after all others are done; ``hours_without`` is what the job
    would take without it, where the others would get more done in an hour. ``stands_in``: it is
    not here; a typical one is meant.
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
    awaited_s: float = 0.0
    hours_without: float | None = None
    stands_in: bool = False


@dataclass(frozen=True, slots=True)
class Forecast:
    """A job on certain machines. ``compute_share`` is that of all nodes together that bring
    anything, ``memory_bytes`` of one node; ``assumed`` are sentences about what is not known.
    ``once_bytes`` a node fetches before its first round (the data at most), which takes ``once_s``
    seconds of the ``hours``."""

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
    once_bytes: int = 0
    once_s: float = 0.0


def fastest(spec: JobSpec, machines: Sequence[Known]) -> list[Known]:
    """The machines that a forecast looks at: all, or of more than :data:`MOST_MACHINES` those that
    do a round soonest."""
    if len(machines) <= MOST_MACHINES:
        return list(machines)
    drafts, _ = drafts_of(machines, step_work(spec), _legs(spec))
    drafts.sort(key=lambda d: d.seconds(spec.rounds.inner_steps))
    return [d.known for d in drafts[:MOST_MACHINES]]


def overhead_of(spec: JobSpec, measured: float | None) -> Overhead:
    """The overhead of a round: what was measured in a job of that size, or an estimate."""
    if measured is not None:
        return Overhead(max(0.0, measured), "measured")
    return Overhead(ROUND_S + PARAMETER_S * parameter_count(spec), "typical")


def forecast(
    spec: JobSpec,
    machines: Sequence[Known],
    overhead: Overhead,
    held_out: int | None = None,
    data_bytes: int | None = None,
) -> Forecast:
    """What a valid job is like on ``machines``; see the module's text.

    Of more than ``workers_max`` the fastest take part; of fewer than ``workers_min`` the missing
    ones are typical. Who has too little memory is listed and takes no part. ``held_out`` sequences
    are evaluated after each round, None: not known; each node fetches ``data_bytes`` once, None:
    what the spec says of them.

    Raises:
        InvalidSpec: the architecture is not possible.
    """
    found = ahead(spec, machines, overhead, held_out, data_bytes)
    if len(_able(spec, machines)) <= spec.workers_min:
        return found
    awaited = [n for n in found.nodes if n.node_id and n.awaited_s > WORTH_SAYING * found.round_s]
    without = dict[tuple[str, int], float]()
    for node in sorted(awaited, key=lambda n: -n.awaited_s)[:ASKED]:
        key = node.node_id, node.device
        others = [m for m in machines if (m.node_id, m.device) != key]
        left = ahead(spec, others, overhead, held_out, data_bytes)
        if _steps_an_hour(left) > BETTER_WITHOUT * _steps_an_hour(found):
            without[key] = left.hours
    nodes = (replace(n, hours_without=without.get((n.node_id, n.device))) for n in found.nodes)
    return replace(found, nodes=tuple(nodes))


def ahead(
    spec: JobSpec,
    machines: Sequence[Known],
    overhead: Overhead,
    held_out: int | None = None,
    data_bytes: int | None = None,
) -> Forecast:
    """:func:`forecast` without a look at what leaving machines out would bring."""
    need = task_memory_mb(spec)
    able = _able(spec, machines)
    small = [m for m in machines if m.memory_mb and m.memory_mb < need]
    able += [Known(stands_in=True)] * (spec.workers_min - len(able))
    whole, legs = plan(spec, parameter_count(spec), len(able)), _legs(spec)
    drafts, usual = drafts_of([*able, *small], step_work(spec), legs)
    drafts, idle = drafts[: len(able)], drafts[len(able) :]
    drafts.sort(key=lambda d: d.seconds(spec.rounds.inner_steps))
    parts, merges = round_ahead(spec, drafts[: spec.workers_max])
    rest = overhead.seconds
    if overhead.basis == "typical":
        batches = evaluation_batches(spec.batch, spec.rounds.inner_steps, held_out)
        rest += FORWARD * batches * min(p.draft.step_s for p in parts) / len(parts)
    once = once_bytes(spec, data_bytes)
    fetched = sorted(once / (p.draft.down_mbps * MBPS) for p in parts)
    once_s = fetched[diloco.quorum_count(len(parts), spec.rounds.quorum) - 1]
    moved = (whole.bytes_up, whole.bytes_down)
    nodes = [_node(spec, part, merges, rest, moved, once) for part in parts]
    # One that the round does not wait for computes all the while, and no longer than it takes.
    shares = [n.compute_share for n in nodes if n.inner_steps]
    for draft in idle:
        why = f"memory: it has {draft.known.memory_mb} MB, and a task needs {need} MB"
        part = Part(draft, 0, math.inf)
        nodes.append(replace(_node(spec, part, merges, rest, (0, 0), 0), why_slow=why))
    length = merges + rest
    return Forecast(
        inner_steps=spec.rounds.inner_steps,
        rounds=whole.rounds,
        round_s=length,
        hours=(length * spec.steps / spec.rounds.inner_steps + once_s) / 3600,
        compute_share=sum(shares) / len(shares),
        overhead_s=rest,
        bytes_up=whole.bytes_up,
        bytes_down=whole.bytes_down,
        memory_bytes=whole.memory_bytes,
        nodes=tuple(nodes),
        assumed=tuple(_assumed(nodes, len(machines), rest, overhead.basis, usual)),
        once_bytes=once,
        once_s=once_s,
    )


def _able(spec: JobSpec, machines: Sequence[Known]) -> list[Known]:
    """The machines whose memory is enough, as far as it is known."""
    need = task_memory_mb(spec)
    return [m for m in machines if not m.memory_mb or m.memory_mb >= need]


def _legs(spec: JobSpec) -> tuple[float, float]:
    """Bytes of a round, up and down."""
    whole = plan(spec, parameter_count(spec), 1)
    return whole.bytes_up / whole.rounds, whole.bytes_down / whole.rounds


def _steps_an_hour(found: Forecast) -> float:
    """Of all nodes together."""
    return sum(n.inner_steps for n in found.nodes) / found.round_s


def _node(
    spec: JobSpec, part: Part, merges: float, rest: float, total: tuple[int, int], once: int
) -> NodeForecast:
    draft, compute, length = part.draft, part.steps * part.draft.step_s, merges + rest
    reasons = (_why_slow(spec, part, merges), _month(spec, draft.known, sum(total), once))
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
        why_slow="; ".join(filter(None, reasons)),
        awaited_s=part.awaited_s,
        stands_in=draft.known.stands_in,
    )


def _why_slow(spec: JobSpec, part: Part, merges: float) -> str:
    """The first thing that keeps a device from doing its part, for people."""
    draft = part.draft
    moving, compute = draft.download_s + draft.upload_s, part.steps * draft.step_s
    line = f"at {draft.up_mbps:.3g} Mbit/s up and {draft.down_mbps:.3g} down"
    # Until when all others are done.
    others = min(part.arrives, merges) - part.awaited_s
    waits = ""
    if part.awaited_s > WORTH_SAYING * others:
        waits = f"; each round waits {duration(part.awaited_s)} for it"
    if moving >= others:
        return (
            f"link: a round's bytes take it {duration(moving)} {line}, and the others are done "
            f"after {duration(others)}{waits}"
        )
    if part.steps < least_steps(spec) and compute >= moving:
        return (
            f"speed: a step takes it {duration(draft.step_s)}; in the others' round it does "
            f"{part.steps} of {spec.rounds.inner_steps}{waits}"
        )
    if moving > compute:
        return (
            f"link: it moves bytes for {duration(moving)} of a round, {line}, and computes for "
            f"{duration(compute)}{waits}"
        )
    return ""


def _month(spec: JobSpec, known: Known, total: int, once: int) -> str:
    """Why a device stops before it has moved ``once`` and ``total`` bytes, for people; empty when
    its month lasts."""
    if known.month_left is None or known.month_left >= total + once:
        return ""
    rounds = max(0, int((known.month_left - once) * spec.round_count / total))
    return (
        f"month: what its owner still gives lasts for {rounds} of {spec.round_count} rounds, after "
        "the data"
    )


def _assumed(
    nodes: Sequence[NodeForecast], machines: int, rest: float, basis: Basis, usual: float
) -> Iterator[str]:
    line = f"{TYPICAL.up_mbps:g} Mbit/s up and {TYPICAL.down_mbps:g} down"
    speed = (
        f"the others' {duration(usual)} a step"
        if usual
        else f"{TYPICAL.operations_per_s / 1e9:g} GFLOP/s reached in training "
        f"({TYPICAL.cpu_operations_per_s / 1e9:g} on a CPU)"
    )
    here = [n for n in nodes if not n.stands_in]
    missing = len(nodes) - len(here)
    if not machines:
        yield f"no node is here yet; typical homes are assumed: {line}, {speed}"
    elif missing:
        yield f"{missing} more must come; typical homes are assumed: {line}, {speed}"
    for count, what in (
        (
            sum(n.link_basis == "typical" for n in here),
            f"moved too little to know the link; where it is not known, {line}, or its owner's "
            "limits where these are less,",
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
