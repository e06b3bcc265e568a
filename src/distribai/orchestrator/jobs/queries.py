"""What a person or a program may ask about jobs."""

from __future__ import annotations

from distribai.core.spec import BlobRef
from distribai.orchestrator.context import Grid
from distribai.orchestrator.records import (
    EventRecord,
    JobRecord,
    JobSummary,
    LogRecord,
    Page,
    RoundRecord,
    TaskRecord,
    VersionRecord,
)


async def resolve_job(grid: Grid, ref: str) -> str:
    """The id that ``ref`` means: a full id, a unique id prefix of 4 characters or more, or a name."""
    raise NotImplementedError


async def list_jobs(
    grid: Grid, state: str | None = None, limit: int = 50, cursor: str = ""
) -> Page[JobSummary]:
    """Jobs, newest first."""
    raise NotImplementedError


async def show_job(grid: Grid, job_id: str) -> JobRecord:
    """Everything about one job."""
    raise NotImplementedError


async def list_rounds(grid: Grid, job_id: str) -> tuple[RoundRecord, ...]:
    """All rounds of a job, oldest first."""
    raise NotImplementedError


async def list_tasks(
    grid: Grid, job_id: str, limit: int = 1000, cursor: str = ""
) -> Page[TaskRecord]:
    """Tasks of a job, oldest first."""
    raise NotImplementedError


async def list_versions(grid: Grid, job_id: str) -> tuple[VersionRecord, ...]:
    """All versions of a job's weights, from 0."""
    raise NotImplementedError


async def list_events(
    grid: Grid, job_id: str | None, after: str = "", limit: int = 200
) -> tuple[EventRecord, ...]:
    """State changes behind the cursor ``after`` (empty: from the beginning), in commit order."""
    raise NotImplementedError


async def list_logs(
    grid: Grid, job_id: str, after: str = "", limit: int = 200
) -> tuple[LogRecord, ...]:
    """Log lines behind the cursor ``after``, oldest first."""
    raise NotImplementedError


async def show_task(grid: Grid, task_id: str) -> TaskRecord:
    """One task."""
    raise NotImplementedError


async def wait_for_task(grid: Grid, task_id: str, timeout: float) -> TaskRecord:
    """The task once it has ended; after ``timeout`` seconds as it stands then."""
    raise NotImplementedError


async def weights_blob(grid: Grid, job_id: str, version: int | None) -> tuple[int, BlobRef]:
    """The version (None: the latest) and its safetensors blob."""
    raise NotImplementedError
