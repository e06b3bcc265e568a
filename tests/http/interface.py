"""The interface of any grid, called without a network."""

from __future__ import annotations

import httpx
from fastapi import FastAPI
from starlette.types import Receive, Scope, Send

from distribai.orchestrator.context import Grid
from distribai.orchestrator.http.app import create_app

_made: list[FastAPI] = []
"""One application for all tests: making it takes longer than most of them."""


class Interface:
    """The ASGI application of one grid: the process's one application, which serves the grid that
    was asked last. What it has begun for another grid goes on with that one."""

    def __init__(self, grid: Grid) -> None:
        self._grid = grid
        if not _made:
            _made.append(create_app(grid))

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Serve one request."""
        _made[0].state.grid = self._grid
        await _made[0](scope, receive, send)


def caller(
    grid: Grid, token: str = "", *, address: str = "127.0.0.1", **headers: str
) -> httpx.AsyncClient:
    """A client of ``grid``'s interface that comes from ``address``; a defect is answered, too."""
    transport = httpx.ASGITransport(
        Interface(grid), raise_app_exceptions=False, client=(address, 123)
    )
    if token:
        headers["Authorization"] = f"Bearer {token}"
    return httpx.AsyncClient(transport=transport, base_url="http://grid", headers=headers)
