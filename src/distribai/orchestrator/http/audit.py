"""Who did what, when, and by which key."""

from __future__ import annotations

from functools import partial
from typing import Any

from fastapi import APIRouter
from starlette.requests import Request

from distribai.api import answers
from distribai.api import people as api
from distribai.core.plain import to_plain
from distribai.orchestrator.http.jobs import poll
from distribai.orchestrator.http.keys import OfAccount
from distribai.orchestrator.http.parameters import After, Limit, Wait
from distribai.orchestrator.http.security import Access, AskAgain, GridOf, allow
from distribai.orchestrator.people import queries

router = APIRouter(tags=["people"])


@router.get(
    "/audit",
    summary="Follow what people did",
    response_model=answers.Listing[api.AuditRecord],
)
@allow(Access.OPERATORS)
async def audit(
    request: Request,
    grid: GridOf,
    after: After = "",
    limit: Limit = 200,
    wait: Wait = 0.0,
    account: OfAccount = "",
    *,
    ask_again: AskAgain,
) -> Any:
    """Changes that people asked for, in commit order; with ``wait`` the answer is held until there
    is one."""
    ask = partial(queries.audit, grid, after, limit, account)
    found = await poll(request, grid, wait, ask, ask_again)
    return {"items": to_plain(found)}
