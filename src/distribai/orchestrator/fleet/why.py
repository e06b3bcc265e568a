"""What one node holds, why it gets no more, and what happened to it."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import cast

from distribai.core.states import JobState, Liveness, RoundState, TaskState
from distribai.core.tasks import works_on
from distribai.core.why import Held, NodeWhy, Reason, cut, misfit, no_blobs, passed_over, too_slow
from distribai.errors import Ambiguous, NotFound
from distribai.orchestrator.context import Grid
from distribai.orchestrator.fleet.queries import trouble_of
from distribai.orchestrator.jobs import queries
from distribai.orchestrator.jobs.why import as_free, obstacles_of, probe_of
from distribai.orchestrator.records import EventRecord
from distribai.orchestrator.rounds.opening import (
    AbleDevice,
    able_devices,
    devices_of,
    training_devices,
    waits_for,
)
from distribai.orchestrator.rounds.picture import Picture, look
from distribai.orchestrator.rounds.slow import slow_devices
from distribai.orchestrator.rounds.tasks import failed_at, spec_of
from distribai.store.engine import AnyRow, Tx
from distribai.store.statements import jobs, watching, work

MIN_PREFIX = 4
"""Characters of an id that may stand for all of it, ``node_`` not counted."""


async def resolve_node(grid: Grid, ref: str, account_id: str | None = None) -> str:
    """The id that ``ref`` means: a full id, a unique name, or a unique beginning of an id, with or
    without ``node_``; a full id goes before a name, a name before a beginning. Among the nodes of
    an account, or all: a node of others is as unknown as one that never was.

    Raises:
        NotFound: ``node.unknown``.
        Ambiguous: ``node.ambiguous``, with the candidates.
    """
    found: Sequence[AnyRow] = []
    async with grid.db.read() as tx:
        # No id or name has other characters, and PostgreSQL takes no zero.
        if ref.isprintable() and ref:
            exact = await watching.node(tx, ref)
            if exact is not None and account_id in (None, exact.account_id):
                return str(exact.id)
            found = _own(await watching.nodes_named(tx, ref), account_id)
            short = ref.removeprefix("node_")
            if not found and len(short) >= MIN_PREFIX:
                found = _own(await watching.nodes_beginning(tx, f"node_{short}"), account_id)
    if not found:
        raise NotFound(
            "node.unknown",
            f"No node has the id or name {ref[:80]!r}.",
            f"A part of an id needs at least {MIN_PREFIX} characters. `distribai nodes list` lists "
            "all nodes.",
        )
    if len(found) > 1:
        told = ", ".join(f"{r.id[:13]} ({r.name}, {r.liveness})" for r in found[:5])
        raise Ambiguous(
            "node.ambiguous",
            f"{len(found)} nodes go by {ref[:80]!r}: {told}{', ...' if len(found) > 5 else ''}.",
            "Give more of the id.",
        )
    return str(found[0].id)


def _own(rows: Sequence[AnyRow], account_id: str | None) -> Sequence[AnyRow]:
    return [r for r in rows if account_id in (None, r.account_id)]


async def node_events(
    grid: Grid, node_id: str, after: str = "", limit: int = 200
) -> tuple[EventRecord, ...]:
    """State changes of a node, and of tasks while it held them, as ``queries.list_events``."""
    return await queries.list_events(grid, None, after, limit, node_id=node_id)


async def why_node(grid: Grid, node_id: str) -> NodeWhy:
    """What a node holds and why it gets no more, from one snapshot of the database.

    Raises:
        NotFound: ``node.unknown``.
    """
    async with grid.db.read() as tx:
        node = await watching.node(tx, node_id)
        if node is None:
            raise NotFound("node.unknown", f"There is no node {node_id[:80]}.")
        held = await work.tasks_in(tx, (TaskState.LEASED,), node_id=node_id)
        blocked = obstacles_of(node, tx.now)
        trouble = () if node.liveness == Liveness.OFFLINE else no_blobs(trouble_of(node))
        late = await _too_slow(tx, node_id)
        told = {r.job_id for r in late}
        others = blocked or [
            r
            for r in await _reasons(grid, tx, node, held)
            if r.code != "late" or r.job_id not in told
        ]
        reasons = (*trouble, *late, *others)
    tasks = {t.device: t for t in held}
    return NodeWhy(
        id=node.id,
        name=node.name,
        liveness=node.liveness,
        standing=node.standing,
        intent=node.intent,
        last_heard_at=node.last_heard_at,
        now=tx.now,
        able=not blocked,
        devices=tuple(_held(d, tasks.get(d["index"])) for d in node.devices),
        reasons=tuple(reasons),
    )


async def _too_slow(tx: Tx, node_id: str) -> list[Reason]:
    """The running jobs whose rounds were over again and again while the node still fetched."""
    found = []
    for job in await jobs.in_states(tx, (JobState.RUNNING,)):
        slow = await slow_devices(tx, job.id, job.version, spec_of(job).rounds.staleness)
        own = [s for (node, _), s in slow.items() if node == node_id]
        if own:
            worst = max(own, key=lambda s: s.tasks)
            following = worst.next if worst.next > job.version else None
            found.append(too_slow(job.name, job.id, worst.tasks, following))
    return found


def _held(device: dict[str, object], task: AnyRow | None) -> Held:
    index, memory = cast(int, device["index"]), cast(int, device["memory_mb"])
    kind = str(device["type"])
    if task is None:
        return Held(index, kind, memory)
    return Held(index, kind, memory, task.id, task.job_id, task.phase, task.round, task.leased_at)


async def _reasons(grid: Grid, tx: Tx, node: AnyRow, held: Sequence[AnyRow]) -> tuple[Reason, ...]:
    """Why the free devices of an able node get nothing; nothing when none is free."""
    busy = {t.device for t in held}
    free = [d for d in devices_of(node) if d.index not in busy]
    if not free:
        return ()
    picture = await look(grid, tx)
    if not any(d.node_id == node.id for d in picture.free):
        text = "It has just declined a task: it is left alone for a while."
        return (Reason("declined", text),)
    found = [
        *_resting(picture, node.id),
        *passed_over(picture.queued, picture.free, picture.now, node.id, picture.tags),
    ]
    told = {r.job_id for r in found}
    open_jobs = await jobs.in_states(
        tx, (JobState.SUBMITTED, JobState.QUEUED, JobState.RUNNING, JobState.PAUSED)
    )
    able, training = await able_devices(tx), await training_devices(tx)
    others = [
        await _of_job(tx, job, node, free, able, training)
        for job in open_jobs
        if job.id not in told
    ]
    if not found and not others:
        return (Reason("idle", "There is no work: no job is open."),)
    return (*found, *cut(others, "jobs"))


def _resting(picture: Picture, node_id: str) -> Iterator[Reason]:
    """The queued tasks that this node has failed, or let go again and again, and that nobody else
    could take meanwhile."""
    for task in picture.resting:
        if node_id not in failed_at(task):
            continue
        why = next(c for c in reversed(task.causes) if c["node_id"] == node_id)
        text = (
            f"A task ({task.phase}, {works_on(task.phase, task.round)}) failed here "
            f"({why['code']}: {str(why['reason']).rstrip('.')}), and no other node can take it. It "
            "rests before it comes back here."
        )
        hint = f"`distribai job logs {task.job_id}` shows what the node said."
        yield Reason("resting", text, hint, task.not_before, task.job_id, task.id)


async def _of_job(
    tx: Tx,
    job: AnyRow,
    node: AnyRow,
    free: Sequence[AbleDevice],
    able: list[AbleDevice],
    training: dict[tuple[str, int], str],
) -> Reason:
    """Why a job that has no queued task for anybody has none for this node."""
    name = f"Job {job.name}"
    if job.state == JobState.SUBMITTED:
        return Reason("decision", f"{name} waits for the operator's decision.", job_id=job.id)
    if job.state == JobState.PAUSED:
        return Reason("paused", f"{name} is paused.", job_id=job.id)
    cause = misfit(probe_of(job, spec_of(job), tx.now), [as_free(d) for d in free], tx.now)
    if cause:
        return Reason("device", f"{name} does not fit its free devices: {cause}.", job_id=job.id)
    row = await work.latest_round(tx, job.id)
    if row is not None and row.state in (RoundState.OPEN, RoundState.CLOSING):
        number = row.number + 1
        if any(m["node_id"] == node.id for m in row.members):
            text = f"{name}: its part of round {number} is done, or went to others."
            return Reason("member", text, job_id=job.id)
        text = (
            f"{name}: round {number} was opened without it; it gets a share if enough of the "
            "round is left, else it can be in the next one."
        )
        return Reason("late", text, job_id=job.id)
    if job.version >= job.rounds_total:
        text = f"{name}: all rounds are merged; the last held-out loss is awaited."
        return Reason("evaluation", text, job_id=job.id)
    waits = waits_for(job, able, training)
    if waits:
        return Reason("workers", f"{name} waits: {waits}.", job_id=job.id)
    return Reason("turn", f"{name}: a round is about to open.", job_id=job.id)
