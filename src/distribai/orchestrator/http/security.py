"""Who may call what. Every route is the operator's alone unless its endpoint says otherwise.

:func:`authorize` is a dependency of the whole application, so a route that forgets about access is
closed, not open. ``tests/http/test_access.py`` lists every route against every role.
"""

from __future__ import annotations

from collections.abc import Callable
from enum import StrEnum
from typing import Annotated, Any, TypeVar

from fastapi import Depends
from fastapi.security import HTTPAuthorizationCredentials, HTTPBearer
from starlette.requests import Request

from distribai.errors import NotAllowed, Unauthenticated
from distribai.orchestrator.context import Grid
from distribai.orchestrator.fleet import tokens
from distribai.orchestrator.records import Principal

F = TypeVar("F", bound=Callable[..., Any])


class Access(StrEnum):
    """Who may call a route."""

    OPERATOR = "operator"
    NODES = "nodes"
    METRICS = "metrics"
    PUBLIC = "public"


def open_to_nodes(endpoint: F) -> F:
    """Let nodes call ``endpoint``, beside the operator."""
    endpoint.__access__ = Access.NODES  # type: ignore[attr-defined]
    return endpoint


def open_to_everyone(endpoint: F) -> F:
    """Let anybody call ``endpoint``, without credentials."""
    endpoint.__access__ = Access.PUBLIC  # type: ignore[attr-defined]
    return endpoint


def open_metrics(endpoint: F) -> F:
    """Let anybody call ``endpoint``, if the setting ``orchestrator.open_metrics`` says so; else the
    operator alone."""
    endpoint.__access__ = Access.METRICS  # type: ignore[attr-defined]
    return endpoint


def access_of(endpoint: object) -> Access:
    """Who may call ``endpoint``."""
    return Access(getattr(endpoint, "__access__", Access.OPERATOR))


def the_grid(request: Request) -> Grid:
    """The grid that this application serves."""
    grid: Grid = request.app.state.grid
    return grid


GridOf = Annotated[Grid, Depends(the_grid)]

_bearer = HTTPBearer(
    auto_error=False,
    scheme_name="token",
    description="The operator's token, or a node's session token (blobs only).",
)


async def authorize(
    request: Request,
    grid: GridOf,
    credentials: Annotated[HTTPAuthorizationCredentials | None, Depends(_bearer)],
) -> Principal | None:
    """Let the request pass, or refuse it; the caller (None on public routes).

    Raises:
        Unauthenticated: no bearer token, or one that nobody issued.
        NotAllowed: a node outside the blobs.
        TooMany: the key or its owner asks too often.
    """
    access = access_of(request.scope.get("endpoint"))
    if access is Access.PUBLIC or (access is Access.METRICS and grid.settings.open_metrics):
        return None
    if credentials is None:
        raise Unauthenticated(
            "auth.missing",
            "The request carries no bearer token.",
            "Send `Authorization: Bearer TOKEN`; `orchestrator start` prints the operator's token "
            "once. The command line takes it from DISTRIBAI_TOKEN.",
        )
    principal = await tokens.verify_token(grid, credentials.credentials)
    grid.limits.admit(credentials.credentials, _owner(principal))
    if principal.kind != "operator" and access in (Access.OPERATOR, Access.METRICS):
        raise NotAllowed(
            "auth.forbidden",
            f"A {principal.kind}'s token may not call {request.method} {request.url.path}.",
            "Use the operator's token.",
        )
    return principal


def _owner(principal: Principal) -> str:
    return principal.node_id or principal.kind


async def caller(principal: Annotated[Principal | None, Depends(authorize)]) -> Principal:
    """The caller of a route that is not public."""
    assert principal is not None, "a public route asks for its caller"
    return principal


Caller = Annotated[Principal, Depends(caller)]
