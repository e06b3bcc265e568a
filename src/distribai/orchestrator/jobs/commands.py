"""What changes a job on a person's word."""

from __future__ import annotations

from distribai.core.spec import JobSpec
from distribai.orchestrator.context import Grid


async def create_job(grid: Grid, spec: JobSpec, idempotency_key: str | None, by: str) -> str:
    """Make a job, state ``submitted``; its id. The same key with the same spec is the same job."""
    raise NotImplementedError


async def accept_job(grid: Grid, job_id: str, by: str) -> None:
    """Queue a submitted job; accepting an accepted job is no error."""
    raise NotImplementedError


async def decline_job(grid: Grid, job_id: str, why: str, by: str) -> None:
    """Refuse a submitted job."""
    raise NotImplementedError


async def cancel_job(grid: Grid, job_id: str, why: str, by: str) -> None:
    """End an open job; its tasks end with it."""
    raise NotImplementedError


async def pause_job(grid: Grid, job_id: str, by: str) -> None:
    """Let a running job rest: nothing new is leased."""
    raise NotImplementedError


async def resume_job(grid: Grid, job_id: str, by: str) -> None:
    """Let a paused job go on."""
    raise NotImplementedError


async def request_generation(
    grid: Grid,
    job_id: str,
    version: int | None,
    prompt: str,
    max_tokens: int,
    temperature: float,
    seed: int,
) -> str:
    """Queue a generate task from ``version`` (None: the latest); its id."""
    raise NotImplementedError
