"""Better settings for a job's rounds, from forecasts of what each would bring (A1, A3)."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Final

from distribai.core.codecs import begins_within, is_sparse
from distribai.core.forecast import Forecast, forecast
from distribai.core.known import Known, Overhead
from distribai.core.plan import parameter_count, plan
from distribai.core.spec import JobSpec
from distribai.core.validation import validate_spec
from distribai.errors import InvalidSpec

TARGET: Final = 0.95
"""Share of the nodes' time that better settings must leave for inner steps."""

AIM: Final = 0.97
"""What other settings are chosen for: forecasts err by some points."""

EQUAL: Final = 0.01
"""Shares that differ by less are as good as each other."""

LEAST_ROUNDS: Final = 20
"""No proposal has fewer: with fewer the outer optimizer has not warmed up (A1)."""

SPARSE_ROUNDS: Final = 100
"""Sparse codecs are for runs at least so long (A3)."""

GROWTH: Final = 1.25
"""Each longer round that is tried is longer by so much."""

CHANGED: Final = {"rounds": ("inner_steps", "codec_up", "codec_down"), "outer": ("eta", "mu")}
"""What a proposal may change."""

CODECS: Final = ("int3", "int2", "sparse")
"""What is tried instead of the job's own codecs, both ways, the least harmful first: int3 cost
nothing in 40 rounds, int2 1 to 2 % (docs/explanation/silence.md)."""


@dataclass(frozen=True, slots=True)
class Proposal:
    """Better settings: ``changes`` by recipe field (none: the job is good as it is), what they make
    of it, and why they and no others."""

    changes: Mapping[str, str | int | float]
    reason: str
    forecast: Forecast


def propose(
    spec: JobSpec, machines: Sequence[Known], overhead: Overhead, held_out: int | None = None
) -> Proposal:
    """The settings of rounds that an expert would pick for these machines.

    The job's own where they leave :data:`TARGET` of the time for inner steps. Else, in this order,
    because int3 both ways costs no loss, longer rounds and int2 cost some, and what is coarser more
    (A1, A3): int3, int3 with longer rounds, the same with int2, sparse in long runs; longer rounds
    alone where there is no other codec. Where nothing comes to :data:`AIM`, the least harmful that
    is as good as any, within :data:`EQUAL`.

    Raises:
        InvalidSpec: the architecture is not possible.
    """
    own = forecast(spec, machines, overhead, held_out)
    words = f"inner steps are {own.compute_share:.0%} of the time as it is"
    if own.compute_share >= TARGET:
        return Proposal({}, words, own)
    tried = [(spec, own)]
    for other in _others(spec):
        tried.append((other, forecast(other, machines, overhead, held_out)))
        if tried[-1][1].compute_share >= AIM:
            break
    most = max(found.compute_share for _, found in tried)
    enough = AIM if most >= AIM else most - EQUAL
    chosen, best = next(t for t in tried if t[1].compute_share >= enough)
    if chosen is not spec:
        words += f", and {best.compute_share:.0%} with it"
    if chosen is not spec and is_sparse(chosen.rounds.codec_up):
        words += "; sparse codecs are for long runs and cost some of the loss in short ones"
    if chosen is not spec and chosen.rounds.codec_up == "int2":
        words += "; int2 both ways costs up to 2 % of the loss in short runs"
    if best.compute_share < TARGET:
        words += (
            f"; nothing with at least {LEAST_ROUNDS} rounds reaches {TARGET:.0%}, more steps would "
            "allow longer rounds"
        )
    return Proposal(_changes(spec, chosen), words, best)


def _others(spec: JobSpec) -> Iterator[JobSpec]:
    """Settings to try instead of the job's own, the least harmful first."""
    lengths = _longer(spec)
    codecs = [c for c in CODECS if _saves(spec, c)]
    for codec in codecs:
        for steps in (spec.rounds.inner_steps, *lengths):
            if codec != "sparse" or -(-spec.steps // steps) >= SPARSE_ROUNDS:
                other = _with(spec, inner_steps=steps, codec_up=codec, codec_down=codec)
                # Momentum on top of what is sparse was measured worse (A3).
                plain = replace(other, outer=replace(other.outer, eta=1.0, mu=0.0))
                yield plain if codec == "sparse" else other
    if not codecs:
        longer = (_with(spec, inner_steps=steps) for steps in lengths)
        # A schedule of the job's own may need more rounds than longer ones leave.
        yield from (other for other in longer if _reaches_all_stages(other))


def _reaches_all_stages(spec: JobSpec) -> bool:
    legs = (spec.rounds.codec_up, spec.rounds.codec_down)
    return all(begins_within(schedule, spec.round_count) for schedule in legs)


def _with(spec: JobSpec, **rounds: Any) -> JobSpec:
    return replace(spec, rounds=replace(spec.rounds, **rounds))


def _longer(spec: JobSpec) -> list[int]:
    """Longer rounds of which the job still has :data:`LEAST_ROUNDS`."""
    found, steps = list[int](), spec.rounds.inner_steps
    while (steps := max(steps + 1, round(steps * GROWTH))) * LEAST_ROUNDS <= spec.steps:
        found.append(steps)
    return found


def _saves(spec: JobSpec, codec: str) -> bool:
    """Whether the codec exists and sends less than the job's own."""
    other = _with(spec, codec_up=codec, codec_down=codec)
    try:
        validate_spec(other)
    except InvalidSpec as problem:
        if problem.code == "codec.unknown":
            return False
        raise
    parameters = parameter_count(spec)
    return plan(other, parameters, 1).bytes_total < plan(spec, parameters, 1).bytes_total


def _changes(spec: JobSpec, other: JobSpec) -> dict[str, str | int | float]:
    found: dict[str, str | int | float] = {}
    for section, names in CHANGED.items():
        before, after = getattr(spec, section), getattr(other, section)
        for name in names:
            if getattr(after, name) != getattr(before, name):
                found[f"{section}.{name}"] = getattr(after, name)
    return found


def apply(spec: JobSpec, changes: Mapping[str, Any]) -> JobSpec:
    """The spec with a proposal's changes."""
    for field, value in changes.items():
        section, _, name = field.partition(".")
        spec = replace(spec, **{section: replace(getattr(spec, section), **{name: value})})
    return spec
