"""From a key to who holds it; and the operator's account and organization, made with the grid."""

from __future__ import annotations

from dataclasses import dataclass

from distribai.core.ids import RANDOM_BYTES, make_id
from distribai.core.people import (
    ALL_SCOPES,
    HOME,
    HOME_NAME,
    OPERATOR,
    OPERATOR_NAME,
    Policy,
    Principal,
    Quota,
    Role,
    Scope,
)
from distribai.core.plain import to_plain
from distribai.orchestrator.context import Grid
from distribai.store.engine import AnyRow, Tx
from distribai.store.statements import people

USED_S = 60.0
"""A key's last use is written at most so often, in seconds."""

SCOPES = tuple(sorted(ALL_SCOPES))


@dataclass(frozen=True, slots=True)
class Holder:
    """Who holds a key; ``stale``: its last use is worth writing again."""

    principal: Principal
    stale: bool


async def holder_of(tx: Tx, secret_hash: str) -> Holder | None:
    """Who holds the key with this hash; None when it opens nothing (any more)."""
    key = await people.valid_key(tx, secret_hash)
    if key is None:
        return None
    roles = {r.organization_id: Role(r.role) for r in await people.roles_of(tx, key.account_id)}
    principal = Principal(
        "account",
        account_id=key.account_id,
        name=key.account,
        key_id=key.id,
        roles=roles,
        scopes=frozenset(Scope(s) for s in key.scopes),
    )
    return Holder(principal, key.last_used_at is None or tx.now - key.last_used_at > USED_S)


async def used(grid: Grid, holder: Holder) -> Principal:
    """The holder of a key that is being used; that it was is written now and then."""
    if holder.stale:
        async with grid.db.write() as tx:
            await people.key_used(tx, holder.principal.key_id)
    return holder.principal


async def ensure_home(tx: Tx) -> AnyRow:
    """Make the organization ``home`` and the first operator's account where they are missing; the
    row of ``home``, locked: replicas that start together do so one after the other."""
    await people.add_organization(tx, HOME, HOME_NAME, to_plain(Policy()), to_plain(Quota()))
    home = await people.lock_organization(tx, HOME)
    assert home is not None, "it was made a moment ago"
    if await people.add_account(tx, OPERATOR, OPERATOR_NAME):
        await people.set_role(tx, OPERATOR, HOME, Role.OPERATOR)
    for old in await people.take_tokens(tx, "operator"):
        if old.revoked:
            continue
        await people.add_key(
            tx,
            # Of the token's hash: a start that is repeated makes the same key.
            id=make_id("key", bytes.fromhex(old.token_hash)[:RANDOM_BYTES]),
            account_id=OPERATOR,
            name="token of an earlier version",
            prefix="dop_",
            secret_hash=old.token_hash,
            scopes=list(SCOPES),
            expires_at=old.expires_at,
        )
    return home
