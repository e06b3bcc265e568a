"""``/metrics``: figures for Prometheus.

Closed like everything else: the operator's token, unless ``orchestrator.open_metrics`` lets anybody
who reaches the port read them. They name no job, node or person, but they say how much there is.
"""

from __future__ import annotations

from fastapi import APIRouter, Response

from distribai.orchestrator.http.security import GridOf, open_metrics
from distribai.orchestrator.metrics import CONTENT_TYPE

router = APIRouter(tags=["health"])


@router.get(
    "/metrics",
    summary="Figures for Prometheus",
    response_class=Response,
    responses={200: {"content": {"text/plain": {}}}},
)
@open_metrics
async def metrics(grid: GridOf) -> Response:
    """Prometheus' text format, version 0.0.4. Figures of the grid are at most some seconds old."""
    return Response(await grid.metrics.page(grid), media_type=CONTENT_TYPE)
