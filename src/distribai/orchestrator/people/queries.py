"""What may be asked about people. Whose question it is, is given: others' objects are unknown."""

from __future__ import annotations

import math
from collections.abc import Collection

from distribai.core.people import Policy, Principal, Quota, Usage
from distribai.core.plain import from_plain
from distribai.errors import NotFound, UsageError
from distribai.orchestrator.context import Grid
from distribai.orchestrator.feed import event_record
from distribai.orchestrator.people.records import (
    AccountRecord,
    AccountSummary,
    AuditRecord,
    Identity,
    InviteRecord,
    KeyRecord,
    MemberRecord,
    NodeWork,
    OrganizationRecord,
)
from distribai.orchestrator.records import Page
from distribai.store import outbox
from distribai.store.engine import AnyRow, Tx
from distribai.store.statements import holdings, invites, people


async def find_account(tx: Tx, ref: str) -> AnyRow:
    """The account with this id or name.

    Raises:
        NotFound: ``account.unknown``.
    """
    row = await people.account(tx, ref) if ref.isprintable() else None
    if row is None:
        raise no_account(ref)
    return row


def no_account(ref: str) -> NotFound:
    """The answer to somebody who asks for an account that is none, for them."""
    return NotFound(
        "account.unknown",
        f"No account has the id or name {ref[:80]!r}.",
        "`distribai account list` lists all to operators.",
    )


async def find_organization(tx: Tx, ref: str) -> AnyRow:
    """The organization with this id or name.

    Raises:
        NotFound: ``organization.unknown``.
    """
    row = await people.organization(tx, ref) if ref.isprintable() else None
    if row is None:
        raise no_organization(ref)
    return row


def no_organization(ref: str) -> NotFound:
    """The answer to somebody who asks for an organization that is none, for them."""
    return NotFound(
        "organization.unknown",
        f"No organization has the id or name {ref[:80]!r}.",
        "`distribai team list` lists yours.",
        field="organization",
    )


async def whoami(grid: Grid, caller: Principal) -> Identity:
    """Who asks, and what that may do."""
    async with grid.db.read() as tx:
        mine = await _members(tx, account_ids=[caller.account_id])
    scopes = tuple(sorted(caller.scopes))
    return Identity(caller.account_id, caller.name, caller.operator, caller.key_id, scopes, mine)


async def list_accounts(grid: Grid, limit: int = 1000, cursor: str = "") -> Page[AccountSummary]:
    """Accounts, by name."""
    async with grid.db.read() as tx:
        rows = await people.accounts_page(tx, _name(cursor), limit + 1)
        members = await _members(tx, account_ids=[r.id for r in rows])
    items = tuple(
        AccountSummary(
            r.id,
            r.name,
            r.created_at,
            r.closed_at,
            tuple(m for m in members if m.account_id == r.id),
        )
        for r in rows[:limit]
    )
    return Page(items, items[-1].name if len(rows) > limit else "")


def _name(cursor: str) -> str:
    return cursor if cursor.isprintable() else ""


async def show_account(grid: Grid, caller: Principal, ref: str) -> AccountRecord:
    """An account's page; to others than operators only their own.

    Raises:
        NotFound: ``account.unknown``.
    """
    async with grid.db.read() as tx:
        row = await find_account(tx, ref)
        if not caller.operator and row.id != caller.account_id:
            raise no_account(ref)
        members = await _members(tx, account_ids=[row.id])
        found = await holdings.work_of_nodes(tx, row.id)
    nodes = tuple(NodeWork(**r._mapping) for r in found)
    return AccountRecord(
        row.id,
        row.name,
        row.created_at,
        row.closed_at,
        members,
        nodes,
        tasks=sum(n.tasks for n in nodes),
        tokens=sum(n.tokens for n in nodes),
        bytes_up=sum(n.bytes_up for n in nodes),
        bytes_down=sum(n.bytes_down for n in nodes),
    )


async def list_organizations(
    grid: Grid, caller: Principal, limit: int = 1000, cursor: str = ""
) -> Page[OrganizationRecord]:
    """Organizations by name; to others than operators those that they are in."""
    async with grid.db.read() as tx:
        ids = None if caller.operator else list(caller.roles)
        rows = await people.organizations_page(tx, ids, _name(cursor), limit + 1)
        items = tuple([await _organization(tx, row) for row in rows[:limit]])
    return Page(items, items[-1].name if len(rows) > limit else "")


async def show_organization(grid: Grid, caller: Principal, ref: str) -> OrganizationRecord:
    """An organization; to others than operators only one that they are in.

    Raises:
        NotFound: ``organization.unknown``.
    """
    async with grid.db.read() as tx:
        row = await find_organization(tx, ref)
        if not caller.operator and row.id not in caller.roles:
            raise no_organization(ref)
        return await _organization(tx, row)


async def _organization(tx: Tx, row: AnyRow) -> OrganizationRecord:
    return OrganizationRecord(
        row.id,
        row.name,
        row.created_at,
        from_plain(Policy, row.policy),
        from_plain(Quota, row.quota),
        Usage(await holdings.open_jobs(tx, row.id), await holdings.stored_bytes(tx, row.id)),
        await _members(tx, organization_ids=[row.id]),
    )


async def _members(
    tx: Tx,
    account_ids: Collection[str] | None = None,
    organization_ids: Collection[str] | None = None,
) -> tuple[MemberRecord, ...]:
    rows = await people.members(tx, account_ids=account_ids, organization_ids=organization_ids)
    return tuple(
        MemberRecord(r.account_id, r.account, r.organization_id, r.organization, r.role)
        for r in rows
    )


async def list_keys(
    grid: Grid, caller: Principal, account: str = "", limit: int = 1000, cursor: str = ""
) -> Page[KeyRecord]:
    """The caller's keys, the newest first; an operator may ask for another account's.

    Raises:
        NotFound: ``account.unknown``.
        UsageError: ``usage.invalid``: the cursor is not one of ours.
    """
    before = _before(cursor)
    async with grid.db.read() as tx:
        account_id = caller.account_id
        if account:
            account_id = (await find_account(tx, account)).id
            if not caller.operator and account_id != caller.account_id:
                raise no_account(account)
        rows = await people.keys_page(tx, account_id, limit + 1, before)
        items = tuple(key_record(row, tx.now) for row in rows[:limit])
    return Page(items, _behind(items[-1]) if len(rows) > limit else "")


def _before(cursor: str) -> tuple[float, str] | None:
    at, _, object_id = cursor.partition("~")
    try:
        moment = float(at or "0")
    except ValueError:
        moment = math.nan
    if not math.isfinite(moment) or not object_id.isprintable():
        raise UsageError(
            "usage.invalid",
            f"{cursor[:60]!r} is not a cursor of this list.",
            "Give back a cursor as it was answered, or none to begin at the beginning.",
            field="cursor",
        )
    return (moment, object_id) if cursor else None


def _behind(last: KeyRecord | InviteRecord) -> str:
    return f"{last.created_at!r}~{last.id}"


def key_record(row: AnyRow, now: float) -> KeyRecord:
    """What is told of a key."""
    live = row.expires_at is None or row.expires_at > now
    return KeyRecord(
        row.id,
        row.account_id,
        row.name,
        row.prefix,
        tuple(sorted(row.scopes)),
        row.created_at,
        row.expires_at,
        row.revoked_at,
        row.last_used_at,
        valid=live and row.revoked_at is None,
    )


async def list_invites(grid: Grid, limit: int = 1000, cursor: str = "") -> Page[InviteRecord]:
    """Invites, the newest first.

    Raises:
        UsageError: ``usage.invalid``: the cursor is not one of ours.
    """
    before = _before(cursor)
    async with grid.db.read() as tx:
        rows = await invites.invites_page(tx, limit + 1, before)
        items = tuple(invite_record(row, tx.now) for row in rows[:limit])
    return Page(items, _behind(items[-1]) if len(rows) > limit else "")


def invite_record(row: AnyRow, now: float) -> InviteRecord:
    """What is told of an invite."""
    live = row.expires_at is None or row.expires_at > now
    left = row.uses_left is None or row.uses_left > 0
    return InviteRecord(
        row.id,
        row.account_id,
        row.account or "",
        row.trusted,
        row.note,
        row.created_at,
        row.expires_at,
        row.uses_left,
        row.revoked,
        valid=live and left and not row.revoked,
    )


async def audit(
    grid: Grid, after: str = "", limit: int = 200, account: str = ""
) -> tuple[AuditRecord, ...]:
    """What people have asked for and was done, behind the cursor ``after``, in commit order; of one
    account, or of all.

    Raises:
        NotFound: ``account.unknown``.
        UsageError: ``usage.invalid``: the cursor is not one of ours.
    """
    cursor = outbox.parse_cursor(after)
    async with grid.db.read() as tx:
        account_id = (await find_account(tx, account)).id if account else None
        rows = await outbox.read(tx, cursor, limit, actors=True, account_id=account_id)
        names = await people.account_names(tx, {r.account_id for r in rows})
        keys = await people.keys_by_id(tx, {r.key_id for r in rows})
    told = {k.id: f"{k.name} ({k.prefix}...)" for k in keys}
    return tuple(
        AuditRecord(event_record(r), names.get(r.account_id, ""), told.get(r.key_id, ""))
        for r in rows
    )
