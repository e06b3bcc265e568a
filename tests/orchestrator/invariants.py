"""What must hold in a grid's database whatever has happened, after every transaction."""

from __future__ import annotations

import math
from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping
from itertools import pairwise
from typing import Any

import numpy as np
from sqlalchemy import select

from distribai.core.plain import from_plain
from distribai.core.ranges import SampleRange, normalize
from distribai.core.spec import RoundSpec
from distribai.core.states import (
    JOB,
    ROUND,
    TASK,
    Intent,
    JobState,
    Liveness,
    RoundState,
    Standing,
    TaskState,
    is_terminal,
)
from distribai.merge.manifests import RoundManifest
from distribai.orchestrator.fleet.tokens import BARRED
from distribai.store.engine import AnyRow, Tx
from distribai.store.statements.work import OPEN_TASKS
from distribai.store.tables import (
    jobs,
    nodes,
    outbox,
    rounds,
    sessions,
    submissions,
    tasks,
    versions,
)
from distribai.store.values import ranges_from_json

Rows = Mapping[str, list[AnyRow]]

UNDER_WAY = (RoundState.OPEN, RoundState.CLOSING)
SILENT = {TaskState.VERIFYING, JobState.RUNNING}
"""States that a row may pass through without an event: a submission on its way to its verdict, and
a paused job on its way to its failure."""


async def read_all(tx: Tx) -> Rows:
    """Every row that an invariant is about, by table."""
    tables = (jobs, nodes, rounds, sessions, submissions, tasks, versions)
    found = {t.name: list(await tx.all(select(t))) for t in tables}
    found["outbox"] = list(await tx.all(select(outbox).order_by(outbox.c.id)))
    return found


def check_all(rows: Rows) -> None:
    """Assert every invariant."""
    check_histories(rows)
    check_leases(rows)
    check_standing(rows)
    check_submissions(rows)
    for job in rows["jobs"]:
        check_job(job, rows)
        check_positions(job, rows)
        check_lineage(job, rows)


# ------------------------------------------------------------------ states


def check_histories(rows: Rows) -> None:
    """Each job, task and round went from state to state by its table, ended at most once, and is
    where its last event says."""
    histories: dict[tuple[str, Any], list[str]] = defaultdict(list)
    for event in rows["outbox"]:
        subject, _, change = event.kind.partition(".")
        if subject == "round" and change != "joined":  # a device joined: no change of state
            histories[subject, (event.job_id, event.data["round"])].append(change)
        elif subject == "task":
            state = "queued" if change == "requeued" else change
            histories[subject, event.task_id].append(state)
        elif subject == "job":
            histories[subject, event.job_id].append(change)
    for job in rows["jobs"]:
        _follows(JOB, [JobState(s) for s in histories["job", job.id]], JobState(job.state))
    for task in rows["tasks"]:
        _follows(TASK, [TaskState(s) for s in histories["task", task.id]], TaskState(task.state))
    by_number = defaultdict(list)
    for row in sorted(rows["rounds"], key=lambda r: r.take):
        by_number[row.job_id, row.number].append(row)
    for key, takes in by_number.items():
        _check_takes(histories["round", key], takes)


def _check_takes(history: list[str], takes: list[AnyRow]) -> None:
    """One round's events, over all its takes: each take begins with ``open``."""
    assert [t.take for t in takes] == list(range(len(takes)))
    parts: list[list[str]] = []
    for state in history:
        if state == RoundState.OPEN:
            parts.append([])
        parts[-1].append(state)
    # A job's own end abandons its round without an event of the round.
    for row, part in zip(takes, parts, strict=True):
        states = [RoundState(s) for s in part if s in {*RoundState}]
        if row.state == RoundState.ABANDONED and states[-1] != RoundState.ABANDONED:
            states.append(RoundState.ABANDONED)
        _follows(ROUND, states, RoundState(row.state))


def _follows(table: Mapping[Any, frozenset[Any]], states: list[Any], present: Any) -> None:
    for old, new in pairwise(states):
        through = {s for s in table[old] & SILENT if new in table[s]}
        assert new in table[old] or through, f"{old} became {new}"
    assert states, "nothing exists without an event"
    last = states[-1]
    assert present == last or (present in table[last] and present in SILENT), (last, present)


def check_standing(rows: Rows) -> None:
    """Whoever is barred holds no task and has no session."""
    barred = {n.id for n in rows["nodes"] if n.standing in BARRED}
    assert not barred & {t.node_id for t in rows["tasks"] if t.state == TaskState.LEASED}
    assert not barred & {s.node_id for s in rows["sessions"] if s.ended_at is None}


def check_leases(rows: Rows) -> None:
    """A lease has an owner, a device has one task, and what is not leased has no lease."""
    known = {n.id for n in rows["nodes"]}
    leased = [t for t in rows["tasks"] if t.state == TaskState.LEASED]
    for task in leased:
        assert task.node_id in known
        assert task.attempt >= 1
        assert task.lease_until is not None
        assert task.lease_until <= task.deadline_at or task.deadline_at is None
    held = Counter((t.node_id, t.device) for t in leased)
    assert max(held.values(), default=1) == 1, held
    for task in rows["tasks"]:
        if task.state != TaskState.LEASED:
            assert task.lease_until is None, (task.id, task.state)
        if is_terminal(TASK, TaskState(task.state)):
            assert task.ended_at is not None
    for node in rows["nodes"]:
        Liveness(node.liveness)
        Standing(node.standing)
        Intent(node.intent)
    open_sessions = Counter(s.node_id for s in rows["sessions"] if s.ended_at is None)
    assert max(open_sessions.values(), default=1) == 1, open_sessions


# ------------------------------------------------------------------ work


def check_submissions(rows: Rows) -> None:
    """Accepted tasks and submissions are the same things, attempt by attempt."""
    accepted = {t.id: (t.attempt, t.node_id) for t in rows["tasks"] if t.state == "accepted"}
    assert {s.task_id: (s.attempt, s.node_id) for s in rows["submissions"]} == accepted
    usual = RoundSpec().staleness  # jobs of earlier programs say nothing of it
    bounds = {j.id: int(j.spec["rounds"].get("staleness", usual)) for j in rows["jobs"]}
    for s in rows["submissions"]:
        (task,) = [t for t in rows["tasks"] if t.id == s.task_id]
        assert (s.base_version, s.samples) == (task.round, task.samples)
        if task.phase != "train" or not bounds[s.job_id]:
            assert (s.round, s.take) == (task.round, task.take)
        else:
            assert 0 <= s.round - task.round <= bounds[s.job_id], "too late"
            assert s.round > task.round or s.take >= task.take


def check_job(job: AnyRow, rows: Rows) -> None:
    """A job runs while it has a round, ends with everything of it, and counts what was merged."""
    state = JobState(job.state)
    own = [r for r in rows["rounds"] if r.job_id == job.id]
    under_way = [r for r in own if r.state in UNDER_WAY]
    assert len(under_way) <= 1
    if under_way:
        assert state in (JobState.RUNNING, JobState.PAUSED)
        assert under_way[0].number == job.version
    assert (job.started_at is not None) == bool(own), "it runs from its first round on"
    if state in (JobState.SUBMITTED, JobState.QUEUED, JobState.DECLINED):
        assert not own
    assert (job.ended_at is not None) == is_terminal(JOB, state)
    open_tasks = [t for t in rows["tasks"] if t.job_id == job.id and t.state in OPEN_TASKS]
    if is_terminal(JOB, state):
        assert all(t.phase == "generate" for t in open_tasks)
    for task in open_tasks:
        if task.phase == "train" and task.state == TaskState.QUEUED:
            (row,) = [r for r in own if (r.number, r.take) == (task.round, task.take)]
            open_here = row.state == RoundState.OPEN
            assert open_here or _may_count_later(job, task, own), "nobody could use what it makes"
    merged = [r for r in own if r.state == RoundState.MERGED]
    assert job.version == len(merged) <= job.rounds_total
    if state is JobState.COMPLETED:
        assert job.version == job.rounds_total
    made = [v for v in rows["versions"] if v.job_id == job.id]
    assert sorted(v.version for v in made) == list(range(job.version + 1))
    assert job.tokens == sum(v.tokens for v in made)


def _may_count_later(job: AnyRow, task: AnyRow, own: list[AnyRow]) -> bool:
    """Whether a queued task of a closed round is kept for the node that fell silent with it."""
    last = max(own, key=lambda r: (r.number, r.take))
    target = last.number + (last.state in (RoundState.CLOSING, RoundState.MERGED))
    bound = int(job.spec["rounds"]["staleness"])
    lost = bool(task.node_id) and task.causes[-1]["code"] == "task.lost"
    return lost and target - task.round <= bound > 0 and target < job.rounds_total


def check_positions(job: AnyRow, rows: Rows) -> None:
    """Accepted, open and pooled positions are all that were ever issued, once each; and no
    position was merged twice."""
    train = [t for t in rows["tasks"] if t.job_id == job.id and t.phase == "train"]
    alive = [t for t in train if t.state in (*OPEN_TASKS, TaskState.ACCEPTED)]
    pooled = ranges_from_json(job.pool_returned)
    everything = normalize([*_ranges(alive), *pooled])
    whole = (SampleRange(0, job.pool_cursor),) if job.pool_cursor else ()
    assert everything == whole, (everything, job.pool_cursor)
    normalize(r for m in _manifests(job, rows) for s in m.submissions for r in s.samples)


def check_lineage(job: AnyRow, rows: Rows) -> None:
    """Every version follows from the one before by a round of accepted submissions, weights and
    momentum alike."""
    made = {v.version: v for v in rows["versions"] if v.job_id == job.id}
    accepted = {s.task_id: s for s in rows["submissions"] if s.job_id == job.id}
    assert made[0].outer_hash == ""
    for manifest in _manifests(job, rows):
        base, new = made[manifest.base_version], made[manifest.base_version + 1]
        assert manifest.base_hash == base.weights_hash
        assert manifest.base_momentum_hash == base.outer_hash
        assert manifest.weights_hash == new.weights_hash
        assert manifest.momentum_hash == new.outer_hash
        assert new.contributors == len(manifest.submissions) > 0
        assert new.tokens == sum(s.tokens for s in manifest.submissions)
        for s in manifest.submissions:
            assert accepted[s.task_id].attempt == s.attempt
            assert accepted[s.task_id].round == manifest.round
            assert accepted[s.task_id].base_version == manifest.base_version - s.staleness
        assert any(s.staleness == 0 for s in manifest.submissions), "late work alone"
        worth = {s.task_id: s.tokens / math.sqrt(1 + s.staleness) for s in manifest.submissions}
        shares = [np.float32(n / math.fsum(worth.values())) for n in worth.values()]
        assert manifest.choices.order == tuple(worth)
        assert manifest.choices.weights == tuple(float(w).hex() for w in shares)


def _manifests(job: AnyRow, rows: Rows) -> list[RoundManifest]:
    merged = [r for r in rows["rounds"] if r.job_id == job.id and r.state == RoundState.MERGED]
    return [from_plain(RoundManifest, r.manifest) for r in merged]


def _ranges(found: Iterable[AnyRow]) -> list[SampleRange]:
    return [r for t in found for r in ranges_from_json(t.samples)]
