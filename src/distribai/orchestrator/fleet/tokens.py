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
from distribai.store.statements import facts, invites, sessions

SESSION_BYTES = 32
INVITE_BYTES = 16

INVITE_FILE = "invite"
"""Where the text of the standing invite lies, readable by the orchestrator's user alone."""

STANDING_INVITE = "standing_invite"
"""The fact that names the invite of the join link that every start prints."""

NO_INVITE = (
    "The join link of this replica lets no new node in: the grid's invite was made by another "
    "replica, and its text is in no file here. Take the link of that one, or copy its file "
    "`invite`, or let --keys name a directory that all replicas share; or make an invite with "
    "`distribai grid invite create`. If the text is lost: `distribai grid invite revoke` on it, "
    "then the next start makes another."
)
"""What a replica says whose link has no invite."""

BARRED = frozenset({Standing.QUARANTINED.value, Standing.BANNED.value})
"""Standings whose nodes get no work and move no bytes."""


def barred(node: AnyRow) -> NotAllowed | None:
    """What a node (``id``, ``standing``, ``standing_reason``) is told that gets no session; None:
    it may have one."""
    why = f": {node.standing_reason.rstrip('.')}." if node.standing_reason else "."
    if node.standing == Standing.BANNED:
        return NotAllowed(
            "node.banned",
            f"The grid's operator has banned this node{why}",
            f"Ask the operator to pardon it: distribai nodes pardon {node.id[:13]} --why ... Until "
            "then it is refused whenever it is started; its key and cache stay on this disk.",
        )
    if node.standing == Standing.QUARANTINED:
        return NotAllowed(
            "node.quarantined",
            f"This node is quarantined{why}",
            "It may go on when the grid's operator has looked, and knocks again by itself until "
            f"then. The operator ends it: distribai nodes pardon {node.id[:13]} --why ...",
        )
    return None


async def node_of_pass(grid: Grid, token: str) -> Principal:
    """The node whose open session a short-lived token belongs to.

    Raises:
        Unauthenticated: ``auth.invalid``: it is not good, or its session has ended.
        NotAllowed: ``auth.forbidden``: the node is quarantined or banned.
    """
    async with grid.db.read() as tx:
        found = await passes.verify(grid, tx, token)
        node = await sessions.node_of_session(tx, found.session_id, found.node_id)
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
    node = await sessions.node_of_token(tx, token_hash)
    return None if node is None else _node(node)


def _node(node: AnyRow) -> Principal:
    if node.standing in BARRED:
        raise NotAllowed("auth.forbidden", f"The node {node.id} is {node.standing}.")
    return Principal("node", node.id)


async def ensure_invite(db: Database, state_dir: Path, entropy: Entropy, keys: str = "") -> str:
    """The grid's one standing invite, made when there is none; a file holds its text: in ``keys``,
    the directory that all replicas have their keys from, if there is such. Empty where there is an
    invite and its text is not here: another replica has it.

    Raises:
        OSError: the file cannot be read or written.
    """
    own = state_dir / INVITE_FILE
    shared = Path(keys) / INVITE_FILE if keys else own
    path = own if own.exists() and not shared.exists() else shared
    async with db.write() as tx:
        fresh = make_id("inv", entropy(RANDOM_BYTES))
        invite, found = await _kept(tx, path)
        # Replicas that start together wait for each other here.
        await facts.put_once(tx, STANDING_INVITE, found or fresh)
        standing = await facts.locked(tx, STANDING_INVITE)
        assert standing is not None
        if standing != fresh and not invite:
            invite, _ = await _kept(tx, path)  # the other one has written it meanwhile
            if not invite and await invites.still_lets_in(tx, standing):
                return ""
        if invite:
            return invite
        await access.ensure_home(tx)
        await facts.put(tx, STANDING_INVITE, fresh)
        invite = new_secret("", entropy, INVITE_BYTES)
        durable.write(path, f"{invite}\n".encode(), point="start.invite", mode=0o600)
        await invites.add_invite(tx, fresh, hash_secret(invite))
    return invite


async def _kept(tx: Tx, path: Path) -> tuple[str, str]:
    """Text and id of the invite in a file; empty when there is none, or it lets nobody in."""
    text = _text(path)
    found = await invites.valid_invite(tx, hash_secret(text)) if text else None
    return ("", "") if found is None else (text, found)


def _text(path: Path) -> str:
    return path.read_text(encoding="ascii").strip() if path.exists() else ""
