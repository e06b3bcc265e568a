"""``/metrics``: figures for Prometheus.

Closed like everything else: an operator's key (the scope ``metrics`` is all that it needs), unless
``orchestrator.open_metrics`` lets anybody who reaches the port read them. They name no job, node or
person, but they say how much there is.
"""

from __future__ import annotations

from fastapi import APIRouter, Response

from distribai.core.people import Scope
from distribai.orchestrator.http.security import Access, GridOf, allow
from distribai.orchestrator.metrics import CONTENT_TYPE

router = APIRouter(tags=["health"])


@router.get(
    "/metrics",
    summary="Figures for Prometheus",
    response_class=Response,
    responses={200: {"content": {"text/plain": {}}}},
)
@allow(Access.METRICS, Scope.METRICS)
async def metrics(grid: GridOf) -> Response:
    """Prometheus' text format, version 0.0.4. Figures of the grid are at most some seconds old."""
    return Response(await grid.metrics.page(grid), media_type=CONTENT_TYPE)
