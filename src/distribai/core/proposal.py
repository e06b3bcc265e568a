"""Better settings for a job's rounds, from forecasts of what each would bring (A1, A3)."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Final

from distribai.core.codecs import Schedule, begins_within, is_sparse
from distribai.core.forecast import Forecast, ahead, duration, forecast
from distribai.core.known import Known, Overhead
from distribai.core.plan import parameter_count, plan
from distribai.core.spec import JobSpec

TARGET: Final = 0.95
"""Share of the nodes' time that better settings must leave for inner steps."""

AIM: Final = 0.97
"""What other settings are chosen for: forecasts err by some points."""

EQUAL: Final = 0.01
"""Settings whose hours differ by a smaller share are as good as each other."""

GAIN: Final = 0.05
"""Share of the hours that settings which cost some of the loss must save to be worth it: int2 both
ways costs 1 to 2 % of it, and forecasts err by as much."""

SPARSE_GAIN: Final = 0.25
"""The same of sparse codecs, which lost 25 % and more in 40 rounds
(docs/explanation/silence.md)."""

LEAST_ROUNDS: Final = 20
"""No proposal has fewer: with fewer the outer optimizer has not warmed up (A1)."""

SPARSE_ROUNDS: Final = 100
"""Sparse codecs are for runs at least so long (A3)."""

GROWTH: Final = 1.25
"""Each longer round that is tried is longer by so much."""

CHANGED: Final = {"rounds": ("inner_steps", "codec_up", "codec_down"), "outer": ("eta", "mu")}
"""What a proposal may change."""

CODECS: Final = (("int3", "int3"), ("int2", "int3"), ("int2", "int2"), ("sparse", "sparse"))
"""What is tried up and down, the least harmful first: three bits, and two on the way up, cost
nothing that could be measured, two both ways 1 to 2 % (docs/explanation/silence.md)."""

FREE: Final = (("int3", "int3"), ("int2", "int3"))
"""Those of them that cost nothing."""


@dataclass(frozen=True, slots=True)
class Proposal:
    """Better settings: ``changes`` by recipe field (none: the job is good as it is), what they make
    of it, and why they and no others."""

    changes: Mapping[str, str | int | float]
    reason: str
    forecast: Forecast


def propose(
    spec: JobSpec,
    machines: Sequence[Known],
    overhead: Overhead,
    held_out: int | None = None,
    data_bytes: int | None = None,
) -> Proposal:
    """The settings of rounds that an expert would pick for these machines.

    The job's own where they leave :data:`TARGET` of the time for inner steps. Else :data:`CODECS`
    from what the job has on, each with the job's own length of rounds and with longer ones, are
    tried until :data:`AIM` is reached; never a finer one. What costs some of the loss is taken when
    it saves :data:`GAIN` of the hours of what was taken before it, sparse codecs when they save
    :data:`SPARSE_GAIN`, what costs none when it saves :data:`EQUAL` (A1, A3). Of longer rounds the
    shortest are tried that reach :data:`AIM`, or come within :data:`GAIN` of the fewest hours.

    Raises:
        InvalidSpec: the architecture is not possible.
    """

    def look(other: JobSpec) -> Forecast:
        return ahead(other, machines, overhead, held_out, data_bytes)

    own = best = look(spec)
    chosen, most = spec, own.compute_share
    for others, least in _rungs(spec) if own.compute_share < TARGET else ():
        found = _shortest(others, look)
        if found is None:
            continue
        other, there = found
        most = max(most, there.compute_share)
        if there.hours <= best.hours * (1 - least):
            chosen, best = other, there
        if best.compute_share >= AIM:
            break
    whole = forecast(spec, machines, overhead, held_out, data_bytes)
    words = _words(spec, own, chosen, best, most)
    without = [n.hours_without for n in whole.nodes if n.hours_without is not None]
    if without:
        words += (
            "; without the machine that the others wait for it would take "
            f"{duration(3600 * min(without))} as it is, instead of {duration(3600 * own.hours)}"
        )
    if chosen is not spec:
        whole = forecast(chosen, machines, overhead, held_out, data_bytes)
    return Proposal(_changes(spec, chosen), words, whole)


def _words(spec: JobSpec, own: Forecast, chosen: JobSpec, best: Forecast, most: float) -> str:
    """Why these settings and no others; ``most`` is the largest share that any brought."""
    words = f"inner steps are {own.compute_share:.1%} of the time as it is"
    if chosen is not spec:
        words += f", and {best.compute_share:.1%} with it"
        if is_sparse(chosen.rounds.codec_up):
            words += "; sparse codecs are for long runs and cost some of the loss in short ones"
        if (chosen.rounds.codec_up, chosen.rounds.codec_down) == ("int2", "int2"):
            words += "; int2 both ways costs up to 2 % of the loss in short runs"
    if most < TARGET:
        words += (
            f"; nothing with at least {LEAST_ROUNDS} rounds reaches {TARGET:.0%}, more steps would "
            "allow longer rounds"
        )
    elif best.compute_share < TARGET:
        words += (
            f"; {most:.1%} are possible, but longer rounds and coarser codecs cost some of the "
            f"loss, and would save less than {GAIN:.0%} of the hours"
        )
    return words


def _shortest(
    others: Sequence[JobSpec], look: Callable[[JobSpec], Forecast]
) -> tuple[JobSpec, Forecast] | None:
    """Of settings with ever longer rounds the first that are as good as need be."""
    tried = list[tuple[JobSpec, Forecast]]()
    for other in others:
        tried.append((other, look(other)))
        if tried[-1][1].compute_share >= AIM:
            return tried[-1]
    fewest = min((found.hours for _, found in tried), default=0.0)
    return next((t for t in tried if t[1].hours * (1 - GAIN) <= fewest), None)


def _rungs(spec: JobSpec) -> Iterator[tuple[list[JobSpec], float]]:
    """Settings to try instead of the job's own, the least harmful first, those together that differ
    in the length of rounds alone; and the share of the hours that they must save."""
    own = (spec.rounds.codec_up, spec.rounds.codec_down)
    seen = list[tuple[Schedule, Schedule]]()
    for rung in CODECS:
        legs = _coarser(spec, rung)
        if legs in seen:
            continue
        seen.append(legs)
        least = EQUAL if rung in FREE else GAIN
        if legs != own and is_sparse(rung[0]):
            least = SPARSE_GAIN
        if legs != own:
            yield _possible([_with(spec, *legs, spec.rounds.inner_steps)]), least
        yield _possible([_with(spec, *legs, steps) for steps in _longer(spec)]), max(least, GAIN)


def _coarser(spec: JobSpec, rung: tuple[str, str]) -> tuple[Schedule, Schedule]:
    """What travels up and down: of the job's own and the rung's that with fewer bytes."""
    own = (spec.rounds.codec_up, spec.rounds.codec_down)
    parameters = parameter_count(spec)
    before = plan(spec, parameters, 1)
    after = plan(_with(spec, *rung, spec.rounds.inner_steps), parameters, 1)
    return (
        rung[0] if after.bytes_up < before.bytes_up else own[0],
        rung[1] if after.bytes_down < before.bytes_down else own[1],
    )


def _with(spec: JobSpec, up: Schedule, down: Schedule, steps: int) -> JobSpec:
    other = replace(
        spec, rounds=replace(spec.rounds, codec_up=up, codec_down=down, inner_steps=steps)
    )
    if is_sparse(up) and not is_sparse(spec.rounds.codec_up):
        # Momentum on top of what is sparse was measured worse (A3).
        return replace(other, outer=replace(other.outer, eta=1.0, mu=0.0))
    return other


def _possible(others: Sequence[JobSpec]) -> list[JobSpec]:
    """Those in which every stage of a schedule is reached and sparse codecs have their rounds."""
    found = []
    for other in others:
        legs = (other.rounds.codec_up, other.rounds.codec_down)
        enough = other.round_count >= SPARSE_ROUNDS or not any(map(is_sparse, legs))
        if enough and all(begins_within(schedule, other.round_count) for schedule in legs):
            found.append(other)
    return found


def _longer(spec: JobSpec) -> list[int]:
    """Longer rounds of which the job still has :data:`LEAST_ROUNDS`."""
    found, steps = list[int](), spec.rounds.inner_steps
    while (steps := max(steps + 1, round(steps * GROWTH))) * LEAST_ROUNDS <= spec.steps:
        found.append(steps)
    return found


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
