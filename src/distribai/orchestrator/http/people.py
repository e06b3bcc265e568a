"""Accounts and organizations, and the way in: a one-time login for a key."""

from __future__ import annotations

from typing import Annotated, Any

from fastapi import APIRouter, Path

from distribai.api import answers
from distribai.api import people as api
from distribai.core.people import Policy, Quota, Scope
from distribai.core.plain import to_plain
from distribai.orchestrator.http.parameters import Cursor, IdempotencyKey, Limit
from distribai.orchestrator.http.security import Access, Caller, GridOf, allow
from distribai.orchestrator.idempotency import key_for
from distribai.orchestrator.people import commands, credentials, queries

router = APIRouter(tags=["people"])

Account = Annotated[str, Path(description="An account's id or name.")]
Organization = Annotated[str, Path(description="An organization's id or name.")]


@router.post("/login", summary="Exchange a one-time login for a key", response_model=api.NewKey)
@allow(Access.PUBLIC)
async def log_in(body: api.LoginBody, grid: GridOf) -> Any:
    """The login is used up by it. The key's secret is told only now."""
    return to_plain(await credentials.log_in(grid, body.login, body.name))


@router.get("/me", summary="Who asks", response_model=api.Identity)
@allow(Access.ACCOUNTS)
async def me(grid: GridOf, caller: Caller) -> Any:
    """The account and the key behind this request, and what they may do."""
    return to_plain(await queries.whoami(grid, caller))


# ------------------------------------------------------------------ accounts


@router.get("/accounts", summary="List accounts", response_model=answers.Page[api.AccountSummary])
@allow(Access.OPERATORS)
async def list_accounts(grid: GridOf, limit: Limit = 1000, cursor: Cursor = "") -> Any:
    """All accounts, by name."""
    return to_plain(await queries.list_accounts(grid, limit, cursor))


@router.post("/accounts", summary="Make an account", status_code=201, response_model=api.NewLogin)
@allow(Access.OPERATORS, Scope.OPERATE)
async def create_account(
    body: api.NameBody, grid: GridOf, caller: Caller, idempotency_key: IdempotencyKey = None
) -> Any:
    """With a one-time login to hand to its owner. The same request with the same idempotency key
    makes another login, in the place of the one before."""
    key = key_for(caller.owner, "accounts", idempotency_key, body.name)
    return to_plain(await commands.create_account(grid, body.name, key))


@router.get("/accounts/{account}", summary="Show an account", response_model=api.Account)
@allow(Access.ACCOUNTS)
async def show_account(account: Account, grid: GridOf, caller: Caller) -> Any:
    """What it is where, its machines and what they did; to others than operators only their own."""
    return to_plain(await queries.show_account(grid, caller, account))


@router.post(
    "/accounts/{account}/login", summary="Make a one-time login", response_model=api.NewLogin
)
@allow(Access.OPERATORS, Scope.OPERATE)
async def new_login(account: Account, grid: GridOf) -> Any:
    """For somebody who has lost all keys; an earlier login lets nobody in any more."""
    return to_plain(await credentials.new_login(grid, account))


@router.post("/accounts/{account}/close", summary="Close an account", response_model=api.Account)
@allow(Access.OPERATORS, Scope.OPERATE)
async def close_account(account: Account, grid: GridOf, caller: Caller) -> Any:
    """Its keys and invites let nobody in any more. What it did stays on record."""
    await commands.close_account(grid, account)
    return to_plain(await queries.show_account(grid, caller, account))


# ------------------------------------------------------------------ organizations


@router.get(
    "/organizations",
    summary="List organizations",
    response_model=answers.Page[api.Organization],
)
@allow(Access.ACCOUNTS)
async def list_organizations(
    grid: GridOf, caller: Caller, limit: Limit = 100, cursor: Cursor = ""
) -> Any:
    """Those that the caller is in, by name; operators see all."""
    return to_plain(await queries.list_organizations(grid, caller, limit, cursor))


@router.post(
    "/organizations",
    summary="Make an organization",
    status_code=201,
    response_model=api.Organization,
)
@allow(Access.OPERATORS, Scope.OPERATE)
async def create_organization(
    body: api.NameBody, grid: GridOf, caller: Caller, idempotency_key: IdempotencyKey = None
) -> Any:
    """It has no members, no limits, and its jobs wait for the operator."""
    key = key_for(caller.owner, "organizations", idempotency_key, body.name)
    made = await commands.create_organization(grid, body.name, key)
    return to_plain(await queries.show_organization(grid, caller, made))


@router.get(
    "/organizations/{organization}",
    summary="Show an organization",
    response_model=api.Organization,
)
@allow(Access.ACCOUNTS)
async def show_organization(organization: Organization, grid: GridOf, caller: Caller) -> Any:
    """Its rules and members; to others than operators only one that they are in."""
    return to_plain(await queries.show_organization(grid, caller, organization))


@router.put(
    "/organizations/{organization}/members/{account}",
    summary="Add a member, or change its role",
    response_model=api.Organization,
)
@allow(Access.OPERATORS, Scope.OPERATE)
async def set_role(
    organization: Organization, account: Account, body: api.RoleBody, grid: GridOf, caller: Caller
) -> Any:
    """The role ``operator`` is the whole grid's, and given in ``home`` alone."""
    await commands.set_role(grid, organization, account, body.role)
    return to_plain(await queries.show_organization(grid, caller, organization))


@router.delete(
    "/organizations/{organization}/members/{account}",
    summary="Remove a member",
    response_model=api.Organization,
)
@allow(Access.OPERATORS, Scope.OPERATE)
async def remove_member(
    organization: Organization, account: Account, grid: GridOf, caller: Caller
) -> Any:
    """Its jobs stay the organization's."""
    await commands.remove_member(grid, organization, account)
    return to_plain(await queries.show_organization(grid, caller, organization))


@router.put(
    "/organizations/{organization}/policy",
    summary="Set the acceptance policy",
    response_model=api.Organization,
)
@allow(Access.OPERATORS, Scope.OPERATE)
async def set_policy(
    organization: Organization, body: api.PolicyBody, grid: GridOf, caller: Caller
) -> Any:
    """It decides about jobs that are submitted from now on."""
    await commands.set_policy(grid, organization, Policy(**body.model_dump()))
    return to_plain(await queries.show_organization(grid, caller, organization))


@router.put(
    "/organizations/{organization}/quota",
    summary="Set the quotas",
    response_model=api.Organization,
)
@allow(Access.OPERATORS, Scope.OPERATE)
async def set_quota(
    organization: Organization, body: api.QuotaBody, grid: GridOf, caller: Caller
) -> Any:
    """They limit what is submitted and uploaded from now on."""
    await commands.set_quota(grid, organization, Quota(**body.model_dump()))
    return to_plain(await queries.show_organization(grid, caller, organization))
