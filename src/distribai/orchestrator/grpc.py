"""The nodes' stream: ``NodeService.Session``.

::

    Challenge  -->
               <--  RegisterSession
    RegisterAck -->          or SessionEnd
               <-->          numbered messages, until either side ends the stream

Who a node is was proved at the start of its stream, by its key and, where the grid asks for them,
by its certificate (``fleet.certification``); nothing that a message says can change it. A stream
that breaks takes nothing with it: the session stays, and what was not acknowledged is sent again
when the same daemon comes back.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from itertools import islice
from typing import Any

import structlog

from distribai.core.states import Intent
from distribai.core.text import MAX_REASON, clean
from distribai.errors import DistribAIError, NotAllowed, ProtocolMismatch, TooMany
from distribai.orchestrator.context import Grid
from distribai.orchestrator.fleet.liveness import goodbye, release_node
from distribai.orchestrator.fleet.registration import read_intent, read_intent_reason, register
from distribai.orchestrator.fleet.registry import LiveSession, LogEntry, Stream, ack_message
from distribai.orchestrator.limits import SLOWED, too_many
from distribai.orchestrator.rounds import tasks
from distribai.orchestrator.rounds.results import take_result
from distribai.wire.checks import MAX_NAME, check_id
from distribai.wire.convert import (
    accept_from_wire,
    held_versions_from_wire,
    in_hand_from_wire,
    outcome_from_wire,
    progress_from_wire,
)
from distribai.wire.endings import end_of
from distribai.wire.machines import machine_from_wire
from distribai.wire.v1 import distribai_pb2 as pb
from distribai.wire.v1.distribai_pb2_grpc import NodeServiceServicer
from distribai.wire.versions import PROTOCOL, PROTOCOL_MIN

log = structlog.get_logger(__name__)

NONCE_BYTES = 32

REGISTER_S = 30.0
"""Seconds in which a node must answer the challenge."""

MAX_LOG_CHARACTERS = 4000
MAX_FIELDS, MAX_FIELD = 20, 4000
"""Fields of a log line, and characters of each, that are kept."""

LEVELS = frozenset({"debug", "info", "warning", "error"})

FINAL_CODES = frozenset(
    {
        "protocol.version",
        "node.key",
        "node.invite",
        "node.fenced",
        "node.banned",
        "auth.forbidden",
    }
)
"""Ends of a session after which connecting again cannot help."""

Incoming = AsyncIterator[pb.NodeMessage]


class NodeService(NodeServiceServicer):
    """The gRPC service over one grid."""

    def __init__(self, grid: Grid) -> None:
        self._grid = grid

    async def Session(  # noqa: N802  # the name is the contract's
        self, request_iterator: Incoming, context: Any
    ) -> AsyncIterator[pb.OrchestratorMessage]:
        """One node's stream, from its challenge to its end."""
        # TLS has asked for it, where the grid does.
        shown = b"".join(context.auth_context().get("x509_pem_cert", ()))
        async for message in serve(self._grid, request_iterator, context.peer(), shown):
            yield message


async def serve(
    grid: Grid, incoming: Incoming, peer: str = "", shown: bytes = b""
) -> AsyncIterator[pb.OrchestratorMessage]:
    """One stream: messages out for messages in. ``peer`` is gRPC's name of the other side; empty
    for this machine. ``shown`` is its certificate (PEM); empty: it has shown none."""
    try:
        grid.limits.join(peer)
    except TooMany as problem:
        yield _end(problem)
        return
    nonce, challenged_at = grid.entropy(NONCE_BYTES), grid.clock()
    yield pb.OrchestratorMessage(
        challenge=pb.Challenge(
            nonce=nonce, grid_id=grid.grid_id, protocol_min=PROTOCOL_MIN, protocol_max=PROTOCOL
        )
    )
    try:
        message = await asyncio.wait_for(anext(incoming), REGISTER_S)
        if message.WhichOneof("body") != "register":
            raise ProtocolMismatch(
                "protocol.malformed", "The first message of a stream must be RegisterSession."
            )
        registered = await register(grid, message.register, nonce, challenged_at, shown)
    except (StopAsyncIteration, TimeoutError):
        return
    except DistribAIError as problem:
        log.info("node.refused", code=problem.code, message=problem.message)
        yield _end(problem)
        return
    session = registered.session
    stream = Stream()
    # The stream has a task of its own: what is bound here is on every line that it logs.
    structlog.contextvars.bind_contextvars(session=session.id, node=session.node_id)
    log.info("session.open", name=session.name, resumed=registered.ack.resumed)
    session.attach(stream)
    stream.put(pb.OrchestratorMessage(ack=session.channel.received, register_ack=registered.ack))
    # Also what was sent to a new session before it had a stream.
    for seq, body in session.channel.unacked():
        stream.put(session.envelope(seq, body))
    reader = asyncio.create_task(_read(grid, session, stream, incoming))
    try:
        while (out := await stream.queue.get()) is not None:
            yield out
    finally:
        stream.close()
        session.detach(stream)
        reader.cancel()
        (ended,) = await asyncio.gather(reader, return_exceptions=True)
        log.debug("stream.closed", intent=session.intent.value)
    if isinstance(ended, Exception):
        raise ended  # a defect: it must show
    drained = session.intent is Intent.DRAIN and not session.in_hand
    if drained and session.stream is None and grid.fleet.of(session.node_id) is session:
        await goodbye(grid, session)


def _end(problem: DistribAIError) -> pb.OrchestratorMessage:
    return pb.OrchestratorMessage(
        session_end=end_of(problem, retry=problem.code not in FINAL_CODES)
    )


async def _read(grid: Grid, session: LiveSession, stream: Stream, incoming: Incoming) -> None:
    """Take in a stream's messages until it ends; then end the other direction as well."""
    try:
        async for message in incoming:
            await _pace(grid, session)
            if stream.closed:
                return
            if session.channel.judge(message.seq, message.ack) == "duplicate":
                continue
            session.heard = True
            await _take(grid, session, message)
            # Not before: a stream that breaks in between would take the message with it.
            session.channel.dealt_with(message.seq)
    except DistribAIError as problem:
        log.warning("node.stream", code=problem.code, message=str(problem))
        stream.close(end_of(problem, retry=problem.code not in FINAL_CODES))
        # Its numbers no longer fit: the next connection begins a new session.
        grid.fleet.drop(session)
    finally:
        stream.close()


async def _pace(grid: Grid, session: LiveSession) -> None:
    """Let a node that sends too much wait: its stream is not read meanwhile, so that it cannot
    send.

    Raises:
        TooMany: ``limit.rate``: it goes on and on.
    """
    limits = grid.limits
    if not (wait := limits.message(session.node_id)):
        session.slowed = 0
        return
    session.slowed += 1
    if session.slowed == 1:
        log.info("node.slowed", limit=limits.messages.rate.per_s)
    if session.slowed > SLOWED:
        raise too_many(f"node {session.node_id}", limits.messages.rate, wait)
    while wait:
        await grid.sleep(wait)
        wait = limits.message(session.node_id)


async def _take(grid: Grid, session: LiveSession, message: pb.NodeMessage) -> None:
    """One new message.

    Raises:
        ProtocolMismatch: ``protocol.malformed``.
    """
    kind = message.WhichOneof("body")
    if kind == "heartbeat":
        await _heartbeat(grid, session, message.heartbeat)
    elif kind == "task_progress":
        progress = progress_from_wire(message.task_progress)
        if session.assigned.get(progress.task_id) == progress.attempt:
            session.progress[progress.task_id] = progress
    elif kind == "task_result":
        await _result(grid, session, message.task_result)
    elif kind == "task_accept":
        await _accept(grid, session, message.task_accept)
    elif kind == "log":
        grid.fleet.log(_log_entry(session, message.log))
    else:
        raise ProtocolMismatch("protocol.malformed", f"A stream brings {kind or 'nothing'} twice.")


def _log_entry(session: LiveSession, line: pb.LogMessage) -> LogEntry:
    if line.task_id:
        check_id(line.task_id, "LogMessage.task_id")
    level = line.level if line.level in LEVELS else "info"
    fields = {
        clean(name, MAX_NAME, lines=False): clean(value, MAX_FIELD)
        for name, value in islice(line.fields.items(), MAX_FIELDS)
    }
    message = clean(line.message, MAX_LOG_CHARACTERS)
    return LogEntry(session.node_id, line.task_id, level, message, fields)


async def _heartbeat(grid: Grid, session: LiveSession, beat: pb.Heartbeat) -> None:
    intent = read_intent(beat.intent)
    session.in_hand = {t.task_id: t.attempt for t in in_hand_from_wire(beat.tasks)}
    session.bytes_up, session.bytes_down = beat.bytes_up, beat.bytes_down
    if session.counted_before:
        # What the daemon moved before this session was counted in an earlier one.
        session.flushed_up, session.flushed_down = beat.bytes_up, beat.bytes_down
        session.counted_before = False
    held_versions = held_versions_from_wire(beat.held_versions)
    if held_versions != session.held_versions:
        session.held_versions = held_versions
        grid.news.look_at(session.node_id)
    if beat.HasField("machine"):
        session.machine = machine_from_wire(beat.machine)
    changed, session.intent = intent is not session.intent, intent
    session.intent_reason = read_intent_reason(beat.intent_reason)
    session.send(
        pb.OrchestratorMessage(
            heartbeat_ack=pb.HeartbeatAck(next_s=grid.settings.liveness.heartbeat_s)
        )
    )
    if changed:
        grid.fleet.pressing = True
        grid.wake.set()
    stopped = session.stopping - session.in_hand.keys()
    if stopped & session.assigned.keys():
        # It has let go of what it was told to stop: its device is free before the lease ends.
        keep = frozenset(session.assigned) - stopped
        await release_node(
            grid, session.node_id, "its node has stopped", keep=keep, code=tasks.LET_GO
        )
    if changed and intent is Intent.DRAIN:
        # It finishes what it names; what was on its way to it can go to others at once.
        keep = frozenset(session.in_hand)
        await release_node(grid, session.node_id, "its node drains", keep=keep, code=tasks.LET_GO)


async def _accept(grid: Grid, session: LiveSession, accept: pb.TaskAccept) -> None:
    """A node may refuse a task that it cannot run; others get it."""
    task_id, attempt = accept_from_wire(accept)
    if session.assigned.get(task_id) != attempt:
        return
    grid.fleet.answered(session, accept.accepted, grid.clock())
    if accept.accepted:
        session.in_hand[task_id] = attempt
    else:
        reason = clean(accept.reason, MAX_REASON) or "no reason given"
        await release_node(
            grid,
            session.node_id,
            f"its node would not take it: {reason}",
            keep=frozenset(session.assigned) - {task_id},
            code=tasks.DECLINED,
        )


async def _result(grid: Grid, session: LiveSession, message: pb.TaskResult) -> None:
    outcome, signature = outcome_from_wire(message)
    session.ended(outcome.task_id, outcome.attempt)
    try:
        answer = await take_result(grid, session.node_id, session.public_key, outcome, signature)
    except NotAllowed as problem:
        session.send(ack_message(outcome.task_id, outcome.attempt, problem.code, problem.message))
        return
    if answer.wait:
        session.assigned[outcome.task_id] = outcome.attempt  # it is answered once it is judged
        return
    if session.assigned.get(outcome.task_id) == outcome.attempt:
        session.assigned.pop(outcome.task_id, None)
    session.in_hand.pop(outcome.task_id, None)
    session.send(ack_message(outcome.task_id, outcome.attempt, answer.code, answer.reason))
