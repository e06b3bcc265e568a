"""Telling nodes what the database says: tasks to do, verdicts, tasks to stop, new versions.

Nothing is handed from a duty to a stream. Whoever leases a task writes it down; the process that
holds the node's stream compares what its sessions were sent with what the database says, and sends
the difference. So it does not matter which replica decided, and a process that has just started has
nothing to remember.
"""

from __future__ import annotations

from bisect import bisect_right
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from distribai.core.codecs import feeds_back
from distribai.core.paradigms import paradigm
from distribai.core.snapshots import CHAIN
from distribai.core.spec import BlobRef, JobSpec
from distribai.core.states import Intent, JobState, RoundState, TaskState
from distribai.core.tasks import Assignment, DatasetRef, KeptRef, OwnWork, UpdateRef, WeightsRef
from distribai.errors import Unavailable
from distribai.orchestrator.context import Grid
from distribai.orchestrator.fleet.registry import (
    LiveSession,
    ack_message,
    assign_message,
    finish_message,
    order_message,
    stop_message,
)
from distribai.orchestrator.news import Changes
from distribai.orchestrator.rounds.late import destination
from distribai.orchestrator.rounds.ready import page_size
from distribai.orchestrator.rounds.results import answer_of
from distribai.orchestrator.rounds.tasks import spec_of
from distribai.store.engine import AnyRow, Tx
from distribai.store.statements import fleet, jobs, submissions, work
from distribai.store.values import blob_or_none, ranges_from_json
from distribai.wire.convert import assignment_to_wire, weights_to_wire
from distribai.wire.specs import spec_json
from distribai.wire.v1 import distribai_pb2 as pb

MAX_OWN = 32
"""Accepted submissions of its own that a node is told of, the newest: twice as many as may be open
in its hands (``node.feedback.MAX_OPEN``)."""

FINAL = frozenset({JobState.COMPLETED, JobState.FAILED, JobState.CANCELLED, JobState.DECLINED})


class Delivery:
    """The duty's memory: how far it has gone through the sessions."""

    def __init__(self, grid: Grid) -> None:
        self._grid = grid
        self._after = ""
        self._paged_at = grid.clock()

    async def deliver(self, changes: Changes) -> None:
        """Send the sessions that ``changes`` concern what they have not been sent yet, and now and
        then a page of all: should anything have been missed, they are told then."""
        # Before the snapshot: who registers later knows more than it does.
        sessions = self._sessions(changes)
        if not sessions:
            return
        ids = {s.node_id for s in sessions}
        async with self._grid.db.read() as tx:
            held: dict[str, list[AnyRow]] = defaultdict(list)
            for task in await work.leased_to(tx, ids):
                held[task.node_id].append(task)
            left = {t for s in sessions for t in _left(s, held[s.node_id])}
            sight = _Sight(tx, {t.id: t for t in await work.tasks_by_id(tx, left)})
            orders = await fleet.orders(tx, ids)
            for session in sessions:
                order = Intent(orders.get(session.node_id, Intent.CONTRIBUTE))
                await _deliver(sight, self._grid, session, held[session.node_id], order)

    def _sessions(self, changes: Changes) -> list[LiveSession]:
        registry = self._grid.fleet
        if changes.everything:
            return list(registry)
        ids = changes.nodes & registry.sessions.keys()
        if changes.jobs:
            ids |= {s.node_id for s in registry if not changes.jobs.isdisjoint(s.told)}
        now = self._grid.clock()
        if now - self._paged_at >= self._grid.settings.liveness.tick_s:
            self._paged_at = now
            ids |= self._page(sorted(registry.sessions))
        return [registry.sessions[node_id] for node_id in sorted(ids)]

    def _page(self, ids: list[str]) -> set[str]:
        start = bisect_right(ids, self._after)
        page = ids[start : start + page_size(len(ids))]
        self._after = page[-1] if page and page[-1] != ids[-1] else ""
        return set(page)


@dataclass
class _Sight:
    """One look: jobs, rounds and weights that many sessions ask for are read once; ``left`` are the
    tasks that sessions were sent and hold no longer."""

    tx: Tx
    left: Mapping[str, AnyRow]
    _jobs: dict[str, AnyRow] = field(default_factory=dict)
    _rounds: dict[tuple[str, int, int], AnyRow | None] = field(default_factory=dict)
    _weights: dict[tuple[str, int], WeightsRef] = field(default_factory=dict)
    _data: dict[str, DatasetRef] = field(default_factory=dict)
    _specs: dict[str, tuple[JobSpec, str]] = field(default_factory=dict)

    async def job(self, job_id: str) -> AnyRow:
        """A job that has tasks."""
        if job_id not in self._jobs:
            job = await jobs.get(self.tx, job_id)
            assert job is not None, "jobs are never deleted"
            self._jobs[job_id] = job
        return self._jobs[job_id]

    async def round(self, task: AnyRow) -> AnyRow | None:
        """The round of a task."""
        key = (task.job_id, task.round, task.take)
        if key not in self._rounds:
            self._rounds[key] = await work.get_round(self.tx, *key)
        return self._rounds[key]

    async def weights(self, job: AnyRow, number: int) -> WeightsRef:
        """How to get version ``number`` of a job."""
        key = (job.id, number)
        if key not in self._weights:
            every = self.spec(job)[0].snapshots.every
            self._weights[key] = await weights_ref(self.tx, job, number, every)
        return self._weights[key]

    async def data(self, job: AnyRow) -> DatasetRef:
        """The prepared data of a job."""
        if job.dataset_key not in self._data:
            prepared = await jobs.dataset(self.tx, job.dataset_key)
            assert prepared is not None, "jobs.dataset_key refers to it"
            manifest = BlobRef(prepared.manifest_sha, prepared.manifest_size)
            self._data[job.dataset_key] = DatasetRef(manifest)
        return self._data[job.dataset_key]

    def spec(self, job: AnyRow) -> tuple[JobSpec, str]:
        """The spec of a job, and as nodes read it."""
        if job.id not in self._specs:
            spec = spec_of(job)
            self._specs[job.id] = (spec, spec_json(spec))
        return self._specs[job.id]


async def _deliver(
    sight: _Sight, grid: Grid, session: LiveSession, held: Sequence[AnyRow], order: Intent
) -> None:
    try:
        _order(session, order)
        # After each await the session may have been replaced; its sends go nowhere then.
        for task in held:
            known = (session.assigned.get(task.id), session.reported.get(task.id))
            if task.attempt not in known:
                await _assign(sight, session, task)
        _answer_and_stop(sight, session, held)
        await _hurry(sight, session, held)
        await _tell_versions(sight, session)
    except Unavailable as problem:
        if problem.code != "protocol.backlog":
            raise
        # A peer that never acknowledges: cut it off; it begins anew, or falls silent.
        if session.stream is not None:
            session.stream.close()
        grid.fleet.drop(session)


def _order(session: LiveSession, order: Intent) -> None:
    """Tell a node what the operator wants of it, when that is news to it."""
    if session.ordered is order:
        return
    # A new session was told nothing; one that pauses may have missed the end of an earlier order.
    idle = order is Intent.CONTRIBUTE and session.intent is not Intent.PAUSE
    if session.ordered is not None or not idle:
        session.send(order_message(order, "the operator's order"))
    session.ordered = order


async def _assign(sight: _Sight, session: LiveSession, task: AnyRow) -> None:
    job = await sight.job(task.job_id)
    assignment = await _assignment(sight, job, task)
    session.assigned[task.id] = task.attempt
    session.stopping.discard(task.id)
    session.told[job.id] = max(session.told.get(job.id, 0), task.round)
    _, spec = sight.spec(job)
    session.send(assign_message(assignment_to_wire(assignment, task.device, spec)))


async def _assignment(sight: _Sight, job: AnyRow, task: AnyRow) -> Assignment:
    """A leased task as its node sees it."""
    spec, params = sight.spec(job)[0], dict(task.params)
    world_size = params.pop("world_size", 1)
    return Assignment(
        job_id=job.id,
        task_id=task.id,
        attempt=task.attempt,
        round=task.round,
        phase=task.phase,
        spec=spec,
        base=await sight.weights(job, task.round),
        data=await sight.data(job) if task.phase != "generate" else None,
        paradigm=job.spec["paradigm"],
        samples=ranges_from_json(task.samples),
        steps=task.steps,
        inner_step_offset=task.inner_step_offset,
        deadline_s=max(0.0, task.deadline_at - sight.tx.now),
        isolation=job.spec["resources"].get("isolation", "L0"),
        env={"RANK": str(task.slot), "WORLD_SIZE": str(world_size)},
        params=params,
        own=await _own_work(sight.tx, spec, task),
    )


async def _own_work(tx: Tx, spec: JobSpec, task: AnyRow) -> tuple[OwnWork, ...]:
    """What became of the node's earlier deltas: with error feedback it adds back what came to
    nothing."""
    if task.phase != "train" or not feeds_back(spec.rounds.codec_up):
        return ()
    found = await submissions.own_work(tx, task.job_id, task.node_id, MAX_OWN)
    found.pop((task.id, task.attempt), None)
    return tuple(OwnWork(*key, merged) for key, merged in sorted(found.items()))


async def weights_ref(tx: Tx, job: AnyRow, number: int, every: int) -> WeightsRef:
    """How to get version ``number``: the last snapshot up to there and the updates since, the
    update that leads there, and more updates before it: as long as all of them together are no
    larger than a snapshot, and in any case as far as the last snapshot that is kept for long, of
    each ``every``-th version."""
    rows = await jobs.latest_versions(tx, job.id, number, CHAIN + 1)
    whole = [r for r in rows if r.weights_sha]
    assert whole, "no version is further from a snapshot (core.snapshots)"
    first = whole[0]
    kept = next((r for r in whole if r.version % every == 0), first)
    updates: list[UpdateRef] = []
    budget = first.weights_size
    for row in rows:
        ref = blob_or_none(row.update_sha, row.update_size)
        if ref is None or len(updates) == CHAIN:
            break
        if updates and ref.size > budget and row.version <= kept.version:
            break
        budget -= ref.size
        updates.append(UpdateRef(row.version, ref, row.weights_hash))
    # Version 0 without weights of the user's is made from the seed: nothing is sent.
    from_seed = job.spec["model"]["init"] is None
    own = from_seed and kept.version == 0
    return WeightsRef(
        version=number,
        weights_hash=rows[0].weights_hash,
        snapshot=None
        if from_seed and first.version == 0
        else BlobRef(first.weights_sha, first.weights_size),
        snapshot_version=first.version,
        updates=tuple(reversed(updates)),
        kept=None if own else KeptRef(kept.version, BlobRef(kept.weights_sha, kept.weights_size)),
    )


def _left(session: LiveSession, held: Sequence[AnyRow]) -> list[str]:
    """Tasks that the node was sent and does not hold (any more)."""
    leased = {task.id: task for task in held}
    return [t for t, attempt in session.assigned.items() if not _holds(leased.get(t), attempt)]


def _answer_and_stop(sight: _Sight, session: LiveSession, held: Sequence[AnyRow]) -> None:
    """Answer reports that have been judged, and stop what the node does in vain: tasks it lost, and
    slots of rounds that have closed."""
    for task_id in _left(session, held):
        task, attempt = sight.left.get(task_id), session.assigned[task_id]
        if task is None:
            continue  # newer than this look
        own = task.node_id == session.node_id and task.attempt == attempt
        # Not by the hash, which may be that of an earlier attempt's failure.
        reported = own and (task.outcome or {}).get("attempt") == attempt
        if reported and task.state in (TaskState.SUBMITTED, TaskState.VERIFYING):
            continue
        del session.assigned[task.id]
        session.in_hand.pop(task.id, None)
        session.progress.pop(task.id, None)
        if reported:
            answer = answer_of(task)
            session.send(ack_message(task.id, attempt, answer.code, answer.reason))
        elif session.reported.get(task.id) == attempt:
            pass  # who took the report in answers it
        elif task.id not in session.stopping:
            session.send(stop_message(task.id, task.reason or f"the task is {task.state}"))
        session.stopping.discard(task.id)
        session.hurried.discard(task.id)
        session.overdue.discard(task.id)


async def _hurry(sight: _Sight, session: LiveSession, held: Sequence[AnyRow]) -> None:
    """Tell a node whose round has its quorum how long it may go on, so that it hands in what it
    can, once a session; and end work for rounds that have closed."""
    for task in held:
        if task.phase != "train" or task.id in session.stopping:
            continue
        row = await sight.round(task)
        if row is None or row.state != RoundState.OPEN:
            await _end_late(sight.tx, session, task)
        elif row.deadline_at is not None and task.id not in session.hurried:
            session.hurried.add(task.id)
            how = paradigm((await sight.job(task.job_id)).spec["paradigm"])
            now = sight.tx.now
            left = min(row.deadline_at - now, how.finish_within(now, row.opened_at))
            session.send(finish_message(task.id, max(0.0, left), "its round has its quorum"))


async def _end_late(tx: Tx, session: LiveSession, task: AnyRow) -> None:
    """The round of a task has closed: have the node hand in at once what it has of it, if a later
    round takes that; else stop it."""
    where = await destination(tx, task)
    if not where.exists:
        session.stopping.add(task.id)
        session.send(stop_message(task.id, f"its round has closed: {where.reason}"))
    elif task.id not in session.overdue:
        session.overdue.add(task.id)
        session.send(finish_message(task.id, 0.0, "its round has closed, the next one takes it"))


def _holds(task: AnyRow | None, attempt: int) -> bool:
    return task is not None and task.attempt == attempt


async def _tell_versions(sight: _Sight, session: LiveSession) -> None:
    """Tell of new versions of the jobs that the node has worked for; while it wants no work, only
    that a job has ended: what it is not told it would fetch nothing for, and each is a kilobyte of
    its month."""
    rests = session.intent is not Intent.CONTRIBUTE
    for job_id, told in list(session.told.items()):
        job = await sight.job(job_id)
        done = JobState(job.state) in FINAL
        if (rests or job.version <= told) and not done:
            continue
        complete = pb.DiLoCoRoundComplete(
            job_id=job.id,
            round=max(0, job.version - 1),
            version=job.version,
            weights=weights_to_wire(await sight.weights(job, job.version)),
            job_done=done,
        )
        if done:
            del session.told[job_id]
        else:
            session.told[job_id] = job.version
        session.send(pb.OrchestratorMessage(round_complete=complete))
