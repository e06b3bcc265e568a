"""Trying again what has ended: a new job from the last version of another."""

from __future__ import annotations

from distribai.core.people import Principal
from distribai.core.retry import retry_spec
from distribai.core.spec import BlobRef
from distribai.core.states import JobState
from distribai.errors import Conflict
from distribai.orchestrator.context import Grid
from distribai.orchestrator.jobs import commands
from distribai.orchestrator.jobs.rows import get_job
from distribai.orchestrator.rounds.tasks import spec_of
from distribai.store.statements import jobs as statements

RETRIED = frozenset({JobState.FAILED, JobState.CANCELLED})


async def retry_job(
    grid: Grid,
    job_id: str,
    idempotency_key: str | None,
    by: str,
    caller: Principal | None = None,
) -> str:
    """Make a new job, in state ``submitted``, that goes on from the last version of one that failed
    or was cancelled, and return its id.

    It belongs to the same organization, does the steps that are left, and draws the samples that
    the other has not consumed. The other stays as it is.

    Raises:
        NotFound: ``job.unknown``.
        Conflict: ``job.state``: it has not ended, was declined, or has no round left;
            ``http.idempotency``: as for any new job.
        DistribAIError: whatever else refuses a new job.
    """
    async with grid.db.read() as tx:
        job = await get_job(tx, job_id)
        version = await statements.version(tx, job_id, job.version)
        assert version is not None, "a job's version has a row"
        pool = statements.pool_of(job)
    if JobState(job.state) not in RETRIED:
        raise Conflict(
            "job.state",
            f"Job {job.name} is {job.state}: only what failed or was cancelled is retried.",
            "Submit its recipe again for a job from the start.",
        )
    weights = BlobRef(version.weights_sha, version.weights_size)
    try:
        spec = retry_spec(spec_of(job), job.version, weights)
    except ValueError as problem:
        raise Conflict("job.state", f"Job {job.name} cannot be retried: {problem}.") from problem
    origin = commands.Origin(job.id, job.organization_id, pool, job.weight)
    return await commands.create_job(grid, spec, idempotency_key, by, caller=caller, origin=origin)
