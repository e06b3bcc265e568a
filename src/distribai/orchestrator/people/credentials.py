"""Keys, one-time logins and invites: secrets that are random, told once, and stored as hashes."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import replace

from distribai.core.ids import RANDOM_BYTES, make_id
from distribai.core.people import (
    Principal,
    Scope,
)
from distribai.core.text import clean
from distribai.errors import Conflict, NotAllowed, NotFound, Unauthenticated, Unavailable
from distribai.orchestrator import events
from distribai.orchestrator.context import Grid
from distribai.orchestrator.fleet.tokens import INVITE_BYTES
from distribai.orchestrator.idempotency import Key, told_once
from distribai.orchestrator.people import access, keys
from distribai.orchestrator.people.queries import (
    find_account,
    invite_record,
    key_record,
)
from distribai.orchestrator.people.records import (
    InviteRecord,
    KeyRecord,
    NewInvite,
    NewKey,
    NewLogin,
)
from distribai.orchestrator.secrets import hash_secret, new_secret
from distribai.store.engine import AnyRow, Tx
from distribai.store.statements import invites, people
from distribai.wire import joinlink

MAX_NAME = 100
"""Characters of a key's name and of an invite's note."""

# ------------------------------------------------------------------ logins


async def new_login(grid: Grid, ref: str) -> NewLogin:
    """A fresh one-time login for an account, in the place of an earlier one; keys stay valid.

    Raises:
        NotFound: ``account.unknown``.
        Conflict: ``account.closed``.
    """
    async with grid.db.write() as tx:
        row = await find_account(tx, ref)
        if row.closed_at is not None:
            raise Conflict("account.closed", f"The account {row.name} is closed.")
        return await add_login(grid, tx, row.id, row.name)


async def add_login(grid: Grid, tx: Tx, account_id: str, name: str) -> NewLogin:
    """A one-time login for an account whose row the transaction has made or read."""
    login = new_secret(keys.LOGIN_PREFIX, grid.entropy, keys.KEY_BYTES)
    expires = tx.now + keys.LOGIN_S
    await people.add_login(tx, hash_secret(login), account_id, expires)
    await events.record(tx, "account.login", data={"account": account_id, "name": name})
    return NewLogin(account_id, name, login, expires)


async def log_in(grid: Grid, login: str, key_name: str) -> NewKey:
    """Exchange a one-time login for a key of its account.

    Raises:
        Unauthenticated: ``auth.invalid``: it is unknown, used, expired, or its account is closed.
    """
    async with grid.db.write() as tx:
        account_id = await people.take_login(tx, hash_secret(login))
        account = None if account_id is None else await people.account(tx, account_id)
        if account is not None and account.closed_at is None:
            events.act_as(Principal("account", account_id=account.id))
            return await _add_key(
                grid, tx, account, clean(key_name, MAX_NAME, lines=False), access.SCOPES, None
            )
    raise Unauthenticated(
        "auth.invalid",
        "The one-time login is unknown, used or expired.",
        "Ask an operator for another: `distribai account login NAME`.",
    )


# ------------------------------------------------------------------ keys


async def create_key(
    grid: Grid,
    caller: Principal,
    name: str,
    scopes: Collection[Scope],
    expires_s: float | None = None,
    key: Key | None = None,
) -> NewKey:
    """Make a key of the caller's account that may do no more, and lasts no longer, than the key
    that the caller uses.

    Args:
        grid: where.
        caller: whose key it will be.
        name: what it is for, for people.
        scopes: what it may be used for; none given: what the caller's own key may.
        expires_s: seconds from now on that it is valid; None: as long as the caller's own.
        key: of the request; asked again, the same key is told with another secret.

    Raises:
        NotAllowed: ``key.scope``.
        Conflict: ``http.idempotency``.
    """
    wanted = frozenset(scopes) or caller.scopes
    if more := sorted(wanted - caller.scopes):
        raise NotAllowed(
            "key.scope",
            f"This key cannot make one with the scope {more[0]}, which it lacks.",
            "Use a key that has it; `distribai login` makes one with all.",
        )

    async def make(tx: Tx) -> tuple[str, NewKey]:
        own = await people.key(tx, caller.key_id)
        account = await people.account(tx, caller.account_id)
        assert own is not None and account is not None, "neither is ever deleted"  # noqa: PT018
        until = own.expires_at if expires_s is None else tx.now + expires_s
        if own.expires_at is not None and until is not None and until > own.expires_at:
            raise NotAllowed(
                "key.scope",
                "This key cannot make one that lasts longer than itself.",
                "Give a shorter time, or use a key that lasts.",
            )
        label = clean(name, MAX_NAME, lines=False)
        made = await _add_key(grid, tx, account, label, tuple(sorted(wanted)), until)
        return made.key.id, made

    async def again(tx: Tx, key_id: str) -> NewKey:
        secret = _fresh(grid)
        await people.new_secret(tx, key_id, secret[: keys.SHOWN], hash_secret(secret))
        row = await people.key(tx, key_id)
        assert row is not None, "keys are never deleted"
        return NewKey(key_record(row, tx.now), secret, caller.name)

    return await told_once(grid, key, make, again)


def _fresh(grid: Grid) -> str:
    return new_secret(keys.KEY_PREFIX, grid.entropy, keys.KEY_BYTES)


async def _add_key(
    grid: Grid,
    tx: Tx,
    account: AnyRow,
    name: str,
    scopes: tuple[Scope, ...],
    expires_at: float | None,
) -> NewKey:
    secret = _fresh(grid)
    key_id = make_id("key", grid.entropy(RANDOM_BYTES))
    await people.add_key(
        tx,
        id=key_id,
        account_id=account.id,
        name=name,
        prefix=secret[: keys.SHOWN],
        secret_hash=hash_secret(secret),
        scopes=[scope.value for scope in scopes],
        expires_at=expires_at,
    )
    await events.record(
        tx,
        "key.created",
        data={"account": account.id, "key": key_id, "name": name, "scopes": list(scopes)},
    )
    row = await people.key(tx, key_id)
    assert row is not None, "it was made a moment ago"
    return NewKey(key_record(row, tx.now), secret, account.name)


async def revoke_key(grid: Grid, caller: Principal, key_id: str) -> KeyRecord:
    """Revoke a key of the caller's account; an operator may revoke anybody's.

    Raises:
        NotFound: ``key.unknown``: there is none, or it is another's.
    """
    async with grid.db.write() as tx:
        row = await people.key(tx, key_id) if key_id.isprintable() else None
        if row is None or not (caller.operator or row.account_id == caller.account_id):
            raise NotFound(
                "key.unknown",
                f"No key has the id {key_id[:80]!r}.",
                "`distribai grid key list` lists yours.",
            )
        if row.revoked_at is None:
            await people.revoke_key(tx, row.id)
            data = {"account": row.account_id, "key": row.id, "name": row.name}
            await events.record(tx, "key.revoked", data=data)
        told = await people.key(tx, row.id)
        assert told is not None, "keys are never deleted"
        return key_record(told, tx.now)


# ------------------------------------------------------------------ invites


async def create_invite(
    grid: Grid,
    account: str,
    *,
    trusted: bool,
    uses: int | None,
    expires_s: float | None,
    note: str = "",
    key: Key | None = None,
) -> NewInvite:
    """Make an invite for an account's machines.

    Args:
        grid: where.
        account: whose nodes they will be, by id or name.
        trusted: whether they are trusted from the beginning, or on probation.
        uses: how many new nodes it lets in; None: any number.
        expires_s: seconds from now on in which it does; None: for ever.
        note: what it is for, for people.
        key: of the request; asked again, the same invite is told with another secret.

    Raises:
        NotFound: ``account.unknown``.
        Conflict: ``account.closed``; ``http.idempotency``.
        Unavailable: ``grid.unreachable``: this process does not listen for nodes yet.
    """
    if not grid.join_link:
        raise Unavailable("grid.unreachable", "The grid does not listen for nodes yet.")
    secret = new_secret("", grid.entropy, INVITE_BYTES)
    invite_id = make_id("inv", grid.entropy(RANDOM_BYTES))

    async def make(tx: Tx) -> tuple[str, InviteRecord]:
        owner = await find_account(tx, account)
        if owner.closed_at is not None:
            raise Conflict("account.closed", f"The account {owner.name} is closed.")
        await invites.add_invite(
            tx,
            invite_id,
            hash_secret(secret),
            account_id=owner.id,
            trusted=trusted,
            note=clean(note, MAX_NAME, lines=False),
            uses_left=uses,
            expires_at=None if expires_s is None else tx.now + expires_s,
        )
        data = {"invite": invite_id, "account": owner.id, "name": owner.name, "trusted": trusted}
        await events.record(tx, "invite.created", data=data)
        return invite_id, await _invite(tx, invite_id)

    async def again(tx: Tx, made: str) -> InviteRecord:
        await invites.new_invite_secret(tx, made, hash_secret(secret))
        return await _invite(tx, made)

    told = await told_once(grid, key, make, again)
    link = replace(joinlink.parse(grid.join_link), invite=secret)
    return NewInvite(told, str(link))


async def revoke_invite(grid: Grid, invite_id: str) -> InviteRecord:
    """Let an invite let nobody in any more; nodes that came by it stay.

    Raises:
        NotFound: ``invite.unknown``.
    """
    async with grid.db.write() as tx:
        if not (invite_id.isprintable() and await invites.revoke_invite(tx, invite_id)):
            raise NotFound(
                "invite.unknown",
                f"No invite has the id {invite_id[:80]!r}.",
                "`distribai grid invite list` lists them.",
            )
        await events.record(tx, "invite.revoked", data={"invite": invite_id})
        return await _invite(tx, invite_id)


async def _invite(tx: Tx, invite_id: str) -> InviteRecord:
    row = await invites.invite(tx, invite_id)
    assert row is not None, "invites are never deleted"
    return invite_record(row, tx.now)
