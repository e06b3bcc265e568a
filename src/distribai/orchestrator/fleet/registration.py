"""Letting a node in: its key, its invite, its session, the tasks in its hands."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass

from distribai.core.devices import Device, Machine, TaskInHand
from distribai.core.ids import node_id as id_of_key
from distribai.core.plain import to_plain
from distribai.core.states import (
    JOB,
    TASK,
    Intent,
    Liveness,
    Standing,
    TaskState,
    check,
    is_terminal,
)
from distribai.core.text import MAX_REASON, clean
from distribai.errors import NotAllowed, ProtocolMismatch, Unavailable
from distribai.orchestrator import events
from distribai.orchestrator.certificates import check_shown, utc
from distribai.orchestrator.context import Grid
from distribai.orchestrator.fleet import passes
from distribai.orchestrator.fleet.liveness import fenced, release_node
from distribai.orchestrator.fleet.registry import LiveSession
from distribai.orchestrator.fleet.tokens import SESSION_BYTES, barred
from distribai.orchestrator.rounds import tasks
from distribai.orchestrator.rounds.late import destination, may_come_back
from distribai.orchestrator.secrets import hash_secret, new_secret
from distribai.store import leases
from distribai.store.engine import AnyRow, Tx
from distribai.store.statements import facts, fleet, invites, jobs, sessions, work
from distribai.wire.checks import MAX_NAME, MAX_NAMES, check_id, malformed
from distribai.wire.convert import devices_from_wire, in_hand_from_wire
from distribai.wire.machines import machine_from_wire
from distribai.wire.signing import verify_register
from distribai.wire.v1 import distribai_pb2 as pb
from distribai.wire.versions import negotiate

MODE, TRUSTED, OPEN = "mode", "trusted", "open"
"""The fact of the grid that says whose nodes it takes, and its values: the operator's,
strangers'."""

MAX_BLOBS = 1000
MAX_DEVICES = 64


@dataclass(frozen=True, slots=True)
class Registered:
    """A session that may go on, and what to tell its node first."""

    session: LiveSession
    ack: pb.RegisterAck


async def register(
    grid: Grid,
    message: pb.RegisterSession,
    nonce: bytes,
    challenged_at: float,
    shown: bytes = b"",
) -> Registered:
    """Check a registration and open a session, or go on with one. ``challenged_at``, on the
    process's clock, is when its node was sent the ``nonce``. ``shown`` is the certificate of
    its stream (PEM); empty: there was none.

    Raises:
        Unavailable: ``grid.database``; ``grid.unreachable``: it took so long that the node has
            registered elsewhere meanwhile.
        ProtocolMismatch: ``protocol.version``, or ``protocol.malformed``.
        NotAllowed: ``node.key``: not the key's signature; ``node.certificate``: the grid asks for
            one, and this is another node's, or not good; ``node.invite``: an unknown key without a
            valid invite; ``node.quarantined`` or ``node.banned``.
    """
    protocol = negotiate(message.protocol, message.protocol)
    key = bytes(message.public_key)
    verify_register(key, bytes(message.signature), grid.grid_id, nonce)
    node_id = id_of_key(key)
    devices = devices_from_wire(message.devices)
    if not devices or len(devices) > MAX_DEVICES:
        raise ProtocolMismatch(
            "protocol.malformed", f"A node has 1 to {MAX_DEVICES} devices, not {len(devices)}."
        )
    intent = read_intent(message.intent)
    in_hand = in_hand_from_wire(message.tasks)
    machine = machine_from_wire(message.machine) if message.HasField("machine") else None
    # Two streams of one key at once would each believe that the other is the older one.
    async with grid.fleet.joining(node_id):
        session, token, resumed, held = await _enter(
            grid,
            node_id,
            key,
            message,
            devices,
            machine,
            intent,
            in_hand,
            protocol,
            challenged_at,
            shown,
        )
    session.heard = True
    session.intent_reason = read_intent_reason(message.intent_reason)
    session.flushed_wants = session.wants
    session.in_hand = dict(held)
    session.blobs = frozenset(list(message.blobs)[:MAX_BLOBS])
    grid.news.look_at(node_id)
    grid.wake.set()
    keep = [t for t in in_hand if (t.task_id, t.attempt) in held]
    drop = [t for t in in_hand if (t.task_id, t.attempt) not in held]
    ack = pb.RegisterAck(
        protocol=protocol,
        node_id=node_id,
        session_id=session.id,
        session_token=token,
        resumed=resumed,
        received=session.channel.received,
        heartbeat_s=grid.settings.liveness.heartbeat_s,
        keep=_hands(keep),
        drop=_hands(drop),
        ended=await _ended(grid, message.jobs),
    )
    return Registered(session, ack)


async def _enter(
    grid: Grid,
    node_id: str,
    key: bytes,
    message: pb.RegisterSession,
    devices: tuple[Device, ...],
    machine: Machine | None,
    intent: Intent,
    in_hand: Iterable[TaskInHand],
    protocol: int,
    challenged_at: float,
    shown: bytes,
) -> tuple[LiveSession, str, bool, set[tuple[str, int]]]:
    """The session, its token, whether it goes on, and the attempts that the node keeps."""
    old = grid.fleet.of(node_id)
    resumed = old is not None and message.resume_session == old.id
    if resumed:
        # Refuses claims that do not fit; the node then begins a new session.
        try:
            assert old is not None
            old.channel.resume(message.received)
        except ProtocolMismatch:
            resumed = False
    expires = protocol >= passes.FIRST_PROTOCOL
    if expires:
        await passes.ready(grid)
    session_id = old.id if resumed and old is not None else grid.new_id("ses")
    async with grid.db.write() as tx:
        if grid.authority is not None:
            check_shown(grid.authority, shown, node_id, utc(tx.now))
        began = tx.now - (grid.clock() - challenged_at)
        await _admit(tx, node_id, key, message, devices, machine, intent)
        if await sessions.registered_since(tx, node_id, began):
            # A process that was frozen, or waited for the database, must not end the session that
            # its node has begun at another one: the node would take that for a second daemon.
            raise Unavailable(
                "grid.unreachable", "This registration took so long that a newer one came first."
            )
        if resumed and session_id not in await sessions.open_sessions(tx, [session_id]):
            # Another replica has taken it over, or the node counted as gone meanwhile.
            resumed, session_id = False, grid.new_id("ses")
        token, until = (
            passes.issue(grid, node_id, session_id, tx.now)
            if expires
            else (new_secret("dns_", grid.entropy, SESSION_BYTES), math.inf)
        )
        if resumed:
            await sessions.renew_session(tx, session_id, hash_secret(token))
        else:
            await sessions.open_session(tx, session_id, node_id, hash_secret(token), grid.holder)
        held = await _sort_out(grid, tx, node_id, in_hand)
        leased = await work.tasks_in(tx, (TaskState.LEASED,), node_id=node_id)
    if resumed and old is not None:
        session = old
        session.devices, session.intent = devices, intent
        # While the transaction waited its silence may have been noticed, and it was forgotten.
        grid.fleet.add(session)
    else:
        session = LiveSession(session_id, node_id, key, _name(message.name), devices, intent)
        # A daemon that had a session before has told of its bytes in it.
        session.counted_before = bool(message.resume_session)
        _replace(grid, session)
        # What a node does not present is lost with its daemon: others can do it at once.
        session.assigned = dict(held)
        keep = frozenset(session.assigned)
        if any(task.id not in keep for task in leased):
            why = "its node came back without it"
            await release_node(grid, node_id, why, keep=keep, code=tasks.LET_GO, back=True)
    session.protocol, session.token_until = protocol, until
    return session, token, resumed, held


async def _ended(grid: Grid, named: Iterable[str]) -> list[str]:
    """Of the jobs of which a node keeps something those that have ended, or that nobody knows."""
    wanted = sorted({check_id(job_id, "RegisterSession.jobs") for job_id in named})
    if len(wanted) > MAX_NAMES:
        malformed(f"a node keeps something of {len(wanted)} jobs")
    if not wanted:
        return []
    async with grid.db.read() as tx:
        found = await jobs.states(tx, wanted)
    return [job_id for job_id in wanted if job_id not in found or is_terminal(JOB, found[job_id])]


def read_intent(text: str) -> Intent:
    """What the contributor wants; nothing said means to contribute.

    Raises:
        ProtocolMismatch: ``protocol.malformed``.
    """
    try:
        return Intent(text or Intent.CONTRIBUTE)
    except ValueError as problem:
        raise ProtocolMismatch(
            "protocol.malformed", f"A node's intent is {text[:40]!r}."
        ) from problem


def read_intent_reason(text: str) -> str:
    """Why a node takes no tasks, as it says itself; cleaned, for people to read."""
    return clean(text, MAX_REASON, lines=False)


def _name(text: str) -> str:
    return clean(text, MAX_NAME, lines=False)


def _hands(tasks: Iterable[TaskInHand]) -> list[pb.TaskInHand]:
    return [pb.TaskInHand(task_id=t.task_id, attempt=t.attempt, device=t.device) for t in tasks]


def _replace(grid: Grid, session: LiveSession) -> None:
    """Put a new session in the place of an older one of the same key, which is told so."""
    old = grid.fleet.of(session.node_id)
    if old is not None and old.stream is not None:
        old.stream.close(fenced())
    grid.fleet.add(session)


async def _admit(
    tx: Tx,
    node_id: str,
    key: bytes,
    message: pb.RegisterSession,
    devices: tuple[Device, ...],
    machine: Machine | None,
    intent: Intent,
) -> None:
    node = await fleet.lock_node(tx, node_id)
    if node is None:
        invite = await invites.use_invite(tx, hash_secret(message.invite))
        if invite is None:
            raise not_invited()
        await fleet.add_node(
            tx,
            id=node_id,
            public_key=key,
            name=_name(message.name),
            liveness=Liveness.ONLINE.value,
            standing=await _first_standing(tx, invite),
            intent=intent.value,
            intent_reason=read_intent_reason(message.intent_reason),
            software=_name(message.software),
            devices=to_plain(devices),
            machine=to_plain(machine),
            invite_id=invite.id,
            account_id=invite.account_id,
            joined_at=tx.now,
            last_heard_at=tx.now,
        )
        await events.record(
            tx,
            "node.joined",
            node_id=node_id,
            data={"name": _name(message.name), "account": invite.account_id},
        )
        return
    if (refusal := barred(node)) is not None:
        raise refusal
    await fleet.change_node(
        tx,
        node_id,
        name=_name(message.name),
        liveness=Liveness.ONLINE.value,
        intent=intent.value,
        intent_reason=read_intent_reason(message.intent_reason),
        software=_name(message.software),
        devices=to_plain(devices),
        machine=to_plain(machine),
        last_heard_at=tx.now,
    )
    if node.liveness != Liveness.ONLINE:
        await events.record(tx, "node.online", node_id=node_id)
    elif (node.intent, node.devices, node.machine) != (
        intent.value,
        to_plain(devices),
        to_plain(machine),
    ):
        wants = {"intent": intent.value}
        await events.record(tx, "node.intends", node_id=node_id, data=wants)


async def _first_standing(tx: Tx, invite: AnyRow) -> str:
    """As the invite says; where it says nothing, a stranger of an open grid begins on probation."""
    trusted = invite.trusted
    if trusted is None:
        trusted = await facts.get(tx, MODE) != OPEN
    return (Standing.TRUSTED if trusted else Standing.PROBATION).value


def not_invited() -> NotAllowed:
    """A stranger whose invite lets nobody in."""
    return NotAllowed(
        "node.invite",
        "This key is new to the grid, and the join link's invite is unknown, used up or expired.",
        "Ask the operator for a fresh join link.",
    )


async def _take_up_again(
    grid: Grid, tx: Tx, node_id: str, presented: Iterable[tuple[str, int]]
) -> None:
    """Give a node back what it lost by being away, as long as nobody else has taken it."""
    wanted = dict(presented)
    for row in await work.tasks_by_id(tx, wanted.keys()):
        if not may_come_back(row) or row.attempt != wanted[row.id]:
            continue
        if row.phase == "train" and not (await destination(tx, row)).exists:
            continue
        check(TASK, TaskState.QUEUED, TaskState.LEASED, f"Task {row.id}")
        again = await leases.take_up_again(
            tx, row.id, node_id, row.attempt, grid.settings.liveness.offline_s
        )
        if again is not None:
            await tasks.record_leases(tx, [again])


async def _sort_out(
    grid: Grid, tx: Tx, node_id: str, in_hand: Iterable[TaskInHand]
) -> set[tuple[str, int]]:
    """Which of the tasks in hand the node keeps: the leased ones, and finished ones whose report
    waits for its answer. Leases are prolonged."""
    presented = [(t.task_id, t.attempt) for t in in_hand]
    await _take_up_again(grid, tx, node_id, presented)
    held = [(node_id, *pair) for pair in presented]
    kept = await leases.extend_leases(tx, held, grid.settings.liveness.offline_s)
    for row in await work.tasks_by_id(tx, {task_id for task_id, _ in presented}):
        pair = (row.id, row.attempt)
        reported = row.state in (TaskState.SUBMITTED, TaskState.VERIFYING, TaskState.ACCEPTED)
        if reported and row.node_id == node_id and pair in presented:
            kept.add(pair)
    return kept
