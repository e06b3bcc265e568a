"""Merging rounds: freeze, compute, publish.

A round whose paradigm says *merge* is frozen (``closing``): what was accepted by then is merged,
and nothing else can join. The outer step runs in a worker thread over memory-mapped files. Its
blobs are stored first; then one transaction writes the new version, the round's manifest and the
events. The computation is a pure function of rows and blobs, so a round that a dead process left
``closing`` is simply merged again, to the same bytes.

A blob that is gone or torn (its hash says so) pauses the job and is named: once the file is back,
from a backup say, a resumed job merges the very same round.
"""

from __future__ import annotations

import tempfile
from pathlib import Path

from distribai import points
from distribai.core.plain import fingerprint, to_plain
from distribai.core.states import JOB, ROUND, JobState, RoundState, check
from distribai.errors import DistribAIError, Unavailable
from distribai.merge.manifests import RoundManifest, VersionManifest
from distribai.merge.outer import MergedFiles
from distribai.orchestrator import events
from distribai.orchestrator.context import Grid
from distribai.orchestrator.rounds import late, results, tasks
from distribai.orchestrator.rounds.computing import Inputs, compute, read_inputs
from distribai.orchestrator.rounds.decisions import lock_round, view_round
from distribai.store.engine import AnyRow, Tx
from distribai.store.statements import jobs, records, work


async def merge_all(grid: Grid) -> tuple[bool, float | None]:
    """Freeze every round that is ready and merge every frozen one.

    A merge that takes longer than the duty's lease may be done twice, by two replicas: both make
    the same blobs, and one of them publishes.

    Returns:
        Whether anything changed, and in how many seconds the next grace ends, if one runs.
    """
    changed = False
    async with grid.db.read() as tx:
        opened = await work.rounds_in(tx, RoundState.OPEN)
        graces = [r.deadline_at - tx.now for r in opened if r.deadline_at is not None]
    for row in opened:
        changed |= await _decide(grid, row)
    async with grid.db.read() as tx:
        # A person's pause has no reason: such a job merges what it has.
        resting = {j.id for j in await jobs.in_states(tx, (JobState.PAUSED,)) if j.reason}
        frozen = [
            r for r in await work.rounds_in(tx, RoundState.CLOSING) if r.job_id not in resting
        ]
    for row in frozen:
        await _merge(grid, row)
    return changed or bool(frozen), min(graces, default=None)


async def _decide(grid: Grid, row: AnyRow) -> bool:
    """Freeze or abandon an open round, or write down until when it waits."""
    async with grid.db.read() as tx:
        job = await jobs.get(tx, row.job_id)
        assert job is not None
        view = await view_round(tx, tasks.spec_of(job), row, grid.not_before)
    if view.decision.action == "wait" and view.decision.until == row.deadline_at:
        return False
    async with grid.db.write() as tx:
        locked = await lock_round(tx, row, RoundState.OPEN)
        if locked is None:
            return False
        job, current = locked
        view = await view_round(tx, tasks.spec_of(job), current, grid.not_before)
        decision = view.decision
        if decision.action == "wait" or view.checking:
            if decision.until != current.deadline_at:
                await work.set_deadline(tx, row, decision.until)
                told = {"round": row.number, "take": row.take, "until": decision.until}
                await events.record(tx, "round.deadline", job_id=row.job_id, data=told)
                grid.wake.set()
            return False
        if decision.action == "merge":
            reason = decision.reason + await late.carried_over(tx, current)
            await _freeze(tx, job, current, RoundState.CLOSING, reason)
        else:
            await _freeze(tx, job, current, RoundState.ABANDONED, decision.reason)
    return True


async def _freeze(tx: Tx, job: AnyRow, row: AnyRow, new: RoundState, reason: str) -> None:
    """Close a round for new work: what is still leased is late work for the next one, and what was
    late for this one has come too late."""
    check(ROUND, RoundState(row.state), new, f"Round {row.number + 1} of job {job.id}")
    await work.leave_round(tx, row, new, reason=reason, closed_at=tx.now)
    await late.end_expired(tx, job)
    await events.record(
        tx,
        f"round.{new.value}",
        job_id=job.id,
        data={"round": row.number, "take": row.take, "reason": reason},
    )


async def _merge(grid: Grid, row: AnyRow) -> None:
    inputs = await read_inputs(grid, row)
    with tempfile.TemporaryDirectory(prefix="merge-", dir=grid.scratch) as scratch:
        try:
            points.reach("merge.files.before")
            merged = await compute(grid, row, inputs, Path(scratch))
            points.reach("merge.files.after")
        except Unavailable:
            raise
        except DistribAIError as problem:
            if problem.code.startswith("blob."):
                await _rest(grid, row, problem)
            else:  # the same inputs would fail the same way again: this job cannot go on
                await _give_up(grid, row, problem)
            return
        names = {"theta": merged.theta, "momentum": merged.momentum, "update": merged.update}
        if merged.residual is not None:
            names["residual"] = merged.residual
        for name, ref in names.items():
            await grid.blobs.put_file(Path(scratch) / name, ref)
    await _publish(grid, row, inputs, merged)


async def _publish(grid: Grid, row: AnyRow, inputs: Inputs, merged: MergedFiles) -> None:
    new = row.number + 1
    tokens = sum(s.tokens for s in inputs.submissions)
    async with grid.db.write() as tx:
        job = await jobs.lock(tx, row.job_id)
        assert job is not None
        record = RoundManifest(
            job_id=job.id,
            round=row.number,
            manifest_hash=inputs.manifest.hash,
            base_version=row.number,
            base_hash=inputs.base.weights_hash,
            base_momentum_hash=inputs.base.outer_hash,
            submissions=inputs.submissions,
            choices=merged.choices,
            weights_hash=merged.weights_hash,
            momentum_hash=merged.momentum_hash,
            codec_down=inputs.spec.codec_down_of(row.number),
            base_residual_hash=inputs.base.residual_hash,
            residual_hash=merged.residual_hash,
        )
        moved = await work.leave_round(tx, row, RoundState.MERGED, manifest=to_plain(record))
        if not moved:  # cancelled while it was computed
            return
        version = VersionManifest(
            job_id=job.id,
            version=new,
            manifest_hash=inputs.manifest.hash,
            tensors=merged.tensors,
            weights_hash=merged.weights_hash,
            snapshot=merged.theta,
            update=merged.update,
            round_hash=fingerprint(record),
        )
        await _insert_version(tx, version, merged, len(inputs.submissions), tokens)
        await jobs.change(tx, job.id, version=new, tokens=job.tokens + tokens)
        await tasks.add_evaluation(grid, tx, job, new)
        data = {
            "round": row.number,
            "version": new,
            "submissions": len(inputs.submissions),
            "late": sum(s.staleness > 0 for s in inputs.submissions),
        }
        await events.record(tx, "round.merged", job_id=job.id, data=data)


async def _insert_version(
    tx: Tx, version: VersionManifest, merged: MergedFiles, contributors: int, tokens: int
) -> None:
    rest = merged.residual
    await jobs.add_version(
        tx,
        job_id=version.job_id,
        version=version.version,
        weights_hash=merged.weights_hash,
        weights_sha=merged.theta.sha256,
        weights_size=merged.theta.size,
        update_sha=merged.update.sha256,
        update_size=merged.update.size,
        outer_sha=merged.momentum.sha256,
        outer_size=merged.momentum.size,
        outer_hash=merged.momentum_hash,
        residual_sha="" if rest is None else rest.sha256,
        residual_size=0 if rest is None else rest.size,
        residual_hash=merged.residual_hash,
        manifest=to_plain(version),
        contributors=contributors,
        tokens=tokens,
        created_at=tx.now,
    )
    await records.add_blob(tx, merged.theta, "weights", version.job_id)
    await records.add_blob(tx, merged.update, "update", version.job_id)
    await records.add_blob(tx, merged.momentum, "other", version.job_id)
    if rest is not None:
        await records.add_blob(tx, rest, "other", version.job_id)


async def _give_up(grid: Grid, row: AnyRow, problem: DistribAIError) -> None:
    async with grid.db.write() as tx:
        locked = await lock_round(tx, row, RoundState.CLOSING)
        if locked is None:
            return
        job, _ = locked
        reason = f"round {row.number + 1} cannot be merged: {problem}"
        if job.state in (JobState.RUNNING, JobState.PAUSED):
            await results.fail_job(tx, job, reason)


async def _rest(grid: Grid, row: AnyRow, problem: DistribAIError) -> None:
    """Pause a job whose round needs a file that is damaged or gone; nothing of it is lost yet."""
    async with grid.db.write() as tx:
        locked = await lock_round(tx, row, RoundState.CLOSING)
        if locked is None:
            return  # another replica has merged it, and its base may be gone since
        job, _ = locked
        if job.state not in (JobState.RUNNING, JobState.PAUSED):
            return
        reason = (
            f"round {row.number + 1} cannot be merged: {problem.message} Put that file back from a "
            "backup, then resume the job"
        )
        if job.state == JobState.RUNNING:
            check(JOB, JobState.RUNNING, JobState.PAUSED, f"Job {job.id}")
        # One that a person has paused rests from now on for this reason, or it would be tried
        # again at once, for ever.
        await jobs.set_state(tx, job.id, JobState.PAUSED, reason=reason)
        await events.record(tx, "job.paused", job_id=job.id, data={"reason": reason})
