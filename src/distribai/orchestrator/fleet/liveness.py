"""Who is here: what was heard goes to the database in batches, and silence is noticed there.

Heartbeats prolong the leases of the tasks that they name. A node that has been silent for
``degraded_s`` gets no new work; after ``offline_s`` it counts as gone and its leases die. A node
that says goodbye, or wants to drain, is taken at its word at once.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

import structlog

from distribai.core.plain import to_plain
from distribai.core.states import Intent, Liveness, TaskState
from distribai.errors import NotAllowed, Unavailable
from distribai.orchestrator import events, traffic
from distribai.orchestrator.context import Grid
from distribai.orchestrator.fleet import passes
from distribai.orchestrator.fleet.registry import LiveSession, LogEntry
from distribai.orchestrator.fleet.tokens import barred
from distribai.orchestrator.rounds import results, tasks
from distribai.store import leases
from distribai.store.engine import AnyRow, Tx
from distribai.store.outbox import Change
from distribai.store.statements import fleet, jobs, records, sessions, work
from distribai.wire.endings import end_of
from distribai.wire.v1 import distribai_pb2 as pb

log = structlog.get_logger(__name__)

AFTERWARDS_S = 60.0
"""Seconds for which lines about a task that has ended are still its node's to write."""

LEADER = "control"
"""The duty whose holder notices silence."""

MAX_MOVED = 2**40
"""Bytes that a node may say it moved between two flushes, about a second: a sum of such claims
never grows beyond its column."""


async def flush(grid: Grid) -> None:
    """Write what was heard since the last time: nodes, leases, progress, logs, bytes.

    Raises:
        Unavailable: the database is away; everything is kept for the next time.
    """
    grid.fleet.pressing = False
    heard = [s for s in grid.fleet if s.heard]
    counted = traffic.take(grid)
    logs = grid.fleet.take_logs()
    if not heard and not counted and not logs:
        return
    moved = {s.node_id: (s.bytes_up, s.bytes_down) for s in heard}
    measured = {s.node_id: s.machine for s in heard}
    wanted = {s.node_id: s.wants for s in heard}
    for session in heard:
        session.heard = False
    try:
        async with grid.db.write() as tx:
            news = await _write_heard(grid, tx, heard, moved)
            await _write_logs(tx, logs)
            sums = await traffic.write(tx, counted)
            nodes = await fleet.barred_nodes(tx, [s.node_id for s in heard])
            ended = await sessions.ended_sessions(tx, [s.id for s in heard])
            now = tx.now
    except Unavailable:
        for session in heard:
            session.heard = True
        traffic.put_back(grid, counted)
        grid.fleet.put_back(logs)
        raise
    grid.metrics.moved(sums)
    for session in heard:
        session.flushed_up, session.flushed_down = moved[session.node_id]
        session.flushed_wants = wanted[session.node_id]
        if session.machine is measured[session.node_id]:
            session.machine = None
    bar(grid, nodes)
    _fence(grid, heard, ended)
    await passes.renew(grid, now)
    if news:
        grid.wake.set()


async def _write_heard(
    grid: Grid, tx: Tx, heard: Sequence[LiveSession], moved: Mapping[str, tuple[int, int]]
) -> bool:
    """Write heartbeats and progress; whether any said something new of its node."""
    await fleet.heard(tx, [_heard_row(s, *moved[s.node_id]) for s in heard])
    await leases.lock_tasks(tx, {task_id for s in heard for task_id in (*s.in_hand, *s.progress)})
    held = [(s.node_id, *task) for s in heard for task in s.in_hand.items()]
    await leases.extend_leases(tx, held, grid.settings.liveness.offline_s)
    await leases.write_progress(tx, [r for s in heard for r in _reports(s)])
    told = [
        Change("node.online", node_id=row.id)
        for row in await fleet.set_online(tx, [s.node_id for s in heard])
    ]
    for session in heard:
        if session.machine is not None:
            await fleet.change_node(tx, session.node_id, machine=to_plain(session.machine))
            told.append(Change("node.measured", node_id=session.node_id))
        if session.wants != session.flushed_wants:
            intent, reason = session.wants
            await fleet.change_node(tx, session.node_id, intent=intent.value, intent_reason=reason)
            wants = {"intent": intent.value, "reason": reason}
            told.append(Change("node.intends", node_id=session.node_id, data=wants))
    await events.record_all(tx, told)
    return bool(told)


def _heard_row(session: LiveSession, up: int, down: int) -> dict[str, object]:
    # A daemon that was restarted counts from 0 again.
    more_up = up - session.flushed_up if up >= session.flushed_up else up
    more_down = down - session.flushed_down if down >= session.flushed_down else down
    return {
        "node_id": session.node_id,
        "up": min(more_up, MAX_MOVED),
        "down": min(more_down, MAX_MOVED),
    }


async def _write_logs(tx: Tx, logs: Sequence[LogEntry]) -> None:
    """Write nodes' lines, each to the job of the task that it names. A line about a task that its
    node never had, or that ended more than :data:`AFTERWARDS_S` ago, is nobody's: who knows a
    task's id must not write into the job of it."""
    known = {t.id: t for t in await work.tasks_by_id(tx, {e.task_id for e in logs if e.task_id})}
    rows, foreign = [], set()
    for e in logs:
        task = known.get(e.task_id)
        if e.task_id and (task is None or not _may_tell(e.node_id, task, tx.now)):
            foreign.add(e.node_id)
            continue
        rows.append(
            {
                "level": e.level,
                "message": e.message,
                "job_id": "" if task is None else task.job_id,
                "task_id": e.task_id,
                "node_id": e.node_id,
                "fields": dict(e.fields),
            }
        )
    for node_id in sorted(foreign):
        log.info("node.log.dropped", node=node_id, why="it names a task that the node has not")
    await records.add_logs(tx, rows)


def _may_tell(node_id: str, task: AnyRow, now: float) -> bool:
    """Whether a line of the node's about the task is worth keeping: it is leased to this node, or
    was. Lines come behind results, so those that say why an attempt has failed may find the task
    ended, or with another node."""
    if task.ended_at is not None and now - task.ended_at > AFTERWARDS_S:
        return False
    return task.node_id == node_id or any(c["node_id"] == node_id for c in task.causes)


def _reports(session: LiveSession) -> Iterator[dict[str, object]]:
    """What a node has told of its progress, as ``leases.write_progress`` takes it."""
    for progress in session.progress.values():
        yield {
            "task": progress.task_id,
            "node": session.node_id,
            "under": progress.attempt,
            "report": {
                "step": progress.step,
                # JSON has no NaN; a loss that is none says as much.
                "loss": progress.loss if progress.loss == progress.loss else None,
                "tokens_per_s": progress.tokens_per_s,
            },
        }


def bar(grid: Grid, nodes: Sequence[AnyRow]) -> None:
    """End this process's sessions of nodes whose standing no longer allows one."""
    for node in nodes:
        session, error = grid.fleet.of(node.id), barred(node)
        if error is not None and session is not None:
            if session.stream is not None:
                # Who is quarantined may come back without anybody walking to the machine.
                session.stream.close(end_of(error, retry=error.code != "node.banned"))
            grid.fleet.drop(session)


def _fence(grid: Grid, live: Sequence[LiveSession], ended: set[str]) -> None:
    """End sessions that a newer one of the same key, at another replica, has taken over."""
    for session in live:
        if session.id in ended and grid.fleet.of(session.node_id) is session:
            if session.stream is not None:
                session.stream.close(fenced())
            grid.fleet.drop(session)


def fenced() -> pb.SessionEnd:
    """What an older session of a key is told: two daemons must not share one key."""
    return end_of(
        NotAllowed(
            "node.fenced",
            "A newer session of this node's key has taken over.",
            "Give each daemon a state directory of its own.",
        ),
        retry=False,
    )


async def sweep(grid: Grid) -> bool:
    """Notice silence: nodes become degraded or offline, leases die; whether anything changed.

    A silent node's leases end by themselves, ``offline_s`` after the last heartbeat that named
    them, and not before the grace after a start is over.
    """
    liveness = grid.settings.liveness
    async with grid.db.read() as tx:
        silent_ids = await fleet.silent_since(tx, tx.now - liveness.degraded_s)
        if not silent_ids and not await leases.expired_tasks(tx):
            return False
    async with grid.db.write() as tx:
        gone = await fleet.set_liveness(
            tx,
            (Liveness.ONLINE, Liveness.DEGRADED),
            Liveness.OFFLINE,
            tx.now - liveness.offline_s,
        )
        silent = await fleet.set_liveness(
            tx, (Liveness.ONLINE,), Liveness.DEGRADED, tx.now - liveness.degraded_s
        )
        for row in gone:
            await _liveness_event(tx, row.id, Liveness.OFFLINE)
        for row in silent:
            await _liveness_event(tx, row.id, Liveness.DEGRADED)
        expired = await leases.expired_tasks(tx)
    for row in gone:
        _forget(grid, row.id)
    for task in expired:
        late = task.deadline_at is not None and task.lease_until >= task.deadline_at
        why = "it took longer than its hard deadline" if late else "its node fell silent"
        code = tasks.LET_GO if late else tasks.LOST
        await _release(grid, task, why, expired=True, code=code)
    return bool(gone or silent or expired)


def _forget(grid: Grid, node_id: str) -> None:
    """Drop the session of a silent node: when it comes back it begins a new one."""
    session = grid.fleet.of(node_id)
    if session is not None:
        if session.stream is not None:
            session.stream.close()
        grid.fleet.drop(session)


async def release_node(
    grid: Grid,
    node_id: str,
    why: str,
    keep: frozenset[str] = frozenset(),
    *,
    code: str,
    back: bool = False,
) -> None:
    """Take all leased tasks of a node back, but those in ``keep``; ``code`` is the cause that is
    noted with each. ``back``: it is there, and only has them not."""
    async with grid.db.read() as tx:
        held = await work.tasks_in(tx, (TaskState.LEASED,), node_id=node_id)
    for task in held:
        if task.id not in keep:
            await _release(grid, task, why, code=code, back=back)


async def _release(
    grid: Grid, task: AnyRow, why: str, *, code: str, expired: bool = False, back: bool = False
) -> None:
    async with grid.db.write() as tx:
        await jobs.hold(tx, task.job_id)
        current = await work.get_task(tx, task.id)
        assert current is not None, "tasks are never deleted"
        if current.state != TaskState.LEASED or current.attempt != task.attempt:
            return
        if expired and current.lease_until > tx.now:
            return  # another replica has heard of it meanwhile
        await results.lose_lease(tx, current, why, code, back=back)
    grid.wake.set()


async def goodbye(grid: Grid, session: LiveSession) -> None:
    """A node that was draining has closed its stream: it is gone, without waiting for silence.
    Unless it has been started again and is in a newer session, at another replica, by now."""
    grid.fleet.drop(session)
    async with grid.db.write() as tx:
        await fleet.lock_node(tx, session.node_id)
        if not await sessions.end_session(tx, session.id):
            return
        await fleet.change_node(
            tx,
            session.node_id,
            liveness=Liveness.OFFLINE.value,
            intent=Intent.DRAIN.value,
            intent_reason="",
            # An order to leave has been obeyed: started again it is welcome.
            ordered=Intent.CONTRIBUTE.value,
        )
        await _liveness_event(tx, session.node_id, Liveness.OFFLINE)
    await release_node(grid, session.node_id, "its node has left", code=tasks.LET_GO)


async def after_start(grid: Grid) -> None:
    """This process begins. Unless another one leads, the nodes are on their way back: see
    :func:`wait_for_nodes`."""
    async with grid.db.write() as tx:
        grid.started_at = tx.now
        if grid.db.dialect == "sqlite":
            # The file's lock is ours, so whoever held a duty or a stream is dead: neither wait for
            # its leases nor lease anything to nodes that have not come back.
            await leases.drop_duties(tx, None)
            await sessions.end_sessions(tx, None)
        if await leases.duty_holder(tx, LEADER) is None:
            await wait_for_nodes(grid, tx)


async def wait_for_nodes(grid: Grid, tx: Tx) -> None:
    """Nobody looked after the nodes for a while: every one that was not given up counts as heard
    now, and for ``startup_grace_s`` no lease expires and no round merges without the nodes that
    were at work in it."""
    liveness = grid.settings.liveness
    await fleet.hear_all(tx)
    await leases.grant_grace(tx, liveness.startup_grace_s, liveness.task_deadline_s)
    grid.not_before = tx.now + liveness.startup_grace_s


async def _liveness_event(tx: Tx, node_id: str, state: Liveness) -> None:
    await events.record(tx, f"node.{state.value}", node_id=node_id)
