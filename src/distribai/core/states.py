"""State machines of jobs, tasks, rounds, nodes and webhooks: one transition table each.

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


class WebhookState(StrEnum):
    """Whether a webhook is delivered to."""

    ACTIVE = "active"
    DISABLED = "disabled"


class DeliveryState(StrEnum):
    """Where one event's delivery to one webhook stands."""

    QUEUED = "queued"
    DELIVERED = "delivered"
    FAILED = "failed"


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

WEBHOOK: Mapping[WebhookState, frozenset[WebhookState]] = {
    WebhookState.ACTIVE: frozenset({WebhookState.DISABLED}),
    WebhookState.DISABLED: frozenset({WebhookState.ACTIVE}),
}

DELIVERY: Mapping[DeliveryState, frozenset[DeliveryState]] = {
    DeliveryState.QUEUED: frozenset({DeliveryState.DELIVERED, DeliveryState.FAILED}),
    DeliveryState.DELIVERED: frozenset(),
    DeliveryState.FAILED: frozenset(),
}

STANDING: Mapping[Standing, frozenset[Standing]] = {
    Standing.PROBATION: frozenset({Standing.TRUSTED, Standing.QUARANTINED, Standing.BANNED}),
    Standing.TRUSTED: frozenset({Standing.PROBATION, Standing.QUARANTINED, Standing.BANNED}),
    Standing.QUARANTINED: frozenset({Standing.PROBATION, Standing.TRUSTED, Standing.BANNED}),
    Standing.BANNED: frozenset({Standing.PROBATION}),
}


MEANINGS: Mapping[type[StrEnum], Mapping[str, str]] = {
    JobState: {
        "submitted": "It waits for the operator's word.",
        "queued": "The operator has accepted it; it waits for enough nodes.",
        "declined": "The operator has declined it, with a reason.",
        "running": "Its rounds are open, trained and merged.",
        "paused": "It keeps everything and gets no node until it is resumed.",
        "completed": "Its last version is there.",
        "failed": "A task failed too often, with the reason; its versions stay.",
        "cancelled": "Somebody has ended it; its versions stay.",
    },
    TaskState: {
        "queued": "It waits for a free device, or for the node that fell silent with it.",
        "leased": "One device of one node works on it, under one attempt, until the lease ends.",
        "submitted": "A result came in from the attempt that holds the lease.",
        "verifying": "The result is being checked.",
        "accepted": "The result counts, once; its samples are consumed.",
        "rejected": "The result does not fit its task; its samples go into a new task.",
        "superseded": "The result came too late for every round that would take it; its samples go "
        "into a new task.",
        "failed": "Too many attempts failed; its samples go back.",
        "cancelled": "Nobody needs it any more: its round or job has ended; its samples go back.",
    },
    RoundState: {
        "open": "Members train and submit; the quorum starts the grace.",
        "closing": "Who takes part is frozen and recorded; it is merged from exactly these.",
        "merged": "It has made the next version.",
        "abandoned": "It made nothing and changed no momentum; what it had accepted counts in its "
        "next take.",
    },
    Liveness: {
        "online": "It was heard lately.",
        "degraded": "It is silent: it keeps its tasks and gets no new ones.",
        "offline": "It counts as gone: its leases are dead. When it is heard it is online again.",
    },
    Standing: {
        "probation": "It gets work; what it does is to be checked more often.",
        "trusted": "It gets work.",
        "quarantined": "It gets no work and moves no bytes until the operator has looked.",
        "banned": "Its key is shut out.",
    },
    WebhookState: {
        "active": "Events go to its address.",
        "disabled": "Its receiver failed for too long or is gone for good; somebody has to enable "
        "it again.",
    },
    DeliveryState: {
        "queued": "It waits for its turn, or for the next try.",
        "delivered": "The receiver has answered 2xx.",
        "failed": "It was given up, with the reason.",
    },
    Intent: {
        "contribute": "It wants work.",
        "pause": "It stays connected and wants no work for now.",
        "drain": "It finishes what it has in hand, hands it in and leaves.",
    },
}
"""Every state in one sentence, for the docs; by class, since two machines share some names."""


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
