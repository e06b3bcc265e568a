"""What the operator may do with webhooks. Each change is an event itself, with who made it."""

from __future__ import annotations

from collections.abc import Sequence

from distribai.core.addresses import parse_target
from distribai.core.states import WEBHOOK, DeliveryState, WebhookState, check
from distribai.core.text import MAX_REASON, clean
from distribai.core.webhooks import check_kinds, key_id, secret_of
from distribai.errors import Conflict, Unavailable, UsageError
from distribai.orchestrator import events
from distribai.orchestrator.context import Grid
from distribai.orchestrator.idempotency import Key, once
from distribai.orchestrator.records import EventRecord
from distribai.orchestrator.webhooks.delivering import rule_of, send, sender_of
from distribai.orchestrator.webhooks.keys import key_of
from distribai.orchestrator.webhooks.queries import DeliveryRecord, delivery_of, unknown
from distribai.orchestrator.webhooks.sending import Sender
from distribai.store import outbox
from distribai.store.engine import AnyRow, Tx
from distribai.store.statements import facts, webhooks

MAX_WEBHOOKS = 200
"""Webhooks of one grid: each is a reader of all events."""


async def create_webhook(
    grid: Grid, url: str, kinds: Sequence[str], by: str, key: Key | None = None
) -> tuple[str, str]:
    """Make a webhook for what happens from now on; its id and its secret.

    The secret can be told again only to the same request with the same idempotency key.

    Raises:
        UsageError: ``webhook.url``: not an address that deliveries can go to; ``usage.invalid``.
        Conflict: ``webhook.state``: there are too many; ``http.idempotency``.
        Unavailable: ``webhook.key``: this process has not the key of the others.
        Unavailable: ``webhook.key``.
    """
    target, kinds = parse_target(url), check_kinds(kinds)
    # A name is resolved at each delivery; what can be said of the text is said now.
    literal, rule = target.literal, rule_of(grid)
    refused = rule(literal, target.port) if literal else _port_refused(grid, target.port)
    if refused:
        raise UsageError(
            "webhook.url",
            f"Nothing may be sent there: {refused}.",
            "Receivers are public, on port 80 or 443. `webhooks.allow_private` in the settings "
            "opens the operator's own network.",
            field="url",
        )
    async with grid.db.read() as tx:
        first = await webhooks.count(tx) == 0
    # Where there are webhooks there is a key: a second one would part the grid's replicas.
    secret_key = key_of(grid, make=first)

    async def make(tx: Tx) -> str:
        if await webhooks.count(tx) >= MAX_WEBHOOKS:
            raise Conflict(
                "webhook.state",
                f"The grid has {MAX_WEBHOOKS} webhooks already.",
                "Delete one: distribai webhook delete ID",
            )
        await _check_key(tx, key_id(secret_key))
        webhook_id = grid.new_id("hook")
        await webhooks.add(
            tx,
            id=webhook_id,
            url=url,
            kinds=list(kinds),
            state=WebhookState.ACTIVE.value,
            reason="",
            key_id=key_id(secret_key),
            created_at=tx.now,
            created_by=by,
            cursor=await outbox.end(tx),
            failures=0,
            next_at=tx.now,
        )
        await _event(tx, "webhook.created", webhook_id, by)
        return webhook_id

    webhook_id = await once(grid, key, make)
    grid.wake.set()
    return webhook_id, secret_of(secret_key, webhook_id)


async def _check_key(tx: Tx, mine: str) -> None:
    """Let all webhooks of a grid be made with one key.

    Raises:
        Unavailable: ``webhook.key``: there are some that were made with another one than this
            process has.
    """
    # Written first: of two replicas that make the grid's first webhook, one waits for the other.
    await facts.put(tx, "webhook_key", mine)
    if others := await webhooks.count_of_other_keys(tx, mine):
        raise Unavailable(
            "webhook.key",
            f"{others} of the grid's webhooks were made with another key than this process has.",
            "Give every replica the same webhooks.key; if it is lost, delete those webhooks and "
            "make them again.",
        )


def _port_refused(grid: Grid, port: int) -> str:
    """Why no name can be reached at that port."""
    if grid.settings.webhooks.allow_private or port in (80, 443):
        return ""
    return f"port {port} is neither 80 nor 443"


async def delete_webhook(grid: Grid, webhook_id: str, by: str) -> None:
    """Delete a webhook with the log of its deliveries.

    Raises:
        NotFound: ``webhook.unknown``.
    """
    async with grid.db.write() as tx:
        await _lock(tx, webhook_id)
        await webhooks.remove(tx, webhook_id)
        await _event(tx, "webhook.deleted", webhook_id, by)


async def enable_webhook(grid: Grid, webhook_id: str, by: str) -> None:
    """Deliver again, from now on; what happened meanwhile is in the feed of events. Enabling an
    active one changes nothing.

    Raises:
        NotFound: ``webhook.unknown``.
    """
    async with grid.db.write() as tx:
        hook = await _lock(tx, webhook_id)
        if hook.state == WebhookState.ACTIVE:
            return
        check(WEBHOOK, WebhookState(hook.state), WebhookState.ACTIVE, f"Webhook {webhook_id}")
        await webhooks.change(
            tx,
            webhook_id,
            state=WebhookState.ACTIVE.value,
            reason="",
            cursor=await outbox.end(tx),
            failures=0,
            failing_since=None,
            next_at=tx.now,
        )
        await _event(tx, "webhook.enabled", webhook_id, by)
    grid.wake.set()


async def try_webhook(
    grid: Grid, webhook_id: str, by: str, sender: Sender | None = None
) -> DeliveryRecord:
    """Send one ``webhook.test`` now, whatever the webhook's state and filter, and tell what became
    of it. It is tried once.

    Raises:
        NotFound: ``webhook.unknown``.
        Unavailable: ``webhook.key``: it was made with another key than this process has.
    """
    async with grid.db.write() as tx:
        hook = await _lock(tx, webhook_id)
        if hook.key_id != key_id(key_of(grid)):
            raise Unavailable(
                "webhook.key",
                f"The webhook {webhook_id} was made with another key than this process has.",
                "Give every replica the same webhooks.key; if it is lost, make the webhook again.",
            )
        # Its row is there before it is sent: what a receiver knows of is in the log.
        number = await webhooks.add_test(tx, webhook_id, "it is being sent")
        event = EventRecord("", tx.now, "webhook.test", "", "", "", {"by": by})
    answer = await send(grid, sender or sender_of(grid), hook, f"dlv_{number}", event)
    state = DeliveryState.DELIVERED if answer.ok else DeliveryState.FAILED
    async with grid.db.write() as tx:
        row = await webhooks.tried(
            tx,
            number,
            0,
            state,
            status=answer.status,
            reason=clean(answer.reason, MAX_REASON, lines=False),
            seconds=answer.seconds,
        )
    if row is None:  # somebody has deleted the webhook meanwhile
        raise unknown(webhook_id)
    return delivery_of(row)


async def _lock(tx: Tx, webhook_id: str) -> AnyRow:
    hook = await webhooks.lock(tx, webhook_id) if webhook_id.isprintable() else None
    if hook is None:
        raise unknown(webhook_id)
    return hook


async def _event(tx: Tx, kind: str, webhook_id: str, by: str) -> None:
    await events.record(tx, kind, data={"webhook": webhook_id, "by": by})
