"""Delivering events to webhooks: a leased duty that reads the outbox.

A webhook is a reader like any other: it has a cursor. What lies behind it is queued for it, in
order, and sent one by one: the next one's turn comes when the one before was delivered or given up.
So a receiver sees events in the order of their commits, and one that is away is asked once per
pause, not once per event. A delivery may arrive twice (this process may die between the answer and
writing it down) and never half: its id lets the receiver tell.

A receiver that cannot be reached or answers 5xx is tried again with growing pauses until it takes
the event or the webhook is disabled, :data:`DISABLE_AFTER_S` after the last success. One that is
there and refuses a delivery (4xx) :data:`MAX_REFUSALS` times gets the next one. 410 disables at
once: the receiver says that it is gone for good.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass, field

import structlog

from distribai.core.states import WEBHOOK, DeliveryState, WebhookState, check
from distribai.core.text import MAX_REASON, clean
from distribai.core.webhooks import (
    DISABLE_AFTER_S,
    MAX_REFUSALS,
    TIMEOUT_S,
    is_refusal,
    key_id,
    pause_s,
)
from distribai.errors import Unavailable
from distribai.orchestrator import events
from distribai.orchestrator.context import Grid
from distribai.orchestrator.feed import Wanted, read
from distribai.orchestrator.records import EventRecord
from distribai.orchestrator.webhooks.delivering import send, sender_of
from distribai.orchestrator.webhooks.keys import key_of, key_path
from distribai.orchestrator.webhooks.sending import Answer, Sender
from distribai.store import outbox
from distribai.store.engine import AnyRow, Tx
from distribai.store.statements import webhooks

log = structlog.get_logger(__name__)

MAX_QUEUED = 1000
"""Deliveries that wait for one webhook. What comes behind stays in the outbox until there is room:
nothing is lost, and nothing grows."""

PAGE = 200
"""Events that are queued in one transaction."""

PARALLEL = 16
"""Webhooks that are sent to at the same time."""

BATCH = 20
"""Deliveries to one webhook in one look."""

KEPT = 1000
"""Ended deliveries that a webhook's log keeps."""


@dataclass
class Deliverer:
    """The duty's hands. ``sender`` is how deliveries leave; tests bring their own.

    ``_passed``: how far this process has looked for each webhook without finding anything that
    passes its filter; it is written down with the next event that does.
    """

    grid: Grid
    sender: Sender | None = None
    _idle_until: float = 0.0
    _passed: dict[str, tuple[str, str]] = field(default_factory=dict)

    async def duty(self) -> str:
        """The name of the duty's lease, empty while there is no webhook. Replicas with the same key
        share the work, and one with another key does not keep the others from it.

        Raises:
            Unavailable: ``webhook.key``; ``grid.database``.
        """
        if self.grid.clock() < self._idle_until:
            return ""
        async with self.grid.db.read() as tx:
            if not await webhooks.active(tx):
                self._idle_until = self.grid.clock() + self.grid.settings.liveness.tick_s
                return ""
        return f"webhooks {key_id(key_of(self.grid))}"

    async def look(self) -> bool:
        """Queue what is new, send what is due; whether anything changed.

        Raises:
            Unavailable: ``webhook.key``; ``grid.database``.
        """
        mine = key_id(key_of(self.grid))
        async with self.grid.db.read() as tx:
            hooks = await webhooks.active(tx, mine)
            end, now = await outbox.end(tx), tx.now
        changed = False
        for hook in hooks:
            if self._from(hook) != end:
                changed |= await self._queue(hook)
        return await self._send_all([h for h in hooks if h.next_at <= now]) or changed

    def _from(self, hook: AnyRow) -> str:
        """The cursor from which to look on for a webhook."""
        written, passed = self._passed.get(hook.id, ("", ""))
        return passed if passed and written == hook.cursor else str(hook.cursor)

    async def _queue(self, hook: AnyRow) -> bool:
        """Queue a page of what lies behind the webhook's cursor."""
        wanted = Wanted(kinds=tuple(hook.kinds))
        found = await read(self.grid, wanted, self._from(hook), PAGE)
        if not found.items:
            self._passed[hook.id] = (hook.cursor, found.cursor)
            return False
        ids = [(outbox.parse_cursor(e.cursor)[2], e.cursor, e.kind) for e in found.items]
        async with self.grid.db.write() as tx:
            current = await webhooks.lock(tx, hook.id)
            if current is None or current.cursor != hook.cursor or not _active(current):
                return False
            if await webhooks.count_queued(tx, hook.id) + len(ids) > MAX_QUEUED:
                return False
            await webhooks.queue(tx, hook.id, ids)
            await webhooks.change(tx, hook.id, cursor=found.cursor)
        return True

    async def _send_all(self, due: Sequence[AnyRow]) -> bool:
        gate = asyncio.Semaphore(PARALLEL)

        async def one(hook: AnyRow) -> bool:
            async with gate:
                return await self._send_some(hook)

        return any(await asyncio.gather(*map(one, due)))

    async def _send_some(self, hook: AnyRow) -> bool:
        """Send to one webhook while it takes what it is sent; whether anything was tried."""
        end, tried = self.grid.clock() + TIMEOUT_S, False
        for _ in range(BATCH):
            async with self.grid.db.read() as tx:
                row = await webhooks.next_queued(tx, hook.id)
            if row is None:
                break
            event = EventRecord(
                row.cursor, row.at, row.kind, row.job_id, row.task_id, row.node_id, row.data
            )
            sender = self.sender or sender_of(self.grid)
            answer = await send(self.grid, sender, hook, f"dlv_{row.id}", event)
            tried = True
            if not await self._write(hook.id, row, answer) or self.grid.clock() >= end:
                break
        return tried

    async def _write(self, webhook_id: str, row: AnyRow, answer: Answer) -> bool:
        """Write what became of a try; whether the next one's turn has come at once."""
        reason = clean(answer.reason, MAX_REASON, lines=False)
        spent = is_refusal(answer.status) and row.attempts + 1 >= MAX_REFUSALS
        new = DeliveryState.FAILED if spent else DeliveryState.QUEUED
        async with self.grid.db.write() as tx:
            hook = await webhooks.lock(tx, webhook_id)
            if hook is None or not _active(hook):
                return False  # deleted or disabled meanwhile, and this delivery with it
            if not await webhooks.tried(
                tx,
                row.id,
                row.attempts,
                DeliveryState.DELIVERED if answer.ok else new,
                status=answer.status,
                reason=reason,
                seconds=answer.seconds,
            ):
                return False
            if not answer.ok:
                await self._failed(tx, hook, answer, reason)
            else:
                await webhooks.change(
                    tx,
                    webhook_id,
                    failures=0,
                    failing_since=None,
                    next_at=tx.now,
                    delivered_at=tx.now,
                )
                await webhooks.prune(tx, webhook_id, KEPT)
                return True
        log.info("webhook.failed", webhook=webhook_id, delivery=row.id, reason=reason)
        return False

    async def _failed(self, tx: Tx, hook: AnyRow, answer: Answer, reason: str) -> None:
        since = tx.now if hook.failing_since is None else hook.failing_since
        if answer.status == 410 or tx.now - since >= DISABLE_AFTER_S:
            why = (
                "its receiver says that it is gone (410)"
                if answer.status == 410
                else f"nothing was delivered for {DISABLE_AFTER_S / 3600:g} hours: {reason}"
            )
            await disable(tx, hook, why)
            return
        chance = int.from_bytes(self.grid.entropy(4), "big") / 2**32
        await webhooks.change(
            tx,
            hook.id,
            failures=hook.failures + 1,
            failing_since=since,
            next_at=tx.now + pause_s(hook.failures + 1, chance),
        )


async def disable(tx: Tx, hook: AnyRow, why: str) -> None:
    """Deliver no more to a webhook whose row is locked; what waits is given up.

    Raises:
        Conflict: ``state.transition``.
    """
    check(WEBHOOK, WebhookState(hook.state), WebhookState.DISABLED, f"Webhook {hook.id}")
    await webhooks.change(tx, hook.id, state=WebhookState.DISABLED.value, reason=why)
    await webhooks.give_up(tx, hook.id, "the webhook was disabled")
    await events.record(tx, "webhook.disabled", data={"webhook": hook.id, "reason": why})


def _active(hook: AnyRow) -> bool:
    return bool(hook.state == WebhookState.ACTIVE)


async def stranded(grid: Grid) -> str:
    """What keeps this process from delivering: a key that is missing or is not that of the active
    webhooks; empty when nothing does.

    Raises:
        Unavailable: ``grid.database``.
    """
    async with grid.db.read() as tx:
        hooks = await webhooks.active(tx)
    if not hooks:
        return ""
    try:
        mine = key_id(key_of(grid))
    except Unavailable as problem:
        return problem.message
    others = sum(hook.key_id != mine for hook in hooks)
    if not others:
        return ""
    return (
        f"{others} of the webhooks were made with another key than this process has in "
        f"{key_path(grid.settings)}: it sends nothing to them."
    )
