"""Invites: each lets nodes in, for the account that they will belong to."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from sqlalchemy import ColumnElement, and_, insert, or_, select, update

from distribai.store.engine import AnyRow, Tx
from distribai.store.statements.people import Before, newest_first
from distribai.store.tables import accounts, invites


async def add_invite(tx: Tx, invite_id: str, secret_hash: str, **values: Any) -> None:
    """Insert an invite; without ``values`` it is the operator's, has no limits, and trusts as
    the grid's mode does."""
    await tx.run(
        insert(invites).values(id=invite_id, secret_hash=secret_hash, created_at=tx.now, **values)
    )


async def valid_invite(tx: Tx, secret_hash: str) -> str | None:
    """The id of an invite that still lets nodes in."""
    row = await tx.first(select(invites.c.id).where(_lets_in(tx, secret_hash)))
    return None if row is None else str(row.id)


async def still_lets_in(tx: Tx, invite_id: str) -> bool:
    """Whether the invite with this id still lets nodes in."""
    return (
        await tx.first(select(invites.c.id).where(_open(tx), invites.c.id == invite_id)) is not None
    )


async def use_invite(tx: Tx, secret_hash: str) -> AnyRow | None:
    """Take one use from an invite, if it counts them, and return its id, its account and whether
    it makes nodes trusted; None when it lets nobody in (any more). Two nodes at once do not both
    take the last use."""
    return await tx.first(
        update(invites)
        .where(_lets_in(tx, secret_hash))
        .values(uses_left=invites.c.uses_left - 1)
        .returning(invites.c.id, invites.c.account_id, invites.c.trusted)
    )


def _lets_in(tx: Tx, secret_hash: str) -> ColumnElement[bool]:
    return and_(invites.c.secret_hash == secret_hash, _open(tx))


def _open(tx: Tx) -> ColumnElement[bool]:
    return and_(
        invites.c.revoked.is_(False),
        or_(invites.c.expires_at.is_(None), invites.c.expires_at > tx.now),
        or_(invites.c.uses_left.is_(None), invites.c.uses_left > 0),
    )


def _with_account() -> Any:
    return select(invites, accounts.c.name.label("account")).join(
        accounts, accounts.c.id == invites.c.account_id, isouter=True
    )


async def invite(tx: Tx, invite_id: str) -> AnyRow | None:
    """One invite with its account's name."""
    return await tx.first(_with_account().where(invites.c.id == invite_id))


async def invites_page(tx: Tx, limit: int, before: Before | None = None) -> Sequence[AnyRow]:
    """Invites with their account's name, the newest first, those before ``(created_at, id)``."""
    return await tx.all(newest_first(_with_account(), invites, limit, before))


async def new_invite_secret(tx: Tx, invite_id: str, secret_hash: str) -> None:
    """Give an invite another secret; the one before lets nobody in any more."""
    await tx.run(update(invites).where(invites.c.id == invite_id).values(secret_hash=secret_hash))


async def revoke_invites_of(tx: Tx, account_id: str) -> None:
    """Let all invites of an account let nobody in any more."""
    await tx.run(update(invites).where(invites.c.account_id == account_id).values(revoked=True))


async def revoke_invite(tx: Tx, invite_id: str) -> bool:
    """Let an invite let nobody in any more; False when there is no such invite."""
    statement = update(invites).where(invites.c.id == invite_id).values(revoked=True)
    return await tx.first(statement.returning(invites.c.id)) is not None
