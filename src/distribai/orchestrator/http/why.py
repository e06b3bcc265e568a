"""Why nothing starts, and what happened to a node. ``{ref}`` is an id, a unique beginning of one,
or a name."""

from __future__ import annotations

from typing import Any

from fastapi import APIRouter
from starlette.requests import Request

from distribai.api import answers
from distribai.api import why as why_answers
from distribai.core.plain import to_plain
from distribai.orchestrator.fleet import why as fleet
from distribai.orchestrator.http.jobs import After, Limit, Wait, poll
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


@node_router.get(
    "/{ref}/events",
    summary="Follow a node's state changes",
    response_model=answers.Listing[answers.EventRecord],
)
async def node_events(
    ref: str,
    request: Request,
    grid: GridOf,
    after: After = "",
    limit: Limit = 200,
    wait: Wait = 0.0,
) -> Any:
    """Its own changes and those of tasks while it held them, in commit order; with ``wait`` the
    answer is held until there is one."""
    node_id = await fleet.resolve_node(grid, ref)
    found = await poll(request, grid, wait, lambda: fleet.node_events(grid, node_id, after, limit))
    return {"items": to_plain(found)}
