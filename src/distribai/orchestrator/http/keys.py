"""Keys of accounts, and invites for their machines."""

from __future__ import annotations

from typing import Annotated, Any

from fastapi import APIRouter, Query

from distribai.api import answers
from distribai.api import people as api
from distribai.core.people import Scope
from distribai.core.plain import to_plain
from distribai.orchestrator.http.parameters import Cursor, IdempotencyKey, Limit
from distribai.orchestrator.http.security import Access, Caller, GridOf, allow
from distribai.orchestrator.idempotency import key_for
from distribai.orchestrator.people import credentials, queries

router = APIRouter(tags=["people"])

OfAccount = Annotated[
    str, Query(max_length=64, description="Of another account, by id or name; operators only.")
]


@router.get("/keys", summary="List keys", response_model=answers.Page[api.Key])
@allow(Access.ACCOUNTS)
async def list_keys(
    grid: GridOf,
    caller: Caller,
    account: OfAccount = "",
    limit: Limit = 1000,
    cursor: Cursor = "",
) -> Any:
    """The caller's, the newest first, also those that are over; never their secrets."""
    return to_plain(await queries.list_keys(grid, caller, account, limit, cursor))


@router.post("/keys", summary="Make a key", status_code=201, response_model=api.NewKey)
@allow(Access.ACCOUNTS, Scope.KEYS)
async def create_key(
    body: api.KeyBody, grid: GridOf, caller: Caller, idempotency_key: IdempotencyKey = None
) -> Any:
    """For the caller's account. It may do no more, and lasts no longer, than the key that asks. The
    same request with the same idempotency key gives the key another secret, in the place of the one
    before."""
    key = key_for(caller.owner, "keys", idempotency_key, body.model_dump(mode="json"))
    made = await credentials.create_key(grid, caller, body.name, body.scopes, body.expires_s, key)
    return to_plain(made)


@router.delete("/keys/{key_id}", summary="Revoke a key", response_model=api.Key)
@allow(Access.ACCOUNTS, Scope.KEYS)
async def revoke_key(key_id: str, grid: GridOf, caller: Caller) -> Any:
    """One of the caller's; operators may revoke anybody's. It stays in the list."""
    return to_plain(await credentials.revoke_key(grid, caller, key_id))


@router.get("/invites", summary="List invites", response_model=answers.Page[api.Invite])
@allow(Access.OPERATORS)
async def list_invites(grid: GridOf, limit: Limit = 1000, cursor: Cursor = "") -> Any:
    """All, the newest first; never their secrets."""
    return to_plain(await queries.list_invites(grid, limit, cursor))


@router.post("/invites", summary="Make an invite", status_code=201, response_model=api.NewInvite)
@allow(Access.OPERATORS, Scope.OPERATE)
async def create_invite(
    body: api.InviteBody, grid: GridOf, caller: Caller, idempotency_key: IdempotencyKey = None
) -> Any:
    """For an account's machines; the answer has the join link to paste there, told only now. The
    same request with the same idempotency key makes another link, in the place of the one
    before."""
    key = key_for(caller.owner, "invites", idempotency_key, body.model_dump(mode="json"))
    made = await credentials.create_invite(
        grid,
        body.account,
        trusted=body.trusted,
        uses=body.uses,
        expires_s=body.expires_s,
        note=body.note,
        key=key,
    )
    return to_plain(made)


@router.delete("/invites/{invite_id}", summary="Revoke an invite", response_model=api.Invite)
@allow(Access.OPERATORS, Scope.OPERATE)
async def revoke_invite(invite_id: str, grid: GridOf) -> Any:
    """It lets nobody in any more; nodes that came by it stay."""
    return to_plain(await credentials.revoke_invite(grid, invite_id))
