"""Webhooks: events that are posted to an address, signed. The operator's alone."""

from __future__ import annotations

from typing import Annotated, Any

from fastapi import APIRouter, Response
from pydantic import BaseModel, ConfigDict, Field

from distribai.api import answers
from distribai.core.addresses import MAX_URL
from distribai.core.people import Scope
from distribai.core.plain import to_plain
from distribai.core.webhooks import KIND_PATTERN, MAX_KINDS
from distribai.orchestrator.http.parameters import Cursor, IdempotencyKey, Limit
from distribai.orchestrator.http.security import Access, Caller, GridOf, allow
from distribai.orchestrator.idempotency import key_for
from distribai.orchestrator.webhooks import commands, queries

router = APIRouter(prefix="/webhooks", tags=["webhooks"])

Kind = Annotated[str, Field(pattern=KIND_PATTERN)]


class WebhookBody(BaseModel):
    """Where events shall go, and which: kinds (`job.completed`), families (`task.*`); none: all."""

    model_config = ConfigDict(extra="forbid", strict=True)

    url: Annotated[str, Field(min_length=1, max_length=MAX_URL)]
    kinds: Annotated[list[Kind], Field(max_length=MAX_KINDS)] = []


@router.post("", summary="Make a webhook", status_code=201, response_model=answers.WebhookMade)
@allow(Access.OPERATORS, Scope.OPERATE)
async def create_webhook(
    body: WebhookBody,
    grid: GridOf,
    caller: Caller,
    response: Response,
    idempotency_key: IdempotencyKey = None,
) -> Any:
    """For what happens from now on. The answer has the secret that signs deliveries; it is not
    shown again, but to the same request with the same idempotency key."""
    key = key_for(caller.owner, "webhooks", idempotency_key, body.model_dump())
    webhook_id, secret = await commands.create_webhook(
        grid, body.url, body.kinds, caller.title, key
    )
    response.headers["Location"] = f"/api/v1/webhooks/{webhook_id}"
    response.headers["Cache-Control"] = "no-store"
    return {**to_plain(await queries.show_webhook(grid, webhook_id)), "secret": secret}


@router.get("", summary="List webhooks", response_model=answers.Page[answers.WebhookRecord])
@allow(Access.OPERATORS)
async def list_webhooks(grid: GridOf, limit: Limit = 100, cursor: Cursor = "") -> Any:
    """Webhooks by id."""
    return to_plain(await queries.list_webhooks(grid, limit, cursor))


@router.get("/{webhook_id}", summary="Show a webhook", response_model=answers.WebhookRecord)
@allow(Access.OPERATORS)
async def show_webhook(webhook_id: str, grid: GridOf) -> Any:
    """One webhook: what waits for it, and whether it fails."""
    return to_plain(await queries.show_webhook(grid, webhook_id))


@router.delete("/{webhook_id}", summary="Delete a webhook", status_code=204)
@allow(Access.OPERATORS, Scope.OPERATE)
async def delete_webhook(webhook_id: str, grid: GridOf, caller: Caller) -> None:
    """With the log of its deliveries. Its secret is worth nothing afterwards."""
    await commands.delete_webhook(grid, webhook_id, caller.title)


@router.post("/{webhook_id}/test", summary="Send a test", response_model=answers.DeliveryRecord)
@allow(Access.OPERATORS, Scope.OPERATE)
async def test_webhook(webhook_id: str, grid: GridOf, caller: Caller) -> Any:
    """One `webhook.test` now, tried once; the answer tells what the receiver answered."""
    return to_plain(await commands.try_webhook(grid, webhook_id, caller.title))


@router.post(
    "/{webhook_id}/enable", summary="Enable a webhook again", response_model=answers.WebhookRecord
)
@allow(Access.OPERATORS, Scope.OPERATE)
async def enable_webhook(webhook_id: str, grid: GridOf, caller: Caller) -> Any:
    """Deliver again, from now on. What happened meanwhile is in the feed of events."""
    await commands.enable_webhook(grid, webhook_id, caller.title)
    return to_plain(await queries.show_webhook(grid, webhook_id))


@router.get(
    "/{webhook_id}/deliveries",
    summary="List deliveries",
    response_model=answers.Page[answers.DeliveryRecord],
)
@allow(Access.OPERATORS)
async def list_deliveries(
    webhook_id: str, grid: GridOf, limit: Limit = 100, cursor: Cursor = ""
) -> Any:
    """The log of a webhook, newest first: the last thousand, and what waits."""
    return to_plain(await queries.list_deliveries(grid, webhook_id, limit, cursor))
