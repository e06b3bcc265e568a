"""The row of a job that somebody names, or the refusal that says that there is none."""

from __future__ import annotations

from distribai.errors import NotFound
from distribai.store.engine import AnyRow, Tx
from distribai.store.statements import jobs


async def get_job(tx: Tx, job_id: str) -> AnyRow:
    """A job.

    Raises:
        NotFound: ``job.unknown``.
    """
    return _there(await jobs.get(tx, job_id), job_id)


async def lock_job(tx: Tx, job_id: str) -> AnyRow:
    """A job, its row locked until the end of the transaction.

    Raises:
        NotFound: ``job.unknown``.
    """
    return _there(await jobs.lock(tx, job_id), job_id)


def _there(job: AnyRow | None, job_id: str) -> AnyRow:
    if job is None:
        raise NotFound(
            "job.unknown", f"There is no job {job_id[:80]}.", "List jobs: distribai job list"
        )
    return job
