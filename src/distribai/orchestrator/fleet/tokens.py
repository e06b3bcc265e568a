"""What lets nodes in and lets them speak: the grid's standing invite, and their sessions' tokens.

Newer nodes' session tokens are signed and short-lived (``fleet.passes``); older ones' are random,
and good as long as their session. Keys of people: ``people.keys``. The invite's text is kept in a
file that only the operator's user may read, so that every start prints the same join link.
"""

from __future__ import annotations

from pathlib import Path

from distribai import durable
from distribai.core.ids import RANDOM_BYTES, make_id
from distribai.core.people import Principal
from distribai.core.states import Standing
from distribai.errors import NotAllowed, Unauthenticated
from distribai.orchestrator.context import Grid
from distribai.orchestrator.fleet import passes
from distribai.orchestrator.people import access
from distribai.orchestrator.secrets import Entropy, hash_secret, new_secret
from distribai.store.engine import AnyRow, Database, Tx
from distribai.store.statements import fleet

SESSION_BYTES = 32
INVITE_BYTES = 16

BARRED = frozenset({Standing.QUARANTINED.value, Standing.BANNED.value})
"""Standings whose nodes get no work and move no bytes."""


async def node_of_pass(grid: Grid, token: str) -> Principal:
    """The node whose open session a short-lived token belongs to.

    Raises:
        Unauthenticated: ``auth.invalid``: it is not good, or its session has ended.
        NotAllowed: ``auth.forbidden``: the node is quarantined or banned.
    """
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


async def node_of_token(tx: Tx, token_hash: str) -> Principal | None:
    """The node whose open session has a random token with this hash; None when no node's has.

    Raises:
        NotAllowed: ``auth.forbidden``: the node is quarantined or banned.
    """
    node = await fleet.node_of_token(tx, token_hash)
    return None if node is None else _node(node)


def _node(node: AnyRow) -> Principal:
    if node.standing in BARRED:
        raise NotAllowed("auth.forbidden", f"The node {node.id} is {node.standing}.")
    return Principal("node", node.id)


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
