"""Every state change, in the order of its commit.

A change writes its row in its own transaction (:func:`append`), so that there is an event exactly
when there is a change. Readers (``--watch``, server-sent events, audit) follow with a cursor.

The cursor is ``(epoch, xid, id)``. On SQLite, with its one writer, ids alone are in commit order;
xid is 0. On PostgreSQL an id is taken before the commit, so a row with a smaller id can appear
*after* a larger one was read: reading ``id > last`` would lose it. There a row carries its
transaction's 64-bit id, and readers stop below ``pg_snapshot_xmin``, under which no transaction can
still be running. A dump that is restored into a new cluster begins again with small transaction
ids; :func:`start` then opens a new epoch, and all rows of older epochs are settled.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from sqlalchemy import (
    BigInteger,
    ColumnElement,
    Integer,
    Text,
    and_,
    cast,
    func,
    insert,
    literal,
    literal_column,
    or_,
    select,
    true,
    tuple_,
    update,
)

from distribai.core.plain import Plain
from distribai.errors import UsageError
from distribai.store.engine import AnyRow, Dialect, Tx
from distribai.store.tables import meta, outbox

Cursor = tuple[int, int, int]

BEGINNING: Cursor = (0, 0, 0)

_ABOUT = (outbox.c.kind, outbox.c.job_id, outbox.c.task_id, outbox.c.node_id)

_EPOCH = select(cast(meta.c.value, Integer)).where(meta.c.key == "outbox_epoch").scalar_subquery()


def _current_xid(dialect: Dialect) -> ColumnElement[int]:
    if dialect == "sqlite":
        return literal(0, BigInteger)
    return cast(cast(func.pg_current_xact_id(), Text), BigInteger)


async def start(tx: Tx) -> None:
    """Open the first epoch, or a new one when the transaction ids have started over."""
    epoch = await tx.scalar(select(_EPOCH))
    if epoch is None:
        await tx.run(insert(meta).values(key="outbox_epoch", value="1"))
        return
    newest = await tx.scalar(select(func.max(outbox.c.xid)).where(outbox.c.epoch == epoch))
    current = await tx.scalar(select(_current_xid(tx.dialect)))
    if newest is not None and newest > current:
        await tx.run(update(meta).where(meta.c.key == "outbox_epoch").values(value=str(epoch + 1)))


async def restored(tx: Tx) -> None:
    """Open an epoch that no cursor has seen: these rows were copied from another database.

    It follows the minute as well, because one backup may be restored twice: cursors of the first
    restored grid, which went on and was lost too, must not lie ahead of the second one's events.
    """
    epoch = await tx.scalar(select(_EPOCH)) or 0
    value = str(max(epoch + 1, int(tx.now // 60)))
    statement = tx.insert(meta).values(key="outbox_epoch", value=value)
    await tx.run(
        statement.on_conflict_do_update(index_elements=[meta.c.key], set_={"value": value})
    )


@dataclass(frozen=True, slots=True)
class Change:
    """Something that a transaction has changed, and what of."""

    kind: str
    job_id: str = ""
    task_id: str = ""
    node_id: str = ""
    data: Mapping[str, Plain] = field(default_factory=dict)


async def append(
    tx: Tx, changes: Sequence[Change], *, account_id: str = "", key_id: str = ""
) -> None:
    """Write the events of what this transaction changes; ``account_id`` and ``key_id`` are whose
    doing it is, where a person has asked for it."""
    await tx.run_many(
        insert(outbox).values(epoch=_EPOCH, xid=_current_xid(tx.dialect)),
        [
            {
                "at": tx.now,
                "kind": c.kind,
                "job_id": c.job_id,
                "task_id": c.task_id,
                "node_id": c.node_id,
                "account_id": account_id,
                "key_id": key_id,
                "data": dict(c.data),
            }
            for c in changes
        ],
    )


async def read(
    tx: Tx,
    after: Cursor,
    limit: int,
    job_id: str | None = None,
    *,
    node_id: str | None = None,
    kinds: Sequence[str] = (),
    actors: bool = False,
    account_id: str | None = None,
) -> Sequence[AnyRow]:
    """Settled events behind ``after``, in commit order, at most ``limit``; of one job or node, and
    of ``kinds`` (``core.webhooks.check_kinds``) where these are given; with ``actors`` those that
    people have asked for, and of one account."""
    key = tuple_(outbox.c.epoch, outbox.c.xid, outbox.c.id)
    query = select(outbox).where(key > tuple_(*map(literal, after)), *_settled(tx))
    if kinds:
        query = query.where(
            or_(
                *(
                    outbox.c.kind.startswith(k.removesuffix("*"), autoescape=True)
                    if k.endswith(".*")
                    else outbox.c.kind == k
                    for k in kinds
                )
            )
        )
    if job_id is not None:
        query = query.where(outbox.c.job_id == job_id)
    if node_id is not None:
        query = query.where(outbox.c.node_id == node_id)
    if actors:
        query = query.where(outbox.c.account_id != literal_column("''"))
    if account_id is not None:
        query = query.where(outbox.c.account_id == account_id)
    query = query.order_by(outbox.c.epoch, outbox.c.xid, outbox.c.id).limit(limit)
    return await tx.all(query)


async def visible(tx: Tx, after: Cursor, limit: int) -> Sequence[AnyRow]:
    """Events behind ``after``, in commit order, at most ``limit``: key, kind and what they are
    about, with the ``phase`` of tasks and with ``settled``: whether none before them can appear any
    more. Who acts on a row at once reads it when it is visible, and reads on from the last settled
    one."""
    key = tuple_(outbox.c.epoch, outbox.c.xid, outbox.c.id)
    settled = and_(true(), *_settled(tx)).label("settled")
    # Every replica reads these all the time: no more of them than what decides who is told.
    phase = func.coalesce(outbox.c.data["phase"].as_string(), "").label("phase")
    return await tx.all(
        select(outbox.c.epoch, outbox.c.xid, outbox.c.id, *_ABOUT, phase, settled)
        .where(key > tuple_(*map(literal, after)))
        .order_by(outbox.c.epoch, outbox.c.xid, outbox.c.id)
        .limit(limit)
    )


async def end(tx: Tx) -> str:
    """The cursor behind everything that is settled: what is read from it on comes later."""
    order = (outbox.c.epoch.desc(), outbox.c.xid.desc(), outbox.c.id.desc())
    columns = (outbox.c.epoch, outbox.c.xid, outbox.c.id)
    newest = await tx.first(select(*columns).where(*_settled(tx)).order_by(*order).limit(1))
    return "" if newest is None else format_cursor(newest)


def _settled(tx: Tx) -> tuple[ColumnElement[bool], ...]:
    """The rows below which no transaction can still be running."""
    if tx.dialect == "sqlite":
        return ()
    xmin = cast(cast(func.pg_snapshot_xmin(func.pg_current_snapshot()), Text), BigInteger)
    return (or_(outbox.c.epoch < _EPOCH, outbox.c.xid < xmin),)


def format_cursor(row: AnyRow) -> str:
    """The cursor just behind ``row``, as text."""
    return f"{row.epoch}.{row.xid}.{row.id}"


def parse_cursor(text: str) -> Cursor:
    """The cursor that :func:`format_cursor` wrote; empty text is the beginning.

    Raises:
        UsageError: ``usage.invalid``: anything else.
    """
    if not text:
        return BEGINNING
    parts = text.split(".")
    if len(parts) != 3 or not all(p.isascii() and p.isdecimal() and len(p) < 19 for p in parts):
        raise UsageError(
            "usage.invalid",
            f"{text[:60]!r} is not a cursor of this grid's events.",
            "Give back a cursor as it was answered, or none to begin at the beginning.",
            field="after",
        )
    epoch, xid, row_id = map(int, parts)
    return epoch, xid, row_id
