"""Why nothing starts. ``{ref}`` is an id, a unique beginning of one,
or a name."""

from __future__ import annotations

from typing import Any

from fastapi import APIRouter

from distribai.api import why as why_answers
from distribai.core.plain import to_plain
from distribai.orchestrator.fleet import why as fleet
from distribai.orchestrator.http.security import GridOf
from distribai.orchestrator.jobs import queries
from distribai.orchestrator.jobs import why as jobs

job_router = APIRouter(prefix="/jobs", tags=["jobs"])
node_router = APIRouter(prefix="/nodes", tags=["nodes"])


@job_router.get("/{ref}/why", summary="Why a job is where it is", response_model=why_answers.JobWhy)
async def why_job(ref: str, grid: GridOf) -> Any:
    """What it waits for, computed now from the scheduler's own functions."""
    return to_plain(await jobs.why_job(grid, await queries.resolve_job(grid, ref)))


@node_router.get(
    "/{ref}/why", summary="Why a node gets no work", response_model=why_answers.NodeWhy
)
async def why_node(ref: str, grid: GridOf) -> Any:
    """What it holds, and for each job why nothing of it comes to this node."""
    return to_plain(await fleet.why_node(grid, await fleet.resolve_node(grid, ref)))
