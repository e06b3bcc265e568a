"""What is to become of an open round, from its rows: the paradigm's pure functions, fed."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import groupby

from distribai.core.paradigms import MergeDecision, paradigm
from distribai.core.plan import task_memory_mb
from distribai.core.spec import JobSpec
from distribai.core.states import TaskState
from distribai.orchestrator.rounds.opening import able_devices
from distribai.store.engine import AnyRow, Tx
from distribai.store.statements import work

HISTORY_ROUNDS = 32
"""Rounds back whose arrivals are read; the paradigm keeps the last ones of them."""

ARRIVED = frozenset({TaskState.SUBMITTED, TaskState.VERIFYING, TaskState.ACCEPTED})
EXPECTED = frozenset({*ARRIVED, TaskState.QUEUED, TaskState.LEASED})
CHECKING = frozenset({TaskState.SUBMITTED, TaskState.VERIFYING})


@dataclass(frozen=True, slots=True)
class RoundView:
    """An open round: its training tasks and what the paradigm says of it.

    ``checking`` submissions have arrived and are not judged yet: the round does not merge before
    they are, because they were in time.
    """

    tasks: Sequence[AnyRow]
    decision: MergeDecision
    checking: int


async def view_round(tx: Tx, spec: JobSpec, row: AnyRow) -> RoundView:
    """Look at an open round now."""
    tasks = await work.tasks_of_round(tx, row.job_id, row.number, row.take)
    how = paradigm(spec.paradigm)
    grace, _ = how.grace(await _offsets(tx, spec, row), spec.rounds)
    arrived = [t.submitted_at for t in tasks if t.state in ARRIVED]
    if not arrived and await _everybody_is_gone(tx, spec, tasks):
        return RoundView(tasks, MergeDecision("abandon", "every node of the grid is gone"), 0)
    decision = how.merge_decision(
        tx.now,
        arrived,
        sum(t.state in EXPECTED for t in tasks),
        spec.rounds.quorum,
        grace,
    )
    return RoundView(tasks, decision, sum(t.state in CHECKING for t in tasks))


async def _everybody_is_gone(tx: Tx, spec: JobSpec, tasks: Sequence[AnyRow]) -> bool:
    """Whether nobody works in the round, and nobody is there who could: whoever comes next had
    better have a round of their own than the slots of others."""
    if any(t.state == TaskState.LEASED for t in tasks):
        return False
    memory = task_memory_mb(spec)
    return not any(d.fits(memory, spec.resources.device) for d in await able_devices(tx))


async def _offsets(tx: Tx, spec: JobSpec, row: AnyRow) -> list[float]:
    """Arrival offsets of the rounds before this one, oldest first, late arrivals included."""
    how = paradigm(spec.paradigm)
    found: list[float] = []
    rows = await work.arrivals(tx, row.job_id, row.number - HISTORY_ROUNDS)
    for key, group in groupby(rows, key=lambda r: (r.round, r.take)):
        if key < (row.number, row.take):
            times = [r.submitted_at for r in group]
            found += how.arrival_offsets(times, len(times), spec.rounds.quorum)
    return found
