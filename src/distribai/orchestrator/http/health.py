"""Is it alive, is it ready, what is wrong."""

from __future__ import annotations

from typing import Any

from fastapi import APIRouter, Response

from distribai.api import answers
from distribai.core.plain import to_plain
from distribai.errors import NotFound, Unavailable
from distribai.orchestrator.fleet import queries
from distribai.orchestrator.http import problems
from distribai.orchestrator.http.security import Access, Caller, GridOf, allow

probes = APIRouter(tags=["health"])
router = APIRouter(tags=["health"])


@probes.get("/healthz", summary="Is the process alive?")
@allow(Access.PUBLIC)
async def healthz() -> dict[str, str]:
    """200 as long as the process answers at all."""
    return {"status": "ok"}


@probes.get("/readyz", summary="Can it serve?", responses={503: {"description": "Not now."}})
@allow(Access.PUBLIC)
async def readyz(grid: GridOf, response: Response) -> dict[str, str]:
    """200 when the database answers, else 503. No details: it is public.

    What is wrong with the grid as a whole (no node, no blob store) is no reason to send nobody to
    this process: a load balancer would take all replicas away, and the nodes with them."""
    try:
        await queries.knock(grid)
    except Unavailable:
        response.status_code = 503
        return {"status": "not ready"}
    return {"status": "ready"}


@router.get(
    "/ca",
    summary="The grid's CA certificate",
    response_class=Response,
    responses={
        200: {"content": {"application/x-pem-file": {}}},
        404: {
            "description": "The grid has no CA of its own.",
            "content": {problems.MEDIA_TYPE: {"schema": {"$ref": "#/components/schemas/Problem"}}},
        },
    },
)
@allow(Access.PUBLIC)
async def certificate_authority(grid: GridOf) -> Response:
    """In PEM. Whoever fetches it compares its SHA-256 with the one that the join link promises; 404
    where the grid has no TLS, or a certificate that the system's authorities vouch for."""
    if not grid.ca_pem:
        raise NotFound("grid.missing", "This grid has no certificate authority of its own.")
    return Response(grid.ca_pem, media_type="application/x-pem-file")


@router.get("/health", summary="The grid's health", response_model=answers.GridSummary)
@allow(Access.ACCOUNTS)
async def health(grid: GridOf, caller: Caller) -> Any:
    """Nodes, jobs and tasks in numbers, and what is wrong, in sentences; jobs are those that the
    caller may look at."""
    return to_plain(await queries.summary(grid, caller.sees()))
