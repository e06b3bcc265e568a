"""Who may speak: the operator's token, node session tokens, invites.

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
from distribai.core.states import Standing
from distribai.errors import NotAllowed, Unauthenticated
from distribai.orchestrator.context import Grid
from distribai.orchestrator.fleet import passes
from distribai.orchestrator.records import Principal
from distribai.store.engine import AnyRow, Database
from distribai.store.statements import fleet

OPERATOR_BYTES = 32
SESSION_BYTES = 32
INVITE_BYTES = 16

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
    async with grid.db.read() as tx:
        if (found := await fleet.token(tx, hashed)) is not None:
            return Principal(found.kind)
        node = await fleet.node_of_token(tx, hashed)
    if node is None:
        raise Unauthenticated(
            "auth.invalid",
            "The token is unknown, expired or revoked.",
            "The operator's token was printed at the grid's first start; a node gets a new one "
            "whenever it connects.",
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
    """Make the operator's token at the first start, and return it until :func:`token_was_told`;
    empty at every later start.

    Until then its text lies in a file, so that a process that dies before it has told anybody
    leaves no grid behind that nobody can operate.
    """
    path = state_dir / UNTOLD
    async with db.write() as tx:
        if await fleet.has_token(tx, "operator"):
            token = path.read_text(encoding="ascii").strip() if path.exists() else ""
            known = token and await fleet.token(tx, hash_secret(token)) is not None
            return token if known else ""
        token = new_secret("dop_", entropy, OPERATOR_BYTES)
        durable.write(path, f"{token}\n".encode(), point="start.token", mode=0o600)
        await fleet.add_token(tx, hash_secret(token), "operator")
    return token


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
        invite = new_secret("", entropy, INVITE_BYTES)
        durable.write(path, f"{invite}\n".encode(), point="start.invite", mode=0o600)
        invite_id = make_id("inv", entropy(RANDOM_BYTES))
        await fleet.add_invite(tx, invite_id, hash_secret(invite))
    return invite
