"""Paradigms: how a job is split into tasks and when a round merges. One file each, found by scan.

A paradigm's module offers ``NAME: str`` and the functions of :class:`Paradigm`. All of them are
pure: what they decide follows from their arguments, and they say why.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from typing import Literal, Protocol, cast

from distribai.core.ranges import Ranges, SamplePool
from distribai.core.scan import modules
from distribai.core.spec import JobSpec, RoundSpec
from distribai.errors import InvalidSpec


@dataclass(frozen=True, slots=True)
class Member:
    """A device that may take part in a round.

    ``speed`` in tokens per second as last measured for this job, None when unknown.
    """

    node_id: str
    device: int
    speed: float | None = None


@dataclass(frozen=True, slots=True)
class Slot:
    """One member's share of a round: ``steps`` inner steps over ``samples`` from global inner step
    ``inner_step_offset`` on, as ``rank`` of ``world_size``."""

    node_id: str
    device: int
    steps: int
    samples: Ranges
    inner_step_offset: int
    rank: int
    world_size: int


@dataclass(frozen=True, slots=True)
class MergeDecision:
    """What to do with an open round; ``until`` is when a waiting round merges at the latest, on
    the clock of the arguments, None when only an event can change the decision."""

    action: Literal["wait", "merge", "abandon"]
    reason: str
    until: float | None = None


class Paradigm(Protocol):
    """What a paradigm's module offers; see :mod:`distribai.core.paradigms.diloco`."""

    NAME: str

    def eligible(
        self, members: Sequence[Member], workers_min: int, workers_max: int
    ) -> tuple[tuple[Member, ...], str]:
        """Who takes part in the next round, or nobody; and why."""

    def slots(
        self, spec: JobSpec, round_number: int, members: Sequence[Member], pool: SamplePool
    ) -> tuple[list[Slot], SamplePool, str]:
        """The shares of a round, the pool without their samples, and why."""

    def grace(self, past_offsets: Sequence[float], rounds: RoundSpec) -> tuple[float, str]:
        """Seconds to wait after the quorum, and why."""

    def arrival_offsets(
        self, arrivals: Sequence[float], expected: int, quorum: float
    ) -> tuple[float, ...]:
        """What a round adds to the history that :meth:`grace` reads."""

    def merge_decision(
        self,
        now: float,
        arrivals: Sequence[float],
        expected: int,
        quorum: float,
        grace_seconds: float,
        minimum: int = 1,
        opened: float | None = None,
        at_work: int = 0,
    ) -> MergeDecision:
        """Whether a round merges now."""

    def finish_within(self, now: float, opened: float) -> float:
        """Seconds that members may go on once the quorum is reached."""

    def takes_late(self, base: int, number: int, rounds: RoundSpec) -> tuple[bool, str]:
        """Whether a round takes work that an earlier one did not get."""

    def can_reissue(
        self, now: float, seconds_needed: float, decision: MergeDecision
    ) -> tuple[bool, str]:
        """Whether a dead slot's samples may go to another device in the same round."""


@cache
def paradigms() -> dict[str, Paradigm]:
    """Every paradigm by name."""
    return {module.NAME: cast(Paradigm, module) for module in modules(__name__)}


def paradigm(name: str) -> Paradigm:
    """One paradigm.

    Raises:
        InvalidSpec: ``spec.paradigm``; no such paradigm.
    """
    try:
        return paradigms()[name]
    except KeyError:
        raise InvalidSpec(
            "spec.paradigm",
            f"There is no paradigm {name!r}.",
            f"Paradigms: {', '.join(paradigms())}.",
            field="paradigm",
        ) from None
