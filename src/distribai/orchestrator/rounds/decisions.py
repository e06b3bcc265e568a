"""What is to become of an open round, from its rows: the paradigm's pure functions, fed."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import groupby

from distribai.core.paradigms import MergeDecision, paradigm
from distribai.core.spec import JobSpec
from distribai.core.states import RoundState, TaskState
from distribai.orchestrator.rounds.late import kept_for_their_nodes
from distribai.orchestrator.rounds.opening import Wanted, able_devices
from distribai.store.engine import AnyRow, Tx
from distribai.store.statements import jobs, submissions, work

HISTORY = 1024
"""Past arrivals that are read; the paradigm keeps the last ones of what they say."""

ARRIVED = frozenset({TaskState.SUBMITTED, TaskState.VERIFYING, TaskState.ACCEPTED})
EXPECTED = frozenset({*ARRIVED, TaskState.QUEUED, TaskState.LEASED})
CHECKING = frozenset({TaskState.SUBMITTED, TaskState.VERIFYING})


@dataclass(frozen=True, slots=True)
class RoundView:
    """An open round: its training tasks and what the paradigm says of it.

    ``checking`` submissions have arrived and are not judged yet: the round does not merge before
    they are, because they were in time. Late work is among them; otherwise the round does not know
    of it. ``kept`` are tasks that belong to nodes that fell silent, see ``rounds.late``.
    """

    tasks: Sequence[AnyRow]
    decision: MergeDecision
    checking: int
    kept: frozenset[str]


async def lock_round(tx: Tx, row: AnyRow, state: RoundState) -> tuple[AnyRow, AnyRow] | None:
    """The job of a round, locked until the end of the transaction, and the round as it is now; None
    when it has left ``state`` meanwhile."""
    job = await jobs.lock(tx, row.job_id)
    current = await work.get_round(tx, row.job_id, row.number, row.take)
    assert job is not None, "rounds.job_id refers to it"
    assert current is not None, "rounds are never deleted"
    return (job, current) if current.state == state else None


async def view_round(tx: Tx, spec: JobSpec, row: AnyRow, not_before: float = 0.0) -> RoundView:
    """Look at an open round now.

    Work that was carried over from an abandoned take is in the round, but says nothing of when its
    present members are due. ``not_before`` (database time): no grace ends earlier, because nodes
    are coming back to an orchestrator that has just started.
    """
    tasks = await work.tasks_of_round(tx, row.job_id, row.number, row.take)
    how = paradigm(spec.paradigm)
    grace, _ = how.grace(await _offsets(tx, spec, row), spec.rounds)
    fresh = [t for t in tasks if t.submitted_at is None or t.submitted_at >= row.opened_at]
    arrived = [t.submitted_at for t in fresh if t.state in ARRIVED]
    expected = sum(t.state in EXPECTED for t in fresh)
    kept = await kept_for_their_nodes(tx, spec, row, fresh)
    arriving = await work.tasks_in(tx, tuple(CHECKING), job_id=row.job_id)
    checking = sum(t.phase == "train" for t in arriving)
    returning = tx.now < not_before
    if not arrived and not returning and await _everybody_is_gone(tx, spec, fresh):
        gone = MergeDecision("abandon", "every node of the grid is gone")
        return RoundView(tasks, gone, 0, frozenset())
    minimum = max(1, spec.workers_min - (len(tasks) - len(fresh)))
    decision = how.merge_decision(
        tx.now,
        arrived,
        expected - len(kept),
        spec.rounds.quorum,
        grace,
        minimum,
        row.opened_at,
        at_work=sum(t.state == TaskState.LEASED and t.id not in kept for t in fresh),
    )
    early = decision.action != "wait" or (decision.until or not_before) < not_before
    if returning and len(arrived) < expected and early:
        decision = MergeDecision("wait", "nodes are coming back after a start", not_before)
    return RoundView(tasks, decision, checking, kept)


async def _everybody_is_gone(tx: Tx, spec: JobSpec, tasks: Sequence[AnyRow]) -> bool:
    """Whether nobody works in the round, and nobody is there who could: whoever comes next had
    better have a round of their own than the slots of others."""
    if any(t.state == TaskState.LEASED for t in tasks):
        return False
    wanted = Wanted.of(spec)
    return not any(d.fits(wanted) for d in await able_devices(tx))


async def _offsets(tx: Tx, spec: JobSpec, row: AnyRow) -> list[float]:
    """Arrival offsets of the rounds before this one, oldest first, late arrivals included."""
    how = paradigm(spec.paradigm)
    rows = await submissions.arrivals(tx, row.job_id, (row.number, row.take), HISTORY)
    groups = [list(g) for _, g in groupby(rows, key=lambda r: (r.round, r.take))]
    if len(rows) == HISTORY and len(groups) > 1:
        del groups[0]  # perhaps not whole
    found: list[float] = []
    for group in groups:
        times = [r.submitted_at for r in group]
        found += how.arrival_offsets(times, len(times), spec.rounds.quorum)
    return found
