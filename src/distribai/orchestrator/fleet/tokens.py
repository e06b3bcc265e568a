"""Who may speak: keys of accounts, one-time logins, node session tokens, invites.

Newer nodes' session tokens are signed and short-lived (``fleet.passes``). All others are random,
128 bits or more, and stored as SHA-256 only: nothing in the database lets anybody in. (A fast hash
is right here: there is no dictionary to try against random bits.) The invite's text is kept in a
file that only the operator's user may read, so that every start prints the same join link.
"""

from __future__ import annotations

import base64
import hashlib
from collections.abc import Callable
from pathlib import Path

from distribai import durable
from distribai.core.ids import RANDOM_BYTES, make_id
from distribai.core.people import OPERATOR, Principal
from distribai.core.states import Standing
from distribai.errors import NotAllowed, Unauthenticated
from distribai.orchestrator.context import Grid
from distribai.orchestrator.fleet import passes
from distribai.orchestrator.people import access
from distribai.store.engine import AnyRow, Database
from distribai.store.statements import fleet, people

OPERATOR_BYTES = 32
SESSION_BYTES = 32
INVITE_BYTES = 16

KEY_PREFIX = "dak_"
OPERATOR_PREFIX = "dop_"
LOGIN_PREFIX = "dol_"

SHOWN = 10
"""Characters of a key that lists show: its kind, and enough to tell it from others."""

LOGIN_S = 7 * 86400.0
"""A one-time login lets in for so long, in seconds."""

UNTOLD = "operator-token"
"""File in the state directory with a token that the operator has not been told yet."""

BARRED = frozenset({Standing.QUARANTINED.value, Standing.BANNED.value})
"""Standings whose nodes get no work and move no bytes."""

Entropy = Callable[[int], bytes]


def new_secret(prefix: str, entropy: Entropy, size: int) -> str:
    """A fresh secret, URL-safe, with a prefix that says what it is."""
    return prefix + base64.urlsafe_b64encode(entropy(size)).decode().rstrip("=")


def hash_secret(secret: str) -> str:
    """What is stored of a secret."""
    return hashlib.sha256(secret.encode()).hexdigest()


async def verify_token(grid: Grid, token: str) -> Principal:
    """Who ``token`` belongs to.

    Raises:
        Unauthenticated: ``auth.invalid``: unknown, expired or revoked.
        NotAllowed: ``auth.forbidden``: the token of a node that is quarantined or banned.
    """
    if passes.looks_like(token):
        return await _verify_pass(grid, token)
    hashed = hash_secret(token)
    node = None
    async with grid.db.read() as tx:
        holder = await access.holder_of(tx, hashed)
        if holder is None:
            node = await fleet.node_of_token(tx, hashed)
    if holder is not None:
        if holder.stale:
            async with grid.db.write() as tx:
                await people.key_used(tx, holder.principal.key_id)
        return holder.principal
    if node is None:
        raise Unauthenticated(
            "auth.invalid",
            "The token is unknown, expired or revoked.",
            "Log in again (`distribai login`), or ask the operator for a one-time login; a node "
            "gets a new token whenever it connects.",
        )
    return _node(node)


async def _verify_pass(grid: Grid, token: str) -> Principal:
    """The node whose open session a short-lived token belongs to."""
    async with grid.db.read() as tx:
        found = await passes.verify(grid, tx, token)
        node = await fleet.node_of_session(tx, found.session_id, found.node_id)
    if node is None:
        raise Unauthenticated(
            "auth.invalid",
            "The session of the node's token has ended.",
            "A node gets a new one whenever it connects.",
        )
    return _node(node)


def _node(node: AnyRow) -> Principal:
    if node.standing in BARRED:
        raise NotAllowed("auth.forbidden", f"The node {node.id} is {node.standing}.")
    return Principal("node", node.id)


async def ensure_operator_token(db: Database, state_dir: Path, entropy: Entropy) -> str:
    """Make the operator's account, the organization ``home`` and the operator's first key at the
    first start, and return the key until :func:`token_was_told`; empty at every later start.

    Until then its text lies in a file, so that a process that dies before it has told anybody
    leaves no grid behind that nobody can operate.
    """
    path = state_dir / UNTOLD
    async with db.write() as tx:
        await access.ensure_home(tx)
        if await people.has_key(tx, OPERATOR):
            token = path.read_text(encoding="ascii").strip() if path.exists() else ""
            known = token and await people.valid_key(tx, hash_secret(token)) is not None
            return token if known else ""
        token = new_secret(OPERATOR_PREFIX, entropy, OPERATOR_BYTES)
        durable.write(path, f"{token}\n".encode(), point="start.token", mode=0o600)
        await people.add_key(
            tx,
            id=make_id("key", entropy(RANDOM_BYTES)),
            account_id=OPERATOR,
            name="this machine, at the first start",
            prefix=token[:SHOWN],
            secret_hash=hash_secret(token),
            scopes=list(access.SCOPES),
        )
    return token


async def new_operator_login(db: Database, entropy: Entropy) -> str:
    """A one-time login of the first operator, for another machine; earlier ones let nobody in any
    more."""
    login = new_secret(LOGIN_PREFIX, entropy, OPERATOR_BYTES)
    async with db.write() as tx:
        await people.add_login(tx, hash_secret(login), OPERATOR, tx.now + LOGIN_S)
    return login


def token_was_told(state_dir: Path) -> None:
    """The operator has the token: keep its text no longer."""
    (state_dir / UNTOLD).unlink(missing_ok=True)


async def ensure_invite(db: Database, state_dir: Path, entropy: Entropy) -> str:
    """The grid's standing invite, made when there is none; its file holds the text."""
    path = state_dir / "invite"
    async with db.write() as tx:
        invite = path.read_text(encoding="ascii").strip() if path.exists() else ""
        if invite and await fleet.valid_invite(tx, hash_secret(invite)) is not None:
            return invite
        await access.ensure_home(tx)
        invite = new_secret("", entropy, INVITE_BYTES)
        durable.write(path, f"{invite}\n".encode(), point="start.invite", mode=0o600)
        invite_id = make_id("inv", entropy(RANDOM_BYTES))
        await fleet.add_invite(tx, invite_id, hash_secret(invite))
    return invite
