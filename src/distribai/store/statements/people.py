"""Accounts, organizations, memberships, keys, logins."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import Any

from sqlalchemy import ColumnElement, Table, and_, insert, or_, select, update

from distribai.core.people import HOME, Role
from distribai.store.engine import AnyRow, Tx
from distribai.store.tables import accounts, api_keys, memberships, organizations, tokens

Before = tuple[float, str]
"""Where a page that is read backwards in time begins: before this (created_at, id)."""


def newest_first(query: Any, table: Table, limit: int, before: Before | None) -> Any:
    """``query`` over ``table`` as one page, the newest row first."""
    at, key = table.c.created_at, table.c.id
    if before is not None:
        query = query.where(or_(at < before[0], and_(at == before[0], key > before[1])))
    return query.order_by(at.desc(), key).limit(limit)


# ------------------------------------------------------------------ accounts


async def add_account(tx: Tx, account_id: str, name: str) -> bool:
    """Insert an account; False when its id or name is taken."""
    statement = tx.insert(accounts).values(id=account_id, name=name, created_at=tx.now)
    statement = statement.on_conflict_do_nothing()
    return await tx.scalar(statement.returning(accounts.c.id)) is not None


async def account(tx: Tx, ref: str) -> AnyRow | None:
    """The account with this id or name."""
    return await tx.first(select(accounts).where(or_(accounts.c.id == ref, accounts.c.name == ref)))


async def accounts_page(tx: Tx, after: str, limit: int) -> Sequence[AnyRow]:
    """Accounts behind a name, by name."""
    query = select(accounts).where(accounts.c.name > after)
    return await tx.all(query.order_by(accounts.c.name).limit(limit))


async def account_names(tx: Tx, ids: Collection[str]) -> dict[str, str]:
    """Names of accounts by id."""
    if not ids:
        return {}
    rows = await tx.all(select(accounts.c.id, accounts.c.name).where(accounts.c.id.in_(list(ids))))
    return {row.id: row.name for row in rows}


async def close_account(tx: Tx, account_id: str) -> None:
    """Close an account; one that is closed keeps its date."""
    await tx.run(
        update(accounts)
        .where(accounts.c.id == account_id, accounts.c.closed_at.is_(None))
        .values(closed_at=tx.now)
    )


# ------------------------------------------------------------------ organizations


async def add_organization(
    tx: Tx, organization_id: str, name: str, policy: Any, quota: Any
) -> bool:
    """Insert an organization; False when its id or name is taken."""
    statement = tx.insert(organizations).values(
        id=organization_id, name=name, created_at=tx.now, policy=policy, quota=quota
    )
    statement = statement.on_conflict_do_nothing()
    return await tx.scalar(statement.returning(organizations.c.id)) is not None


async def organization(tx: Tx, ref: str) -> AnyRow | None:
    """The organization with this id or name."""
    return await tx.first(_named_organization(ref))


async def lock_organization(tx: Tx, organization_id: str) -> AnyRow | None:
    """One organization, its row locked until the end of the transaction: whoever counts what it
    has, or changes its members, does so alone."""
    return await tx.first(
        select(organizations).where(organizations.c.id == organization_id).with_for_update()
    )


def _named_organization(ref: str) -> Any:
    return select(organizations).where(or_(organizations.c.id == ref, organizations.c.name == ref))


async def organizations_page(
    tx: Tx, ids: Collection[str] | None, after: str = "", limit: int | None = None
) -> Sequence[AnyRow]:
    """Organizations behind a name, by name; of ``ids``, or of all."""
    query = select(organizations).where(organizations.c.name > after)
    query = query.order_by(organizations.c.name).limit(limit)
    return await tx.all(query if ids is None else query.where(organizations.c.id.in_(list(ids))))


async def change_organization(tx: Tx, organization_id: str, **values: Any) -> None:
    """Write columns of an organization."""
    await tx.run(
        update(organizations).where(organizations.c.id == organization_id).values(**values)
    )


# ------------------------------------------------------------------ memberships


async def set_role(tx: Tx, account_id: str, organization_id: str, role: Role) -> None:
    """Make an account a member, or give it another role."""
    statement = tx.insert(memberships).values(
        account_id=account_id,
        organization_id=organization_id,
        role=role.value,
        created_at=tx.now,
    )
    await tx.run(
        statement.on_conflict_do_update(
            index_elements=[memberships.c.account_id, memberships.c.organization_id],
            set_={"role": role.value},
        )
    )


async def role(tx: Tx, account_id: str, organization_id: str) -> str | None:
    """What the account is in the organization."""
    found = await tx.scalar(
        select(memberships.c.role).where(_membership(account_id, organization_id))
    )
    return None if found is None else str(found)


async def remove_member(tx: Tx, account_id: str, organization_id: str) -> None:
    """End a membership."""
    await tx.run(memberships.delete().where(_membership(account_id, organization_id)))


def _membership(account_id: str, organization_id: str) -> ColumnElement[bool]:
    return and_(
        memberships.c.account_id == account_id, memberships.c.organization_id == organization_id
    )


async def members(
    tx: Tx,
    *,
    account_ids: Collection[str] | None = None,
    organization_ids: Collection[str] | None = None,
) -> Sequence[AnyRow]:
    """Memberships with both names, by organization and account; of accounts, or of
    organizations."""
    query = (
        select(
            memberships,
            accounts.c.name.label("account"),
            organizations.c.name.label("organization"),
        )
        .join(accounts, accounts.c.id == memberships.c.account_id)
        .join(organizations, organizations.c.id == memberships.c.organization_id)
        .order_by(organizations.c.name, accounts.c.name)
    )
    if account_ids is not None:
        query = query.where(memberships.c.account_id.in_(list(account_ids)))
    if organization_ids is not None:
        query = query.where(memberships.c.organization_id.in_(list(organization_ids)))
    return await tx.all(query)


async def other_operators(tx: Tx, account_id: str) -> bool:
    """Whether the grid has an operator beside this one whose account is open."""
    return (
        await tx.first(
            select(memberships.c.account_id)
            .join(accounts, accounts.c.id == memberships.c.account_id)
            .where(
                memberships.c.organization_id == HOME,
                memberships.c.role == Role.OPERATOR.value,
                memberships.c.account_id != account_id,
                accounts.c.closed_at.is_(None),
            )
            .limit(1)
        )
        is not None
    )


# ------------------------------------------------------------------ keys and logins


async def add_key(tx: Tx, **values: Any) -> None:
    """Insert a key."""
    await tx.run(insert(api_keys).values(created_at=tx.now, **values))


async def valid_key(tx: Tx, secret_hash: str) -> AnyRow | None:
    """A key that opens something, with its account's name as ``account``."""
    return await tx.first(
        select(api_keys, accounts.c.name.label("account"))
        .join(accounts, accounts.c.id == api_keys.c.account_id)
        .where(
            api_keys.c.secret_hash == secret_hash,
            api_keys.c.revoked_at.is_(None),
            or_(api_keys.c.expires_at.is_(None), api_keys.c.expires_at > tx.now),
            accounts.c.closed_at.is_(None),
        )
    )


async def roles_of(tx: Tx, account_id: str) -> Sequence[AnyRow]:
    """(organization_id, role) of an account."""
    return await tx.all(
        select(memberships.c.organization_id, memberships.c.role).where(
            memberships.c.account_id == account_id
        )
    )


async def key_used(tx: Tx, key_id: str) -> None:
    """The key was used now."""
    await tx.run(update(api_keys).where(api_keys.c.id == key_id).values(last_used_at=tx.now))


async def key(tx: Tx, key_id: str) -> AnyRow | None:
    """One key."""
    return await tx.first(select(api_keys).where(api_keys.c.id == key_id))


async def keys_page(
    tx: Tx, account_id: str, limit: int, before: Before | None = None
) -> Sequence[AnyRow]:
    """Keys of an account, the newest first, those before ``(created_at, id)``."""
    query = select(api_keys).where(api_keys.c.account_id == account_id)
    return await tx.all(newest_first(query, api_keys, limit, before))


async def new_secret(tx: Tx, key_id: str, prefix: str, secret_hash: str) -> None:
    """Give a key another secret; the one before opens nothing any more."""
    values = {"prefix": prefix, "secret_hash": secret_hash}
    await tx.run(update(api_keys).where(api_keys.c.id == key_id).values(**values))


async def revoke_key(tx: Tx, key_id: str) -> None:
    """Revoke a key; one that is revoked keeps its date."""
    await tx.run(
        update(api_keys)
        .where(api_keys.c.id == key_id, api_keys.c.revoked_at.is_(None))
        .values(revoked_at=tx.now)
    )


async def keys_by_id(tx: Tx, ids: Collection[str]) -> Sequence[AnyRow]:
    """Keys by id, in no order."""
    return await tx.all(select(api_keys).where(api_keys.c.id.in_(list(ids)))) if ids else []


async def has_key(tx: Tx, account_id: str) -> bool:
    """Whether the account ever had a key."""
    query = select(api_keys.c.id).where(api_keys.c.account_id == account_id).limit(1)
    return await tx.first(query) is not None


async def take_tokens(tx: Tx, kind: str) -> Sequence[AnyRow]:
    """Remove all tokens of a kind, and return them."""
    return await tx.all(tokens.delete().where(tokens.c.kind == kind).returning(*tokens.c))


async def add_login(tx: Tx, token_hash: str, account_id: str, expires_at: float) -> None:
    """Insert a one-time login in the place of earlier ones of the account."""
    await tx.run(tokens.delete().where(tokens.c.kind == "login", tokens.c.account_id == account_id))
    await tx.run(
        insert(tokens).values(
            token_hash=token_hash,
            kind="login",
            created_at=tx.now,
            expires_at=expires_at,
            account_id=account_id,
        )
    )


async def take_login(tx: Tx, token_hash: str) -> str | None:
    """The account of a login, which is used up by this; None when it does not let in."""
    row = await tx.first(
        tokens.delete()
        .where(tokens.c.token_hash == token_hash, tokens.c.kind == "login")
        .returning(tokens.c.account_id, tokens.c.expires_at)
    )
    if row is None or (row.expires_at is not None and row.expires_at <= tx.now):
        return None
    return str(row.account_id)
