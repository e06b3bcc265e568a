"""State machines of jobs, tasks, rounds and nodes: one transition table each.

Nothing else in the product decides whether a state may follow another. :func:`check` is called
in the transaction that writes the state.
"""

from __future__ import annotations

from collections.abc import Mapping
from enum import StrEnum
from typing import TypeVar

from distribai.errors import Conflict


class JobState(StrEnum):
    """Where a job stands."""

    SUBMITTED = "submitted"
    QUEUED = "queued"
    DECLINED = "declined"
    RUNNING = "running"
    PAUSED = "paused"
    COMPLETED = "completed"
    FAILED = "failed"
    CANCELLED = "cancelled"


class TaskState(StrEnum):
    """Where a task stands."""

    QUEUED = "queued"
    LEASED = "leased"
    SUBMITTED = "submitted"
    VERIFYING = "verifying"
    ACCEPTED = "accepted"
    REJECTED = "rejected"
    SUPERSEDED = "superseded"
    FAILED = "failed"
    CANCELLED = "cancelled"


class RoundState(StrEnum):
    """Where a round stands."""

    OPEN = "open"
    CLOSING = "closing"
    MERGED = "merged"
    ABANDONED = "abandoned"


class Liveness(StrEnum):
    """How lately a node was heard."""

    ONLINE = "online"
    DEGRADED = "degraded"
    OFFLINE = "offline"


class Standing(StrEnum):
    """How far a node is trusted."""

    PROBATION = "probation"
    TRUSTED = "trusted"
    QUARANTINED = "quarantined"
    BANNED = "banned"


class Intent(StrEnum):
    """What the contributor wants of the machine."""

    CONTRIBUTE = "contribute"
    PAUSE = "pause"
    DRAIN = "drain"


S = TypeVar("S", bound=StrEnum)

JOB: Mapping[JobState, frozenset[JobState]] = {
    JobState.SUBMITTED: frozenset({JobState.QUEUED, JobState.DECLINED, JobState.CANCELLED}),
    JobState.QUEUED: frozenset({JobState.RUNNING, JobState.CANCELLED}),
    JobState.RUNNING: frozenset(
        {JobState.COMPLETED, JobState.FAILED, JobState.PAUSED, JobState.CANCELLED}
    ),
    JobState.PAUSED: frozenset({JobState.RUNNING, JobState.CANCELLED}),
    JobState.DECLINED: frozenset(),
    JobState.COMPLETED: frozenset(),
    JobState.FAILED: frozenset(),
    JobState.CANCELLED: frozenset(),
}

TASK: Mapping[TaskState, frozenset[TaskState]] = {
    TaskState.QUEUED: frozenset({TaskState.LEASED, TaskState.CANCELLED, TaskState.FAILED}),
    TaskState.LEASED: frozenset(
        {TaskState.QUEUED, TaskState.SUBMITTED, TaskState.FAILED, TaskState.CANCELLED}
    ),
    TaskState.SUBMITTED: frozenset({TaskState.VERIFYING, TaskState.CANCELLED}),
    TaskState.VERIFYING: frozenset(
        {TaskState.ACCEPTED, TaskState.REJECTED, TaskState.SUPERSEDED, TaskState.CANCELLED}
    ),
    TaskState.ACCEPTED: frozenset(),
    TaskState.REJECTED: frozenset(),
    TaskState.SUPERSEDED: frozenset(),
    TaskState.FAILED: frozenset(),
    TaskState.CANCELLED: frozenset(),
}

ROUND: Mapping[RoundState, frozenset[RoundState]] = {
    RoundState.OPEN: frozenset({RoundState.CLOSING, RoundState.ABANDONED}),
    RoundState.CLOSING: frozenset({RoundState.MERGED, RoundState.ABANDONED}),
    RoundState.MERGED: frozenset(),
    RoundState.ABANDONED: frozenset(),
}


def is_terminal(table: Mapping[S, frozenset[S]], state: S) -> bool:
    """Whether nothing can follow ``state``."""
    return not table[state]


def check(table: Mapping[S, frozenset[S]], old: S, new: S, what: str) -> None:
    """Refuse a transition that the table does not have.

    Raises:
        Conflict: ``new`` cannot follow ``old``; ``what`` names the object in the message.
    """
    if new not in table[old]:
        raise Conflict(
            "state.transition",
            f"{what} is {old.value}: it cannot become {new.value}.",
            f"From {old.value} it can become: "
            + (", ".join(sorted(s.value for s in table[old])) or "nothing, it has ended")
            + ".",
        )
