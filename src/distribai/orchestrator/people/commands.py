"""What changes accounts, organizations and roles.

Each command is one transaction with its event, which says whose doing it is.
"""

from __future__ import annotations

from distribai.core.people import (
    HOME,
    Policy,
    Quota,
    Role,
    check_name,
    check_policy,
    check_quota,
    check_role,
)
from distribai.core.plain import to_plain
from distribai.errors import Conflict
from distribai.orchestrator import events
from distribai.orchestrator.context import Grid
from distribai.orchestrator.idempotency import Key, once, told_once
from distribai.orchestrator.people import access, credentials
from distribai.orchestrator.people.queries import (
    find_account,
    find_organization,
)
from distribai.orchestrator.people.records import (
    NewLogin,
)
from distribai.store.engine import AnyRow, Tx
from distribai.store.statements import invites, people

# ------------------------------------------------------------------ accounts


async def create_account(grid: Grid, name: str, key: Key | None = None) -> NewLogin:
    """Make an account that is in no organization yet, and a one-time login for it.

    Raises:
        UsageError: ``people.name``.
        Conflict: ``account.taken``; ``http.idempotency``.
    """
    check_name(name, "account")
    account_id = grid.new_id("acct")

    async def make(tx: Tx) -> tuple[str, NewLogin]:
        if not await people.add_account(tx, account_id, name):
            raise Conflict(
                "account.taken", f"There is an account {name} already.", "Take another name."
            )
        await events.record(tx, "account.created", data={"account": account_id, "name": name})
        return account_id, await credentials.add_login(grid, tx, account_id, name)

    async def again(tx: Tx, made: str) -> NewLogin:
        return await credentials.add_login(grid, tx, made, name)

    return await told_once(grid, key, make, again)


async def close_account(grid: Grid, ref: str) -> None:
    """Close an account: its keys and invites let nobody in any more, what it did stays on record.

    Raises:
        NotFound: ``account.unknown``.
        Conflict: ``people.last_operator``.
    """
    async with grid.db.write() as tx:
        await access.ensure_home(tx)
        row = await find_account(tx, ref)
        if row.closed_at is not None:
            return
        await _keep_an_operator(tx, row.id)
        await people.close_account(tx, row.id)
        await invites.revoke_invites_of(tx, row.id)
        await events.record(tx, "account.closed", data={"account": row.id, "name": row.name})


# ------------------------------------------------------------------ organizations


async def create_organization(grid: Grid, name: str, key: Key | None = None) -> str:
    """Make an organization without members whose jobs wait for the operator; its id.

    Raises:
        UsageError: ``people.name``.
        Conflict: ``organization.taken``; ``http.idempotency``.
    """
    check_name(name, "organization")
    organization_id = grid.new_id("org")

    async def make(tx: Tx) -> str:
        made = await people.add_organization(
            tx, organization_id, name, to_plain(Policy()), to_plain(Quota())
        )
        if not made:
            raise Conflict(
                "organization.taken",
                f"There is an organization {name} already.",
                "Take another name.",
            )
        data = {"organization": organization_id, "name": name}
        await events.record(tx, "organization.created", data=data)
        return organization_id

    return await once(grid, key, make)


async def set_role(grid: Grid, organization: str, account: str, role: Role) -> None:
    """Make an account a member of an organization, or give it another role there.

    Raises:
        NotFound: ``organization.unknown`` or ``account.unknown``.
        UsageError: ``people.role``.
        Conflict: ``people.last_operator``.
    """
    async with grid.db.write() as tx:
        where, who = await _membership(tx, organization, account)
        check_role(role, where.id)
        before = await people.role(tx, who.id, where.id)
        if before == role:
            return
        if before == Role.OPERATOR:
            await _keep_an_operator(tx, who.id)
        await people.set_role(tx, who.id, where.id, role)
        await events.record(tx, "member.set", data={**_names(where, who), "role": role.value})


async def remove_member(grid: Grid, organization: str, account: str) -> None:
    """Take an account out of an organization; one that is not in it stays so.

    Raises:
        NotFound: ``organization.unknown`` or ``account.unknown``.
        Conflict: ``people.last_operator``.
    """
    async with grid.db.write() as tx:
        where, who = await _membership(tx, organization, account)
        before = await people.role(tx, who.id, where.id)
        if before is None:
            return
        if before == Role.OPERATOR:
            await _keep_an_operator(tx, who.id)
        await people.remove_member(tx, who.id, where.id)
        await events.record(tx, "member.removed", data=_names(where, who))


async def _membership(tx: Tx, organization: str, account: str) -> tuple[AnyRow, AnyRow]:
    """Both rows; the organization's is locked, so that no two operators leave at once."""
    where = await find_organization(tx, organization)
    await people.lock_organization(tx, where.id)
    return where, await find_account(tx, account)


def _names(where: AnyRow, who: AnyRow) -> dict[str, str]:
    return {
        "organization": where.id,
        "organization_name": where.name,
        "account": who.id,
        "name": who.name,
    }


async def _keep_an_operator(tx: Tx, account_id: str) -> None:
    """Refuse to take the grid's only operator away; ``home`` is locked.

    Raises:
        Conflict: ``people.last_operator``.
    """
    if await people.role(tx, account_id, HOME) != Role.OPERATOR:
        return
    if not await people.other_operators(tx, account_id):
        raise Conflict(
            "people.last_operator",
            "That would leave the grid without an operator.",
            "Make another one first: `distribai team add home NAME --role operator`.",
        )


async def set_policy(grid: Grid, organization: str, policy: Policy) -> None:
    """Decide when an organization's jobs are accepted at once; jobs that wait go on waiting.

    Raises:
        NotFound: ``organization.unknown``.
        UsageError: ``people.policy``.
    """
    await _change(grid, organization, "policy", to_plain(check_policy(policy)))


async def set_quota(grid: Grid, organization: str, quota: Quota) -> None:
    """Limit what an organization may have; what it has already stays.

    Raises:
        NotFound: ``organization.unknown``.
        UsageError: ``people.quota``.
    """
    await _change(grid, organization, "quota", to_plain(check_quota(quota)))


async def _change(grid: Grid, organization: str, what: str, value: object) -> None:
    async with grid.db.write() as tx:
        row = await find_organization(tx, organization)
        await people.change_organization(tx, row.id, **{what: value})
        data = {"organization": row.id, "name": row.name, what: value}
        await events.record(tx, f"organization.{what}", data=data)
