"""Answers of the HTTP interface: what the client reads and the OpenAPI description shows.

Times are database time in seconds since 1970, ``None`` when it has not happened. Readers ignore
fields that they do not know, so that an older client can talk to a newer orchestrator.
"""

from __future__ import annotations

from typing import Any, Generic, TypeVar

from pydantic import BaseModel, ConfigDict

from distribai.core.devices import Machine
from distribai.core.forecast import Forecast
from distribai.core.people import Excess
from distribai.core.phases import Measured
from distribai.core.proposal import Proposal
from distribai.core.spec import BlobRef, JobSpec

T = TypeVar("T")


class Answer(BaseModel):
    """Base of all answers: read once, never changed."""

    model_config = ConfigDict(frozen=True, extra="ignore")


class Page(Answer, Generic[T]):
    """One page of a list. Give ``next_cursor`` back as ``cursor``; it is empty on the last one."""

    items: list[T]
    next_cursor: str = ""


class Listing(Answer, Generic[T]):
    """A whole list."""

    items: list[T]


class Problem(Answer):
    """``application/problem+json``. ``code`` is stable; ``hint`` says what to try."""

    type: str = "about:blank"
    title: str = ""
    status: int
    detail: str = ""
    code: str = ""
    hint: str = ""
    field: str = ""
    request_id: str = ""
    errors: list[dict[str, str]] = []


class JobId(Answer):
    """The job that a request made or changed, and the state it is in now."""

    id: str
    state: str


class JobSummary(Answer):
    """A job as one line of a list. ``version`` is its latest weights' number."""

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


class RoundProgress(Answer):
    """The round being worked on; ``number`` and ``take`` as in :class:`RoundRecord`. ``slots``
    submissions are expected, ``submitted`` have arrived.
    ``step`` of ``steps`` is the mean over its nodes; ``eta_s`` is for the whole job."""

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


class HeldOut(Answer):
    """Held-out loss of one version, in nats per target token."""

    version: int
    loss: float | None


class ByteTotals(Answer):
    """Bytes that moved between nodes and orchestrator; *up* is from a node."""

    weights_up: int
    weights_down: int
    data_up: int
    data_down: int


class JobRecord(Answer):
    """Everything about one job. ``now`` is the database time of the answer; ``forecast`` what was
    expected when it was submitted, ``measured`` what became of it, None as long as nothing did."""

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
    held_out: list[HeldOut]
    bytes: ByteTotals
    dataset: dict[str, Any]
    plan: dict[str, Any]
    waiting_for: str = ""
    weight: float = 1.0
    retry_of: str = ""
    organization_id: str = ""
    forecast: Forecast | None = None
    measured: Measured | None = None


class MemberRecord(Answer):
    """One slot of a round as it was when the round opened."""

    node_id: str
    device: int
    steps: int


class RoundRecord(Answer):
    """One round. ``number`` counts from 0: it is the version that the round starts from, and
    merging makes version ``number + 1``. (The command line counts rounds from 1.) ``take`` counts
    openings of the same number, from 0."""

    number: int
    take: int
    state: str
    reason: str
    opened_at: float
    deadline_at: float | None
    closed_at: float | None
    members: list[MemberRecord]
    accepted: int
    tokens: int


class CauseRecord(Answer):
    """Why one attempt of a task failed."""

    node_id: str
    attempt: int
    code: str
    reason: str


class TaskRecord(Answer):
    """One task. ``round`` is the version that it starts from, or looks at: training of ``round`` 0
    makes version 1. ``samples`` are the positions that it holds, or consumed once it is
    accepted."""

    id: str
    job_id: str
    round: int
    take: int
    phase: str
    state: str
    node_id: str
    device: int
    attempt: int
    samples: list[dict[str, int]]
    steps: int
    step: int
    loss: float | None
    tokens_per_s: float
    tokens: int
    reason: str
    text: str
    metrics: dict[str, float]
    causes: list[CauseRecord]
    created_at: float
    leased_at: float | None
    ended_at: float | None


class VersionRecord(Answer):
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


class EventRecord(Answer):
    """One state change. Give ``cursor`` back as ``after`` to go on behind it. ``account_id`` and
    ``key_id`` say whose doing it is, if a person's."""

    cursor: str
    at: float
    kind: str
    job_id: str
    task_id: str
    node_id: str
    data: dict[str, Any]
    account_id: str = ""
    key_id: str = ""


class Feed(Answer):
    """Some events. Give ``cursor`` back as ``after`` to go on behind them, also when there were
    none."""

    items: list[EventRecord]
    cursor: str = ""


class LogRecord(Answer):
    """One line that a node or the orchestrator wrote about a job."""

    cursor: str
    at: float
    level: str
    message: str
    job_id: str
    task_id: str
    node_id: str
    fields: dict[str, str]


class DeviceRecord(Answer):
    """One device of a node."""

    index: int
    type: str
    name: str
    memory_mb: int
    threads: int


class NodeRecord(Answer):
    """One contributor machine on its three axes, and what it holds now. ``ordered`` is what the
    operator wants of it, ``machine`` what it was measured to have; ``intent_reason`` why it takes
    no tasks, in its own words, empty where it does not say."""

    id: str
    name: str
    liveness: str
    standing: str
    intent: str
    software: str
    devices: list[DeviceRecord]
    joined_at: float
    last_heard_at: float
    tasks: list[str]
    bytes_up: int
    bytes_down: int
    ordered: str = "contribute"
    standing_reason: str = ""
    machine: Machine | None = None
    account_id: str = ""
    intent_reason: str = ""


class NodeState(Answer):
    """The node that a request changed, as it is now."""

    id: str
    liveness: str
    standing: str
    intent: str
    ordered: str
    standing_reason: str


class GridSummary(Answer):
    """The grid's health. ``mode`` is ``trusted`` (the operator's own nodes) or ``open``
    (strangers'); ``problems`` are sentences; ``ok`` is whether there are none. ``replicas`` are the
    names, host and port, of those that are here; none where there can be one only."""

    grid_id: str
    mode: str
    software: str
    database: str
    ok: bool
    problems: list[str]
    now: float
    nodes_online: int
    nodes_degraded: int
    nodes_offline: int
    nodes_working: int
    jobs: dict[str, int]
    tasks_queued: int
    tasks_leased: int
    replicas: list[str] = []


class PlanAnswer(Answer):
    """What a job would take, before it exists: the effective spec and the planner's figures; how it
    would go on the machines that are here, and settings that would go better. Nodes of other
    accounts have no id. ``plan`` is for its ``nodes`` devices; ``here`` could take part now, and
    ``resting`` nodes are online and take no tasks (None: nobody has counted). ``not_now``: the
    organization's quota that is full, so that it would be refused for now."""

    spec: JobSpec
    plan: dict[str, Any]
    here: int | None = None
    resting: int | None = None
    not_now: Excess | None = None
    forecast: Forecast | None = None
    proposal: Proposal | None = None


class Generation(Answer):
    """A sample from a version. ``text`` is what follows the prompt."""

    task_id: str
    version: int
    prompt: str
    text: str


class WebhookRecord(Answer):
    """One webhook. ``kinds`` empty means all events, ``queued`` events wait for it;
    ``failing_since`` is the first failure after the last success."""

    id: str
    url: str
    kinds: list[str]
    state: str
    reason: str
    created_at: float
    created_by: str
    cursor: str
    queued: int
    failures: int
    failing_since: float | None
    next_at: float
    delivered_at: float | None


class WebhookMade(WebhookRecord):
    """A webhook that was just made, with its secret, which is shown only now."""

    secret: str


class DeliveryRecord(Answer):
    """One event to one webhook, with what the last try gave. ``cursor`` is the event's, empty for a
    test; ``status`` is the receiver's answer, None when nobody answered."""

    id: str
    webhook_id: str
    kind: str
    cursor: str
    state: str
    attempts: int
    status: int | None
    reason: str
    seconds: float | None
    created_at: float
    attempted_at: float | None
    ended_at: float | None
