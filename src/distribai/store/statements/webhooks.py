"""Webhooks, their deliveries, and the settled end of the outbox that both follow."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import Any

from sqlalchemy import delete, func, insert, select, update

from distribai.core.states import DELIVERY, DeliveryState, WebhookState, check
from distribai.store.engine import AnyRow, Tx
from distribai.store.tables import deliveries, outbox, webhooks

_QUEUED = DeliveryState.QUEUED.value


async def add(tx: Tx, **values: Any) -> None:
    """Insert a webhook."""
    await tx.run(insert(webhooks).values(**values))


async def get(tx: Tx, webhook_id: str) -> AnyRow | None:
    """One webhook."""
    return await tx.first(select(webhooks).where(webhooks.c.id == webhook_id))


async def lock(tx: Tx, webhook_id: str) -> AnyRow | None:
    """One webhook, its row locked until the end of the transaction."""
    return await tx.first(select(webhooks).where(webhooks.c.id == webhook_id).with_for_update())


async def change(tx: Tx, webhook_id: str, **values: Any) -> None:
    """Write columns of a locked webhook."""
    await tx.run(update(webhooks).where(webhooks.c.id == webhook_id).values(**values))


async def remove(tx: Tx, webhook_id: str) -> None:
    """Delete a locked webhook with the log of its deliveries."""
    await tx.run(delete(deliveries).where(deliveries.c.webhook_id == webhook_id))
    await tx.run(delete(webhooks).where(webhooks.c.id == webhook_id))


async def page(tx: Tx, after: str, limit: int) -> Sequence[AnyRow]:
    """Webhooks behind an id, by id."""
    return await tx.all(
        select(webhooks).where(webhooks.c.id > after).order_by(webhooks.c.id).limit(limit)
    )


async def active(tx: Tx, key_id: str | None = None) -> Sequence[AnyRow]:
    """Webhooks that are delivered to, by id; those made with one key."""
    query = select(webhooks).where(webhooks.c.state == WebhookState.ACTIVE.value)
    if key_id is not None:
        query = query.where(webhooks.c.key_id == key_id)
    return await tx.all(query.order_by(webhooks.c.id))


async def count(tx: Tx) -> int:
    """How many webhooks there are."""
    return int(await tx.scalar(select(func.count()).select_from(webhooks)))


async def count_of_other_keys(tx: Tx, key_id: str) -> int:
    """How many webhooks were made with another key."""
    query = select(func.count()).select_from(webhooks).where(webhooks.c.key_id != key_id)
    return int(await tx.scalar(query))


async def count_queued(tx: Tx, webhook_id: str) -> int:
    """Deliveries of a webhook that wait."""
    return int(
        await tx.scalar(
            select(func.count())
            .select_from(deliveries)
            .where(deliveries.c.webhook_id == webhook_id, deliveries.c.state == _QUEUED)
        )
    )


async def queue(tx: Tx, webhook_id: str, events: Collection[tuple[int, str, str]]) -> None:
    """Queue events (id, cursor, kind) for a webhook; one that is there already stays as it is."""
    for event_id, cursor, kind in events:
        await tx.run(
            tx.insert(deliveries)
            .values(
                webhook_id=webhook_id,
                event_id=event_id,
                cursor=cursor,
                kind=kind,
                state=_QUEUED,
                attempts=0,
                reason="",
                created_at=tx.now,
            )
            .on_conflict_do_nothing()
        )


async def add_test(tx: Tx, webhook_id: str, reason: str) -> int:
    """Insert the delivery of a test, which has no event and no turn to wait for; its number."""
    statement = insert(deliveries).values(
        webhook_id=webhook_id,
        kind="webhook.test",
        state=_QUEUED,
        reason=reason,
        created_at=tx.now,
    )
    return int(await tx.scalar(statement.returning(deliveries.c.id)))


async def next_queued(tx: Tx, webhook_id: str) -> AnyRow | None:
    """The delivery whose turn it is, with ``at``, ``job_id``, ``task_id``, ``node_id`` and ``data``
    of its event."""
    columns = (outbox.c.at, outbox.c.job_id, outbox.c.task_id, outbox.c.node_id, outbox.c.data)
    return await tx.first(
        select(deliveries, *columns)
        .join(outbox, outbox.c.id == deliveries.c.event_id)
        .where(deliveries.c.webhook_id == webhook_id, deliveries.c.state == _QUEUED)
        .order_by(deliveries.c.id)
        .limit(1)
    )


async def tried(
    tx: Tx, number: int, attempts: int, new: DeliveryState, **values: Any
) -> AnyRow | None:
    """Write the outcome of a try, if the delivery still waits and nobody has tried it meanwhile;
    its row then."""
    if new is not DeliveryState.QUEUED:
        check(DELIVERY, DeliveryState.QUEUED, new, f"Delivery dlv_{number}")
        values["ended_at"] = tx.now
    return await tx.first(
        update(deliveries)
        .where(
            deliveries.c.id == number,
            deliveries.c.state == _QUEUED,
            deliveries.c.attempts == attempts,
        )
        .values(state=new.value, attempts=attempts + 1, attempted_at=tx.now, **values)
        .returning(deliveries)
    )


async def give_up(tx: Tx, webhook_id: str, reason: str) -> None:
    """End every delivery that waits."""
    await tx.run(
        update(deliveries)
        .where(deliveries.c.webhook_id == webhook_id, deliveries.c.state == _QUEUED)
        .values(state=DeliveryState.FAILED.value, reason=reason, ended_at=tx.now)
    )


async def deliveries_page(
    tx: Tx, webhook_id: str, before: int | None, limit: int
) -> Sequence[AnyRow]:
    """Deliveries of a webhook, newest first, those before a number."""
    query = select(deliveries).where(deliveries.c.webhook_id == webhook_id)
    if before is not None:
        query = query.where(deliveries.c.id < before)
    return await tx.all(query.order_by(deliveries.c.id.desc()).limit(limit))


async def prune(tx: Tx, webhook_id: str, keep: int) -> None:
    """Forget ended deliveries but the newest ``keep``."""
    oldest = (
        select(deliveries.c.id)
        .where(deliveries.c.webhook_id == webhook_id, deliveries.c.state != _QUEUED)
        .order_by(deliveries.c.id.desc())
        .offset(keep)
        .limit(1)
        .scalar_subquery()
    )
    await tx.run(
        delete(deliveries).where(
            deliveries.c.webhook_id == webhook_id,
            deliveries.c.state != _QUEUED,
            deliveries.c.id <= oldest,
        )
    )
