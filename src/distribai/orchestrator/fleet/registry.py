"""Live sessions of this process, in memory: what was heard of each node, what waits for it.

A session outlives its streams: when a connection breaks, what was not acknowledged waits here, and
the same daemon goes on with it (``wire.channel``). What must survive this process is in the
database; everything here is lost with it, and a node that comes back then begins a new session.
"""

from __future__ import annotations

import asyncio
import math
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from weakref import WeakValueDictionary

from distribai.core.devices import Device, Machine
from distribai.core.states import Intent
from distribai.core.tasks import Progress
from distribai.wire.channel import RELIABLE, Channel
from distribai.wire.v1 import distribai_pb2 as pb

STREAM_BUFFER = 1000
"""Messages that may wait for a slow connection before it is cut; what counts is kept anyway."""

REFUSAL_S = 10.0
"""Seconds in which a node that would not take a task is not asked again; each further refusal
doubles them, up to :data:`MAX_REFUSAL_S`. A node whose disk is full would otherwise be asked, and
refuse, as fast as messages travel."""

MAX_REFUSAL_S = 300.0

MAX_REPORTED = 256
"""Ended attempts that a session remembers: a snapshot is older than a report by moments only."""


class Stream:
    """One connection of a session: messages on their way out. ``None`` ends it."""

    def __init__(self) -> None:
        self.queue: asyncio.Queue[pb.OrchestratorMessage | None] = asyncio.Queue()
        self.closed = False

    def put(self, message: pb.OrchestratorMessage) -> None:
        """Send a message; a connection that does not keep up is closed instead."""
        if self.closed:
            return
        if self.queue.qsize() >= STREAM_BUFFER:
            self.close()
        else:
            self.queue.put_nowait(message)

    def close(self, last: pb.SessionEnd | None = None) -> None:
        """End the connection, after ``last`` if there is one; a second call does nothing."""
        if self.closed:
            return
        self.closed = True
        if last is not None:
            self.queue.put_nowait(pb.OrchestratorMessage(session_end=last))
        self.queue.put_nowait(None)


@dataclass
class LiveSession:
    """One node's session.

    ``assigned`` are the attempts that were sent to the node and not yet taken back, by task id;
    ``stopping`` those that it was told to stop, ``hurried`` those that it was told to finish,
    ``overdue`` those that it was told to finish at once because their round has closed,
    ``reported`` the latest ones that it has ended. ``refusals`` in a row were its answer to tasks,
    and until ``refused_until`` (on the process's clock) it is not asked again. ``told`` is the
    newest version of each job that it was told of. ``heard`` says that something came since the
    last flush; ``slowed`` messages in a row came too fast. ``protocol`` is the version that the
    node speaks, ``token_until`` (database time) when its present token ends. Bytes are totals that
    the node reports since its daemon started, and what of them was flushed, as of what it wants;
    ``counted_before``: the first totals of this session are known from an earlier one.
    ``intent_reason`` is why it takes no tasks, in its own words, empty where it does not say.
    ``machine`` is what it was measured to have since the last flush (None: nothing new).
    ``ordered`` is what the operator wants of it as far as it was told over this session (None: it
    was told nothing yet).
    """

    id: str
    node_id: str
    public_key: bytes
    name: str
    devices: tuple[Device, ...]
    intent: Intent = Intent.CONTRIBUTE
    intent_reason: str = ""
    flushed_wants: tuple[Intent, str] | None = None
    channel: Channel[pb.OrchestratorMessage] = field(default_factory=Channel)
    stream: Stream | None = None
    assigned: dict[str, int] = field(default_factory=dict)
    stopping: set[str] = field(default_factory=set)
    hurried: set[str] = field(default_factory=set)
    overdue: set[str] = field(default_factory=set)
    reported: dict[str, int] = field(default_factory=dict)
    refusals: int = 0
    refused_until: float = -math.inf
    told: dict[str, int] = field(default_factory=dict)
    in_hand: dict[str, int] = field(default_factory=dict)
    progress: dict[str, Progress] = field(default_factory=dict)
    held_versions: dict[str, int] = field(default_factory=dict)
    blobs: frozenset[str] = frozenset()
    machine: Machine | None = None
    ordered: Intent | None = None
    heard: bool = True
    slowed: int = 0
    protocol: int = 1
    token_until: float = math.inf
    bytes_up: int = 0
    bytes_down: int = 0
    counted_before: bool = False
    flushed_up: int = 0
    flushed_down: int = 0

    @property
    def wants(self) -> tuple[Intent, str]:
        """Its intent, and why."""
        return self.intent, self.intent_reason

    def send(self, message: pb.OrchestratorMessage) -> None:
        """Number a message and send it now, or when the node is connected again.

        Raises:
            Unavailable: ``protocol.backlog``: the node never acknowledges.
        """
        reliable = message.WhichOneof("body") in RELIABLE
        seq = self.channel.number(message, reliable=reliable)
        if self.stream is not None:
            self.stream.put(self.envelope(seq, message))

    def envelope(self, seq: int, message: pb.OrchestratorMessage) -> pb.OrchestratorMessage:
        """``message`` under number ``seq`` with the present acknowledgement."""
        out = pb.OrchestratorMessage()
        out.CopyFrom(message)
        out.seq = seq
        out.ack = self.channel.received
        return out

    def ended(self, task_id: str, attempt: int) -> None:
        """The node has reported an attempt: it must not be sent again, whatever a snapshot that is
        older than the report says."""
        self.reported.pop(task_id, None)
        self.reported[task_id] = attempt
        if len(self.reported) > MAX_REPORTED:
            del self.reported[next(iter(self.reported))]
        self.progress.pop(task_id, None)

    def answered(self, accepted: bool, now: float) -> None:
        """The node has taken a task, or has refused one, at ``now`` on the process's clock."""
        self.refusals = 0 if accepted else self.refusals + 1
        if not accepted:
            pause = min(MAX_REFUSAL_S, REFUSAL_S * 2.0 ** min(self.refusals - 1, 16))
            self.refused_until = now + pause

    def attach(self, stream: Stream) -> None:
        """Go on over ``stream``; an earlier one is closed."""
        if self.stream is not None:
            self.stream.close()
        self.stream = stream

    def detach(self, stream: Stream) -> None:
        """``stream`` has ended; nothing happens when it was replaced already."""
        if self.stream is stream:
            self.stream = None


@dataclass(frozen=True, slots=True)
class LogEntry:
    """A log line of a node that waits for the next flush."""

    node_id: str
    task_id: str
    level: str
    message: str
    fields: Mapping[str, str]


@dataclass
class Registry:
    """Sessions by node, and what waits to be written in a batch; ``pressing``: at once.

    ``logs`` are capped, by number and by characters: a node that talks too much loses lines, never
    memory of this process.
    """

    sessions: dict[str, LiveSession] = field(default_factory=dict)
    logs: list[LogEntry] = field(default_factory=list)
    log_characters: int = 0
    locks: WeakValueDictionary[str, asyncio.Lock] = field(default_factory=WeakValueDictionary)
    dropped_logs: int = 0
    pressing: bool = False
    _declined: set[str] = field(default_factory=set)

    MAX_LOGS = 10_000
    MAX_LOG_CHARACTERS = 1 << 20

    def joining(self, node_id: str) -> asyncio.Lock:
        """What a registration of the node holds while it lasts."""
        lock = self.locks.get(node_id)
        if lock is None:
            lock = self.locks[node_id] = asyncio.Lock()
        return lock

    def of(self, node_id: str) -> LiveSession | None:
        """The session of a node, if this process has it."""
        return self.sessions.get(node_id)

    def add(self, session: LiveSession) -> None:
        """Keep a session; the caller has ended an earlier one of the node."""
        self.sessions[session.node_id] = session

    def drop(self, session: LiveSession) -> None:
        """Forget a session, unless a newer one took its place."""
        if self.sessions.get(session.node_id) is session:
            del self.sessions[session.node_id]

    def __iter__(self) -> Iterator[LiveSession]:
        return iter(list(self.sessions.values()))

    def answered(self, session: LiveSession, accepted: bool, now: float) -> None:
        """A node has taken a task, or has refused one, at ``now`` on the process's clock."""
        session.answered(accepted, now)
        if not accepted:
            self._declined.add(session.node_id)

    def declined(self, now: float) -> frozenset[str]:
        """Nodes that have just refused a task, and are left alone for a while."""
        found = (self.sessions.get(node_id) for node_id in self._declined)
        self._declined = {s.node_id for s in found if s is not None and now < s.refused_until}
        return frozenset(self._declined)

    def log(self, entry: LogEntry) -> None:
        """Keep a log line for the next flush."""
        size = len(entry.message) + sum(len(k) + len(v) for k, v in entry.fields.items())
        fits = self.log_characters + size <= self.MAX_LOG_CHARACTERS
        if len(self.logs) < self.MAX_LOGS and fits:
            self.logs.append(entry)
            self.log_characters += size
        else:
            self.dropped_logs += 1

    def put_back(self, entries: Iterable[LogEntry]) -> None:
        """Keep lines that could not be written, as far as there is room."""
        later, self.logs, self.log_characters = self.logs, [], 0
        for entry in (*entries, *later):
            self.log(entry)

    def take_logs(self) -> list[LogEntry]:
        """The log lines that wait, and how many were lost, if any."""
        taken, self.logs, self.log_characters = self.logs, [], 0
        if self.dropped_logs:
            lost = f"{self.dropped_logs} log lines were dropped: the nodes sent too many"
            taken.append(LogEntry("", "", "warning", lost, {}))
            self.dropped_logs = 0
        return taken

    def progress_of(self, task_id: str, node_id: str, attempt: int) -> Progress | None:
        """The latest progress of an attempt, if it was reported to this process."""
        session = self.sessions.get(node_id)
        found = session.progress.get(task_id) if session else None
        return found if found is not None and found.attempt == attempt else None


def assign_message(body: pb.TaskAssign) -> pb.OrchestratorMessage:
    """An envelope with a task."""
    return pb.OrchestratorMessage(task_assign=body)


def stop_message(task_id: str, reason: str) -> pb.OrchestratorMessage:
    """An envelope that stops a task."""
    return pb.OrchestratorMessage(
        control=pb.ControlMessage(action="cancel", task_id=task_id, reason=reason)
    )


def order_message(order: Intent, reason: str) -> pb.OrchestratorMessage:
    """An envelope that tells a node what the operator wants of it."""
    action = {Intent.CONTRIBUTE: "resume", Intent.PAUSE: "pause", Intent.DRAIN: "drain"}[order]
    return pb.OrchestratorMessage(control=pb.ControlMessage(action=action, reason=reason))


def finish_message(task_id: str, within_s: float, reason: str) -> pb.OrchestratorMessage:
    """An envelope that asks for what can be done of a task within ``within_s`` seconds."""
    return pb.OrchestratorMessage(
        control=pb.ControlMessage(
            action="finish", task_id=task_id, within_s=within_s, reason=reason
        )
    )


def ack_message(
    task_id: str, attempt: int, code: str = "", reason: str = ""
) -> pb.OrchestratorMessage:
    """An envelope that says whether a result counted (no code: it did)."""
    return pb.OrchestratorMessage(
        task_result_ack=pb.TaskResultAck(
            task_id=task_id, attempt=attempt, counted=not code, code=code, reason=reason
        )
    )
