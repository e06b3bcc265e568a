"""Who may call what. Every route is the operators' alone unless its endpoint says otherwise.

Two questions are asked of every request. *May this caller use this route at all?* — that is
:data:`MATRIX`, by role and by the key's scopes; a route that forgets about access is closed, not
open. ``tests/http/test_access.py`` holds every route against every role. *May it use it on this
object?* — an object of others is answered like one that never was (:data:`SeenJob`,
:data:`SeenNode`); one that the caller may look at but not change is refused (:data:`OwnJob`).
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping
from enum import StrEnum
from typing import Annotated, Any, TypeVar

from fastapi import Depends, Path
from fastapi.security import HTTPAuthorizationCredentials, HTTPBearer
from starlette.requests import Request
from starlette.types import Scope as Asked

from distribai.core.people import Principal, Role, Scope
from distribai.errors import NotAllowed, Unauthenticated
from distribai.orchestrator import callers, events
from distribai.orchestrator.context import Grid
from distribai.orchestrator.fleet import why as nodes
from distribai.orchestrator.http import connections
from distribai.orchestrator.jobs import queries as jobs

F = TypeVar("F", bound=Callable[..., Any])


class Access(StrEnum):
    """Who may call a route."""

    OPERATORS = "operators"
    MEMBERS = "members"
    VIEWERS = "viewers"
    ACCOUNTS = "accounts"
    SENDERS = "senders"
    READERS = "readers"
    METRICS = "metrics"
    PUBLIC = "public"


NODE = "node"
ACCOUNT = "account"
"""What every account is, whatever its roles, also one that is in no organization."""

MATRIX: Mapping[Access, frozenset[str]] = {
    Access.OPERATORS: frozenset({Role.OPERATOR}),
    Access.METRICS: frozenset({Role.OPERATOR}),
    Access.MEMBERS: frozenset({Role.OPERATOR, Role.MEMBER}),
    Access.VIEWERS: frozenset({Role.OPERATOR, Role.MEMBER, Role.VIEWER}),
    Access.ACCOUNTS: frozenset({ACCOUNT}),
    Access.SENDERS: frozenset({Role.OPERATOR, Role.MEMBER, NODE}),
    Access.READERS: frozenset({Role.OPERATOR, Role.MEMBER, Role.VIEWER, NODE}),
}
"""The roles that may call a route, any one of which suffices; public ones ask for nobody's."""


def allow(access: Access, scope: Scope = Scope.READ) -> Callable[[F], F]:
    """Let ``access`` call an endpoint, with keys that have ``scope``."""

    def mark(endpoint: F) -> F:
        endpoint.__access__ = access  # type: ignore[attr-defined]
        endpoint.__scope__ = scope  # type: ignore[attr-defined]
        return endpoint

    return mark


def access_of(endpoint: object) -> tuple[Access, Scope]:
    """Who may call ``endpoint``, and the scope that a key needs for it."""
    access = Access(getattr(endpoint, "__access__", Access.OPERATORS))
    return access, Scope(getattr(endpoint, "__scope__", Scope.OPERATE))


def the_grid(request: Request) -> Grid:
    """The grid that this application serves."""
    grid: Grid = request.app.state.grid
    return grid


GridOf = Annotated[Grid, Depends(the_grid)]

FRESH_S = 1.0
"""For so many seconds a token that was looked up when its request's body began is not looked up
again."""

_LOOKED_UP = "looked_up"
"""Under this name a request's scope has its caller."""

_bearer = HTTPBearer(
    auto_error=False,
    scheme_name="token",
    description="A key of an account, or a node's session token (blobs only).",
)


async def authorize(
    request: Request,
    grid: GridOf,
    credentials: Annotated[HTTPAuthorizationCredentials | None, Depends(_bearer)],
) -> Principal | None:
    """Let the request pass, or refuse it; the caller (None on public routes).

    Raises:
        Unauthenticated: no bearer token, or one that nobody issued.
        NotAllowed: ``auth.forbidden``: none of the caller's roles, or none of its key's scopes.
        TooMany: the key or its owner asks too often.
    """
    access, scope = access_of(request.scope.get("endpoint"))
    if access is Access.PUBLIC or (access is Access.METRICS and grid.settings.open_metrics):
        return None
    if credentials is None:
        raise no_token()
    principal = _known(request.scope, credentials.credentials, grid.clock())
    if principal is None:
        principal = await callers.verify_token(grid, credentials.credentials)
    grid.limits.admit(credentials.credentials, principal.owner)
    _check(principal, access, scope, f"{request.method} {request.url.path}")
    events.act_as(principal)
    connections.prove(request.scope)
    return principal


def remember(scope: Asked, token: str, principal: Principal, now: float) -> None:
    """Keep who a request's token belongs to, which was looked up at ``now`` (the process's clock)
    before its body was read, for :func:`authorize` to find afterwards."""
    scope[_LOOKED_UP] = (token, principal, now)


def _known(scope: Asked, token: str, now: float) -> Principal | None:
    """Who was looked up for this request; None when nobody was, or when its body has taken so long
    that the key may be revoked meanwhile."""
    found: tuple[str, Principal, float] | None = scope.get(_LOOKED_UP)
    if found is None or found[0] != token or now - found[2] > FRESH_S:
        return None
    return found[1]


def no_token() -> Unauthenticated:
    """The refusal of who shows no credentials where some are needed."""
    return Unauthenticated(
        "auth.missing",
        "The request carries no bearer token.",
        "Send `Authorization: Bearer KEY`. The command line takes the key from "
        "DISTRIBAI_TOKEN, or from what `distribai login` or `orchestrator start` left.",
    )


def _check(principal: Principal, access: Access, scope: Scope, what: str) -> None:
    if principal.kind == "node":
        if NODE not in MATRIX[access]:
            raise NotAllowed(
                "auth.forbidden", f"A node's token may not call {what}.", "Use an account's key."
            )
        return
    if not MATRIX[access] & {ACCOUNT, *principal.roles.values()}:
        raise NotAllowed(
            "auth.forbidden",
            f"The account {principal.name} may not call {what}.",
            f"That takes the role {' or '.join(sorted(MATRIX[access] - {NODE}))}; operators give "
            "roles.",
        )
    if scope not in principal.scopes:
        raise NotAllowed(
            "auth.forbidden",
            f"This key may not call {what}: it lacks the scope {scope.value}.",
            f"Make one with it: `distribai grid key create NAME --scope {scope.value}`.",
        )


async def caller(principal: Annotated[Principal | None, Depends(authorize)]) -> Principal:
    """The caller of a route that is not public."""
    assert principal is not None, "a public route asks for its caller"
    return principal


Caller = Annotated[Principal, Depends(caller)]

Still = Callable[[], Awaitable[Principal]]
"""Asks anew who is calling, and whether they may: for answers that go on for a long time.

Raises as :func:`authorize`: the key was revoked or has expired, the account was closed, or none of
its roles allows it any more.
"""


async def still(
    request: Request,
    grid: GridOf,
    credentials: Annotated[HTTPAuthorizationCredentials | None, Depends(_bearer)],
) -> Still:
    """How an endpoint asks once more, without counting it as a request."""
    access, scope = access_of(request.scope.get("endpoint"))
    what = f"{request.method} {request.url.path}"

    async def ask() -> Principal:
        assert credentials is not None, "authorize() has let the request pass"
        principal = await callers.verify_token(grid, credentials.credentials)
        _check(principal, access, scope, what)
        return principal

    return ask


AskAgain = Annotated[Still, Depends(still)]

Ref = Annotated[str, Path(description="An id, a unique beginning of one, or a name.")]


async def seen_job(ref: Ref, grid: GridOf, caller: Caller) -> str:
    """The id of a job that the caller may look at.

    Raises:
        NotFound: ``job.unknown``: there is none, or it is others'.
    """
    return await jobs.resolve_job(grid, ref, caller.sees())


SeenJob = Annotated[str, Depends(seen_job)]


async def own_job(job_id: SeenJob, grid: GridOf, caller: Caller) -> str:
    """The id of a job that the caller may change.

    Raises:
        NotFound: ``job.unknown``, as :func:`seen_job`.
        NotAllowed: ``auth.forbidden``: the caller may only look at it.
    """
    allowed = caller.works_in()
    if allowed is not None and await jobs.organization_of(grid, job_id) not in allowed:
        raise NotAllowed(
            "auth.forbidden",
            "In this job's organization you may only look.",
            "Its members may change it; ask the operator for the role.",
        )
    return job_id


OwnJob = Annotated[str, Depends(own_job)]


async def seen_node(ref: Ref, grid: GridOf, caller: Caller) -> str:
    """The id of a node that the caller may look at: an operator any, others their own.

    Raises:
        NotFound: ``node.unknown``: there is none, or it is another's.
    """
    return await nodes.resolve_node(grid, ref, None if caller.operator else caller.account_id)


SeenNode = Annotated[str, Depends(seen_node)]
