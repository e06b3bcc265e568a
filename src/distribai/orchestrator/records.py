"""What the orchestrator's queries answer: frozen, plain values with no row behind them.

All times are database time in seconds since 1970 (``None``: has not happened). Every record goes
through :func:`distribai.core.plain.to_plain` as it stands.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Generic, TypeVar

from distribai.core.devices import Machine
from distribai.core.forecast import Forecast
from distribai.core.phases import Measured
from distribai.core.plain import Plain
from distribai.core.ranges import Ranges
from distribai.core.spec import BlobRef, JobSpec

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Page(Generic[T]):
    """One page of a list; ``next_cursor`` is empty on the last one."""

    items: tuple[T, ...]
    next_cursor: str = ""


@dataclass(frozen=True, slots=True)
class JobSummary:
    """A job as one line of a list."""

    id: str
    name: str
    state: str
    reason: str
    priority: str
    version: int
    rounds_total: int
    nodes_working: int
    created_at: float
    created_by: str
    started_at: float | None
    ended_at: float | None
    held_out_loss: float | None
    organization_id: str = ""


@dataclass(frozen=True, slots=True)
class RoundProgress:
    """The round that is being worked on.

    ``slots`` submissions are expected, ``submitted`` have arrived, ``accepted`` passed their
    checks. ``step`` is the mean inner step of the working nodes (accepted ones count as finished)
    of ``steps``; ``mean_loss`` and ``tokens_per_s`` come from their latest reports; ``eta_s`` is
    what the *job* still needs at this pace.
    """

    number: int
    take: int
    state: str
    opened_at: float
    deadline_at: float | None
    slots: int
    submitted: int
    accepted: int
    step: float
    steps: int
    mean_loss: float | None
    tokens_per_s: float
    eta_s: float | None


@dataclass(frozen=True, slots=True)
class HeldOut:
    """Held-out loss (nats per target token) of one version; ``None`` until a node measured it."""

    version: int
    loss: float | None


@dataclass(frozen=True, slots=True)
class ByteTotals:
    """Bytes that really moved between nodes and orchestrator; *up* is from a node."""

    weights_up: int = 0
    weights_down: int = 0
    data_up: int = 0
    data_down: int = 0


@dataclass(frozen=True, slots=True)
class JobRecord:
    """Everything that ``distribai job show`` and ``watch`` tell.

    ``tokens`` are target tokens of accepted work. ``dataset`` and ``plan`` are the figures of the
    prepared data set and of the planner, as plain JSON. ``forecast`` is what was expected of the
    machines that were here when it was submitted or accepted, ``measured`` what became of it.
    ``now`` is the database time of the answer.
    """

    id: str
    name: str
    state: str
    reason: str
    spec: JobSpec
    version: int
    rounds_total: int
    created_at: float
    created_by: str
    decided_at: float | None
    started_at: float | None
    ended_at: float | None
    now: float
    parameters: int
    tokens: int
    nodes_working: int
    round: RoundProgress | None
    held_out: tuple[HeldOut, ...]
    bytes: ByteTotals
    dataset: Mapping[str, Plain]
    plan: Mapping[str, Plain]
    waiting_for: str = ""
    weight: float = 1.0
    retry_of: str = ""
    organization_id: str = ""
    forecast: Forecast | None = None
    measured: Measured | None = None


@dataclass(frozen=True, slots=True)
class MemberRecord:
    """One slot of a round as it was when the round opened."""

    node_id: str
    device: int
    steps: int


@dataclass(frozen=True, slots=True)
class RoundRecord:
    """One round; ``take`` counts openings of the same number (an abandoned round opens again)."""

    number: int
    take: int
    state: str
    reason: str
    opened_at: float
    deadline_at: float | None
    closed_at: float | None
    members: tuple[MemberRecord, ...]
    accepted: int
    tokens: int


@dataclass(frozen=True, slots=True)
class CauseRecord:
    """Why one attempt of a task failed."""

    node_id: str
    attempt: int
    code: str
    reason: str


@dataclass(frozen=True, slots=True)
class TaskRecord:
    """One task. ``samples`` are the positions that it holds; of an accepted one, the consumed."""

    id: str
    job_id: str
    round: int
    take: int
    phase: str
    state: str
    node_id: str
    device: int
    attempt: int
    samples: Ranges
    steps: int
    step: int
    loss: float | None
    tokens_per_s: float
    tokens: int
    reason: str
    text: str
    metrics: Mapping[str, float]
    causes: tuple[CauseRecord, ...]
    created_at: float
    leased_at: float | None
    ended_at: float | None


@dataclass(frozen=True, slots=True)
class VersionRecord:
    """One version of the weights. ``contributors`` submissions made it (0 for version 0). Without
    ``weights`` it keeps no snapshot: the file is made again when it is asked for."""

    version: int
    weights_hash: str
    weights: BlobRef | None
    update: BlobRef | None
    contributors: int
    tokens: int
    held_out_loss: float | None
    created_at: float


@dataclass(frozen=True, slots=True)
class EventRecord:
    """One row of the outbox. Give ``cursor`` to ``list_events(after=...)`` to go on behind it.
    ``account_id`` and ``key_id``: whose doing it is, if a person's."""

    cursor: str
    at: float
    kind: str
    job_id: str
    task_id: str
    node_id: str
    data: Mapping[str, Plain] = field(default_factory=dict)
    account_id: str = ""
    key_id: str = ""


@dataclass(frozen=True, slots=True)
class LogRecord:
    """One line that a node or the orchestrator wrote about a job; ``cursor`` as in events."""

    cursor: str
    at: float
    level: str
    message: str
    job_id: str
    task_id: str
    node_id: str
    fields: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class DeviceRecord:
    """One device of a node."""

    index: int
    type: str
    name: str
    memory_mb: int
    threads: int


@dataclass(frozen=True, slots=True)
class NodeRecord:
    """One contributor machine on its three axes, and what it holds now.

    ``ordered`` is what the operator wants of it, ``machine`` what it was measured to have.
    """

    id: str
    name: str
    liveness: str
    standing: str
    intent: str
    software: str
    devices: tuple[DeviceRecord, ...]
    joined_at: float
    last_heard_at: float
    tasks: tuple[str, ...]
    bytes_up: int
    bytes_down: int
    ordered: str = "contribute"
    standing_reason: str = ""
    machine: Machine | None = None
    account_id: str = ""
    intent_reason: str = ""


@dataclass(frozen=True, slots=True)
class NodeState:
    """The node that a command changed, as it is now."""

    id: str
    liveness: str
    standing: str
    intent: str
    ordered: str
    standing_reason: str


@dataclass(frozen=True, slots=True)
class GridSummary:
    """The grid's health. ``problems`` are sentences; ``ok`` is whether there are none.
    ``replicas`` are the names of those that are here; none where there can be one only."""

    grid_id: str
    mode: str
    software: str
    database: str
    ok: bool
    problems: tuple[str, ...]
    now: float
    nodes_online: int
    nodes_degraded: int
    nodes_offline: int
    nodes_working: int
    jobs: Mapping[str, int]
    tasks_queued: int
    tasks_leased: int
    replicas: tuple[str, ...] = ()
