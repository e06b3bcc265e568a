"""When a job is done: all rounds merged, the last held-out loss known or given up."""

from __future__ import annotations

from distribai.core.states import JobState, TaskState
from distribai.orchestrator.context import Grid
from distribai.orchestrator.jobs.commands import end_job
from distribai.store.engine import AnyRow, Tx
from distribai.store.statements import jobs, work


async def complete_jobs(grid: Grid) -> bool:
    """Complete every job that is done; whether any was."""
    async with grid.db.read() as tx:
        running = await jobs.in_states(tx, (JobState.RUNNING,))
        done = [j for j in running if await _outcome(tx, j) is not None]
    for job in done:
        async with grid.db.write() as tx:
            locked = await jobs.lock(tx, job.id)
            assert locked is not None
            outcome = await _outcome(tx, locked)
            if locked.state == JobState.RUNNING and outcome is not None:
                await end_job(tx, locked, JobState.COMPLETED, outcome)
    return bool(done)


async def _outcome(tx: Tx, job: AnyRow) -> str | None:
    """What to say of a job that is done; None while it is not."""
    if job.version < job.rounds_total:
        return None
    version = await jobs.version(tx, job.id, job.version)
    assert version is not None
    if version.held_out_loss is not None:
        return ""
    tasks = [
        t
        for t in await work.tasks_in(tx, tuple(TaskState), job_id=job.id)
        if t.phase == "evaluate" and t.round == job.version
    ]
    if any(TaskState(t.state) in work.OPEN_TASKS for t in tasks):
        return None
    why = tasks[-1].reason if tasks else "no task for it exists"
    return f"The last version's held-out loss could not be measured: {why}"
