"""Judging submissions: accepted, rejected with the reason, or superseded.

The checks (files, hashes, finite values) run outside of any transaction; the verdict is one
transaction that writes the task's state, the submission's row, what the node did not consume back
into the pool, and the event. Two things make sure that a task counts once: its state, guarded by
attempt and node, and the primary key of ``submissions``. Either alone suffices.
"""

from __future__ import annotations

import asyncio
import math

from distribai.core.architectures import manifest_of
from distribai.core.plain import from_plain
from distribai.core.ranges import Ranges, normalize, total
from distribai.core.spec import BlobRef, JobSpec
from distribai.core.states import TASK, RoundState, TaskState, check
from distribai.core.tasks import Outcome
from distribai.core.text import MAX_REASON, clean
from distribai.errors import DistribAIError, Integrity, Unavailable
from distribai.merge.delta import DeltaHeader, open_delta
from distribai.orchestrator import events
from distribai.orchestrator.context import Grid
from distribai.orchestrator.rounds import late, results, tasks
from distribai.orchestrator.rounds.decisions import view_round
from distribai.store import leases
from distribai.store.blobs import no_blob
from distribai.store.engine import AnyRow, Tx
from distribai.store.statements import fleet, jobs, records, submissions, work
from distribai.store.values import ranges_from_json, ranges_to_json

MAX_TEXT = 1_000_000
"""Characters of a generated sample that are kept."""


async def verify_all(grid: Grid) -> bool:
    """Judge everything that waits for it; whether anything did.

    The caller holds the duty's lease, so a task that is being verified is left over from a process
    that died while judging it, and is judged again.
    """
    async with grid.db.read() as tx:
        waiting = await work.tasks_in(tx, (TaskState.SUBMITTED, TaskState.VERIFYING))
    for task in waiting:
        await _verify(grid, task)
    return bool(waiting)


async def _verify(grid: Grid, task: AnyRow) -> None:
    if task.phase == "train":
        await _verify_work(grid, task)
        return
    # Nothing is fetched or computed for it: one transaction does.
    async with grid.db.write() as tx:
        await jobs.hold(tx, task.job_id)
        current = await _take_up(tx, task)
        if current is None:
            return
        outcome = from_plain(Outcome, current.outcome)
        weights_hash = await jobs.weights_hash(tx, task.job_id, task.round)
        problem: DistribAIError | None = None
        try:
            _check_base(current, outcome, weights_hash)
            _check_light(current, outcome)
        except DistribAIError as found:
            problem = found
        await _judge(grid, tx, current, outcome, problem)


async def _take_up(tx: Tx, task: AnyRow) -> AnyRow | None:
    """Begin to judge a task, or go on after a process that died over it; None when others have."""
    if task.state == TaskState.VERIFYING:
        current = await work.get_task(tx, task.id)
        assert current is not None, "tasks are never deleted"
        same = current.state == TaskState.VERIFYING and current.attempt == task.attempt
        return current if same else None
    check(TASK, TaskState.SUBMITTED, TaskState.VERIFYING, f"Task {task.id}")
    return await leases.leave_state(
        tx, task.id, TaskState.SUBMITTED, TaskState.VERIFYING, attempt=task.attempt
    )


async def _verify_work(grid: Grid, task: AnyRow) -> None:
    if task.state == TaskState.SUBMITTED:
        async with grid.db.write() as tx:
            await jobs.hold(tx, task.job_id)
            taken = await _take_up(tx, task)
        if taken is None:
            return
        task = taken
    outcome = from_plain(Outcome, task.outcome)
    async with grid.db.read() as tx:
        job = await jobs.get(tx, task.job_id)
        weights_hash = await jobs.weights_hash(tx, task.job_id, task.round)
    assert job is not None
    problem: DistribAIError | None = None
    try:
        _check_base(task, outcome, weights_hash)
        _check_figures(tasks.spec_of(job), task, outcome)
        await _check_delta(grid, tasks.spec_of(job), task, outcome)
    except Unavailable:
        raise  # the store's fault, not the node's: it is judged when the store is back
    except DistribAIError as found:
        problem = found
    async with grid.db.write() as tx:
        await jobs.hold(tx, task.job_id)
        current = await work.get_task(tx, task.id)
        assert current is not None
        if current.state != TaskState.VERIFYING or current.attempt != task.attempt:
            return
        await _judge(grid, tx, current, outcome, problem)


# ------------------------------------------------------------------ checks


def _check_base(task: AnyRow, outcome: Outcome, weights_hash: str) -> None:
    """Refuse a submission that did not start from its task's weights.

    Raises:
        Integrity: ``tensor.manifest``.
    """
    if outcome.base_hash != weights_hash:
        raise Integrity(
            "tensor.manifest",
            f"The work started from weights {outcome.base_hash[:12] or '(none)'}, version "
            f"{task.round} is {weights_hash[:12]}.",
        )


def _check_light(task: AnyRow, outcome: Outcome) -> None:
    """Refuse a sample or a loss that is none.

    Raises:
        Integrity: with the first thing that is wrong.
    """
    if outcome.delta is not None or outcome.samples or outcome.steps or outcome.tokens:
        raise _figures("it trains nothing, but claims to have")
    if task.phase == "evaluate":
        loss = outcome.metrics.get("held_out_loss")
        if loss is None or not math.isfinite(loss):
            raise Integrity("tensor.nonfinite", f"The held-out loss is {loss}.")
    elif len(outcome.text) > MAX_TEXT:
        raise Integrity("blob.size", f"The sample has {len(outcome.text)} characters.")


def _check_figures(spec: JobSpec, task: AnyRow, outcome: Outcome) -> None:
    if not 1 <= outcome.steps <= task.steps:
        raise _figures(f"{outcome.steps} of {task.steps} steps were done")
    if outcome.tokens != outcome.steps * spec.batch * spec.seq_len:
        raise _figures(f"{outcome.tokens} tokens do not fit {outcome.steps} steps")
    try:
        consumed = normalize(outcome.samples)
    except ValueError as problem:
        raise _figures(f"its samples: {problem}") from problem
    if total(consumed) != outcome.steps * spec.batch:
        raise _figures(f"{total(consumed)} samples do not fit {outcome.steps} steps")
    if not _within(consumed, ranges_from_json(task.samples)):
        raise _figures("it consumed samples that its task does not hold")


def _within(inner: Ranges, outer: Ranges) -> bool:
    joined = normalize(outer)
    return all(any(o.start <= i.start and i.stop <= o.stop for o in joined) for i in inner)


def _figures(what: str) -> Integrity:
    return Integrity("task.rejected", f"The submission contradicts itself or its task: {what}.")


async def _check_delta(grid: Grid, spec: JobSpec, task: AnyRow, outcome: Outcome) -> None:
    if outcome.delta is None:
        raise Integrity("blob.unknown", "The submission brings no delta.")
    manifest = manifest_of(spec.model.family, spec.model.config)
    expected = DeltaHeader(
        job_id=task.job_id,
        task_id=task.id,
        attempt=task.attempt,
        base_version=task.round,
        manifest_hash=manifest.hash,
        codec=spec.codec_up_of(task.round),
        tokens=outcome.tokens,
        steps=outcome.steps,
    )
    await _check_sent(grid, outcome.delta)
    async with grid.blobs.local(outcome.delta) as path:
        await asyncio.to_thread(open_delta, path, manifest, expected)


async def _check_sent(grid: Grid, delta: BlobRef) -> None:
    """Refuse a blob that no node can have brought as the delta of an open attempt. What is on
    record as something else, or has another size, is as unknown as what never was: a node must not
    learn from its rejection what others have.

    Raises:
        NotFound: ``blob.unknown``.
    """
    async with grid.db.read() as tx:
        known = await records.blob(tx, delta.sha256)
    on_record = known is not None and known.kind != "delta"
    if on_record or await grid.blobs.size(delta.sha256) != delta.size:
        raise no_blob(delta.sha256)


# ------------------------------------------------------------------ verdicts


async def _judge(
    grid: Grid, tx: Tx, task: AnyRow, outcome: Outcome, problem: DistribAIError | None
) -> None:
    if await submissions.has_submission(tx, task.id):
        # The fence keeps a second report away; without it the submission's key must suffice.
        await leases.leave_state(tx, task.id, TaskState.VERIFYING, TaskState.ACCEPTED)
        return
    row = await work.get_round(tx, task.job_id, task.round, task.take)
    is_open = row is not None and row.state == RoundState.OPEN
    if problem is not None:
        await _reject(grid, tx, task, problem, row if is_open else None)
        return
    into = (task.round, task.take)
    if task.phase == "train":
        where = await late.destination(tx, task)
        if where.number is None:
            assert row is not None, "a training task is made for a round"
            closed = "abandoned" if row.state == RoundState.ABANDONED else "merged"
            reason = f"its round was {closed} before it came: {where.reason}"
            await tasks.end(tx, task, TaskState.SUPERSEDED, reason)
            return
        into = (where.number, where.take)
    await _accept(tx, task, outcome, into)


async def _accept(tx: Tx, task: AnyRow, outcome: Outcome, into: tuple[int, int]) -> None:
    """Let the work count, in round ``into`` (number, take) if it is training."""
    check(TASK, TaskState(task.state), TaskState.ACCEPTED, f"Task {task.id}")
    consumed = normalize(outcome.samples) if task.phase == "train" else ()
    first = await submissions.add_submission(
        tx,
        task_id=task.id,
        job_id=task.job_id,
        round=into[0],
        take=into[1],
        base_version=task.round,
        phase=task.phase,
        node_id=task.node_id,
        attempt=task.attempt,
        delta_sha=outcome.delta.sha256 if outcome.delta else "",
        delta_size=outcome.delta.size if outcome.delta else 0,
        samples=ranges_to_json(consumed),
        steps=outcome.steps,
        tokens=outcome.tokens,
        metrics=dict(outcome.metrics),
        outcome=task.outcome,
        signature=task.signature,
        accepted_at=tx.now,
    )
    assert first, "the guarded state lets a task be accepted once"
    moved = await leases.leave_state(
        tx,
        task.id,
        TaskState.VERIFYING,
        TaskState.ACCEPTED,
        attempt=task.attempt,
        node_id=task.node_id,
        samples=ranges_to_json(consumed),
        ended_at=tx.now,
    )
    assert moved is not None, "the job's row is locked"
    if task.phase == "train":
        job = await jobs.get(tx, task.job_id)
        assert job is not None
        held = ranges_from_json(task.samples)
        await tasks.give_back(tx, job, without(held, consumed))
        if outcome.delta is not None:
            await records.add_blob(tx, outcome.delta, "delta", task.job_id)
    elif task.phase == "evaluate":
        await jobs.set_held_out(
            tx, task.job_id, task.round, float(outcome.metrics["held_out_loss"])
        )
    told = {"phase": task.phase, "round": task.round, "tokens": outcome.tokens}
    if into[0] != task.round:
        told["merged_in"] = into[0]
    await events.record(
        tx,
        "task.accepted",
        job_id=task.job_id,
        task_id=task.id,
        node_id=task.node_id,
        data=told,
    )


async def _reject(
    grid: Grid, tx: Tx, task: AnyRow, problem: DistribAIError, open_round: AnyRow | None
) -> None:
    """Reject a submission; a round that still has time gets a new task in its place."""
    told = clean(problem.message, MAX_REASON)
    reason = f"{told} [{problem.code}]"
    causes = [
        *task.causes,
        {
            "node_id": task.node_id,
            "attempt": task.attempt,
            "code": problem.code,
            "reason": told,
        },
    ]
    ended = await tasks.end(
        tx, task, TaskState.REJECTED, reason, causes=causes, failures=task.failures + 1
    )
    assert ended is not None, "the job's row is locked"
    await fleet.add_failure(tx, task.node_id, task.job_id, task.id, problem.code, told)
    job = await jobs.get(tx, task.job_id)
    assert job is not None
    spec = tasks.spec_of(job)
    if ended.failures >= spec.max_attempts:
        if task.phase == "train" and open_round is not None:
            await results.fail_job(tx, job, tasks.failure_report(ended))
        return
    if task.phase != "train":
        await tasks.add_again(tx, grid.new_id("task"), job, ended)
    elif open_round is not None:
        view = await view_round(tx, spec, open_round, grid.not_before)
        if view.decision.action != "merge":
            await tasks.add_replacement(tx, grid.new_id("task"), job, ended)


def without(held: Ranges, consumed: Ranges) -> Ranges:
    """The positions of ``held`` that are not in ``consumed``, which lies within it."""
    left: list[tuple[int, int]] = []
    for r in normalize(held):
        start = r.start
        for c in normalize(consumed):
            if r.start <= c.start and c.stop <= r.stop:
                if c.start > start:
                    left.append((start, c.start))
                start = c.stop
        if start < r.stop:
            left.append((start, r.stop))
    return ranges_from_json(left)
