"""What may be asked about webhooks. No answer holds a secret."""

from __future__ import annotations

from dataclasses import dataclass

from distribai.errors import NotFound, UsageError
from distribai.orchestrator.context import Grid
from distribai.orchestrator.records import Page
from distribai.store.engine import AnyRow
from distribai.store.statements import webhooks


@dataclass(frozen=True, slots=True)
class WebhookRecord:
    """One webhook. ``kinds`` empty means all events; ``failing_since`` is the first failure after
    the last success, ``next_at`` when the next try is due (both database time)."""

    id: str
    url: str
    kinds: tuple[str, ...]
    state: str
    reason: str
    created_at: float
    created_by: str
    cursor: str
    queued: int
    failures: int
    failing_since: float | None
    next_at: float
    delivered_at: float | None


@dataclass(frozen=True, slots=True)
class DeliveryRecord:
    """One event to one webhook, with what the last try gave. ``cursor`` is the event's, empty for a
    test."""

    id: str
    webhook_id: str
    kind: str
    cursor: str
    state: str
    attempts: int
    status: int | None
    reason: str
    seconds: float | None
    created_at: float
    attempted_at: float | None
    ended_at: float | None


async def show_webhook(grid: Grid, webhook_id: str) -> WebhookRecord:
    """One webhook.

    Raises:
        NotFound: ``webhook.unknown``.
    """
    async with grid.db.read() as tx:
        row = await webhooks.get(tx, webhook_id) if webhook_id.isprintable() else None
        if row is None:
            raise unknown(webhook_id)
        return _webhook(row, await webhooks.count_queued(tx, row.id))


async def list_webhooks(grid: Grid, limit: int, cursor: str = "") -> Page[WebhookRecord]:
    """Webhooks by id, page by page."""
    async with grid.db.read() as tx:
        rows = await webhooks.page(tx, cursor if cursor.isprintable() else "", limit + 1)
        items = tuple([_webhook(r, await webhooks.count_queued(tx, r.id)) for r in rows[:limit]])
    return Page(items, items[-1].id if len(rows) > limit else "")


async def list_deliveries(
    grid: Grid, webhook_id: str, limit: int, cursor: str = ""
) -> Page[DeliveryRecord]:
    """The log of a webhook's deliveries, newest first.

    Raises:
        NotFound: ``webhook.unknown``.
        UsageError: ``usage.invalid``: the cursor is not one of ours.
    """
    if cursor and not (cursor.isascii() and cursor.isdecimal() and len(cursor) < 19):
        raise UsageError(
            "usage.invalid",
            f"{cursor[:60]!r} is not a cursor of this list.",
            "Give back a cursor as it was answered, or none to begin at the beginning.",
            field="cursor",
        )
    async with grid.db.read() as tx:
        if not webhook_id.isprintable() or await webhooks.get(tx, webhook_id) is None:
            raise unknown(webhook_id)
        before = int(cursor) if cursor else None
        rows = await webhooks.deliveries_page(tx, webhook_id, before, limit + 1)
    items = tuple(delivery_of(r) for r in rows[:limit])
    return Page(items, str(rows[limit - 1].id) if len(rows) > limit else "")


def delivery_of(row: AnyRow) -> DeliveryRecord:
    """The record of a delivery's row."""
    return DeliveryRecord(
        id=f"dlv_{row.id}",
        webhook_id=row.webhook_id,
        kind=row.kind,
        cursor=row.cursor,
        state=row.state,
        attempts=row.attempts,
        status=row.status,
        reason=row.reason,
        seconds=row.seconds,
        created_at=row.created_at,
        attempted_at=row.attempted_at,
        ended_at=row.ended_at,
    )


def unknown(webhook_id: str) -> NotFound:
    """No such webhook."""
    return NotFound(
        "webhook.unknown",
        f"There is no webhook {webhook_id[:80]!r}.",
        "`distribai webhook list` lists them.",
    )


def _webhook(row: AnyRow, queued: int) -> WebhookRecord:
    return WebhookRecord(
        id=row.id,
        url=row.url,
        kinds=tuple(row.kinds),
        state=row.state,
        reason=row.reason,
        created_at=row.created_at,
        created_by=row.created_by,
        cursor=row.cursor,
        queued=queued,
        failures=row.failures,
        failing_since=row.failing_since,
        next_at=row.next_at,
        delivered_at=row.delivered_at,
    )
