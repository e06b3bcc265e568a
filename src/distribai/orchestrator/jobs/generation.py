"""Samples that people want of a version: a job's generate tasks."""

from __future__ import annotations

from distribai.core.plain import canonical_json
from distribai.core.states import TASK, TaskState, is_terminal
from distribai.errors import InvalidSpec, NotFound
from distribai.orchestrator.context import Grid
from distribai.orchestrator.idempotency import Key, once
from distribai.orchestrator.jobs.rows import lock_job
from distribai.orchestrator.rounds import tasks as task_rows
from distribai.store.engine import Tx
from distribai.store.statements import jobs as statements
from distribai.store.statements import work

MAX_GENERATED_TOKENS = 100_000


async def request_generation(
    grid: Grid,
    job_id: str,
    version: int | None,
    prompt: str,
    max_tokens: int,
    temperature: float,
    seed: int,
    key: Key | None = None,
) -> str:
    """Queue a generate task from ``version`` (None: the latest) and return its id; with a key that
    was used for the same request, that one's id.

    Raises:
        NotFound: ``job.unknown`` or ``job.no_weights``.
        InvalidSpec: ``spec.invalid``: a figure is out of bounds.
        Conflict: ``http.idempotency``: the key was used for another request.
    """
    if not 1 <= max_tokens <= MAX_GENERATED_TOKENS or not 0 <= temperature <= 100:
        raise InvalidSpec(
            "spec.invalid",
            f"Cannot generate {max_tokens} tokens at temperature {temperature}.",
            f"Tokens: 1 to {MAX_GENERATED_TOKENS}; temperature: 0 to 100.",
        )
    params = {"prompt": prompt, "max_tokens": max_tokens, "temperature": temperature, "seed": seed}
    canonical_json(params)  # refuses NaN before anything is written

    async def make(tx: Tx) -> str:
        job = await lock_job(tx, job_id)
        number = job.version if version is None else version
        if not await statements.has_version(tx, job_id, number):
            raise NotFound(
                "job.no_weights",
                f"Job {job_id} has no version {number}; its latest is {job.version}.",
                "Wait for it, or take an earlier version.",
            )
        task_id = grid.new_id("task")
        await task_rows.add(tx, task_id, job, number, "generate", params=params)
        return task_id

    task_id = await once(grid, key, make)
    grid.wake.set()
    return task_id


async def withdraw_generation(grid: Grid, task_id: str, why: str) -> None:
    """Cancel a sample that nobody waits for any more; one that has ended stays as it is."""
    async with grid.db.write() as tx:
        task = await work.get_task(tx, task_id)
        assert task is not None, "tasks are never deleted"
        if not is_terminal(TASK, TaskState(task.state)):
            await task_rows.end(tx, task, TaskState.CANCELLED, why)
    grid.wake.set()
