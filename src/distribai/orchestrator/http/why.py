"""Why nothing starts. ``{ref}`` is an id, a unique beginning of one,
or a name."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from fastapi import APIRouter

from distribai.api import why as why_answers
from distribai.core.plain import to_plain
from distribai.orchestrator.fleet import why as fleet
from distribai.orchestrator.http.security import Access, Caller, GridOf, SeenJob, SeenNode, allow
from distribai.orchestrator.jobs import why as jobs
from distribai.orchestrator.people.sight import told_to

job_router = APIRouter(prefix="/jobs", tags=["jobs"])
node_router = APIRouter(prefix="/nodes", tags=["nodes"])


@job_router.get("/{ref}/why", summary="Why a job is where it is", response_model=why_answers.JobWhy)
@allow(Access.VIEWERS)
async def why_job(job_id: SeenJob, grid: GridOf, caller: Caller) -> Any:
    """What it waits for, computed now from the scheduler's own functions."""
    found = await jobs.why_job(grid, job_id)
    return to_plain(replace(found, reasons=await told_to(grid, caller, found.reasons)))


@node_router.get(
    "/{ref}/why", summary="Why a node gets no work", response_model=why_answers.NodeWhy
)
@allow(Access.ACCOUNTS)
async def why_node(node_id: SeenNode, grid: GridOf, caller: Caller) -> Any:
    """What it holds, and for each job why nothing of it comes to this node; of jobs that the caller
    may not look at, only what kind of reason it is."""
    found = await fleet.why_node(grid, node_id)
    return to_plain(replace(found, reasons=await told_to(grid, caller, found.reasons)))
