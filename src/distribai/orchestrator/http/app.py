"""The application: routers, error answers, access, all under one grid."""

from __future__ import annotations

from typing import Any

from fastapi import Depends, FastAPI

from distribai import __version__
from distribai.orchestrator.context import Grid
from distribai.orchestrator.http import (
    audit,
    blobs,
    certificates,
    events,
    fleet,
    health,
    jobs,
    keys,
    metrics,
    people,
    problems,
    webhooks,
    weights,
    why,
)
from distribai.orchestrator.http.bodies import Bodies
from distribai.orchestrator.http.description import Described
from distribai.orchestrator.http.middleware import PREFIX, Doorman, Envelope
from distribai.orchestrator.http.security import Access, allow, authorize


def create_app(grid: Grid) -> FastAPI:
    """The ASGI application of one grid. It starts and owns nothing: ``grid`` is its state."""
    app = Described(
        title="DistribAI",
        version=__version__,
        summary="Jobs, nodes, events and blobs of one grid.",
        dependencies=[Depends(authorize)],
        # The interactive pages would load scripts from elsewhere.
        docs_url=None,
        redoc_url=None,
        openapi_url=None,
    )
    app.state.grid = grid
    problems.install(app)
    app.add_middleware(Bodies, grid=lambda: app.state.grid)
    app.add_middleware(Doorman, limits=lambda: app.state.grid.limits)
    app.add_middleware(
        Envelope,
        # Asked of the state: one application may serve another grid later, in tests.
        clock=lambda: app.state.grid.clock(),
        entropy=lambda count: app.state.grid.entropy(count),
        observe=lambda *request: app.state.grid.metrics.request(*request),
    )
    app.include_router(health.probes)
    app.include_router(metrics.router)
    for router in (
        health.router,
        jobs.router,
        why.job_router,
        weights.router,
        blobs.router,
        fleet.router,
        certificates.router,
        why.node_router,
        events.router,
        webhooks.router,
        people.router,
        keys.router,
        audit.router,
    ):
        app.include_router(router, prefix=PREFIX)

    @app.get(f"{PREFIX}/openapi.json", tags=["health"], summary="This description")
    @allow(Access.PUBLIC)
    async def openapi() -> dict[str, Any]:
        return app.openapi()

    return app
