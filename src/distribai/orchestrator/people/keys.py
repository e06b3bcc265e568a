"""Secrets of people: how keys and one-time logins look, and the operator's first ones.

Who holds a key: ``people.access``; making and revoking them: ``people.credentials``.
"""

from __future__ import annotations

from pathlib import Path

from distribai import durable
from distribai.core.ids import RANDOM_BYTES, make_id
from distribai.core.people import OPERATOR
from distribai.orchestrator.people import access
from distribai.orchestrator.secrets import Entropy, hash_secret, new_secret
from distribai.store.engine import Database
from distribai.store.statements import people

KEY_BYTES = 32

KEY_PREFIX = "dak_"
OPERATOR_PREFIX = "dop_"
LOGIN_PREFIX = "dol_"

SHOWN = 10
"""Characters of a key that lists show: its kind, and enough to tell it from others."""

LOGIN_S = 7 * 86400.0
"""A one-time login lets in for so long, in seconds."""

UNTOLD = "operator-token"
"""File in the state directory with a key that the operator has not been told yet."""


async def ensure_operator_key(db: Database, state_dir: Path, entropy: Entropy) -> str:
    """Make the operator's account, the organization ``home`` and the operator's first key at the
    first start, and return the key until :func:`key_was_told`; empty at every later start.

    Until then its text lies in a file, so that a process that dies before it has told anybody
    leaves no grid behind that nobody can operate.
    """
    path = state_dir / UNTOLD
    async with db.write() as tx:
        await access.ensure_home(tx)
        if await people.has_key(tx, OPERATOR):
            key = path.read_text(encoding="ascii").strip() if path.exists() else ""
            known = key and await people.valid_key(tx, hash_secret(key)) is not None
            return key if known else ""
        key = new_secret(OPERATOR_PREFIX, entropy, KEY_BYTES)
        durable.write(path, f"{key}\n".encode(), point="start.token", mode=0o600)
        await people.add_key(
            tx,
            id=make_id("key", entropy(RANDOM_BYTES)),
            account_id=OPERATOR,
            name="this machine, at the first start",
            prefix=key[:SHOWN],
            secret_hash=hash_secret(key),
            scopes=list(access.SCOPES),
        )
    return key


async def new_operator_login(db: Database, entropy: Entropy) -> str:
    """A one-time login of the first operator, for another machine; earlier ones let nobody in any
    more."""
    login = new_secret(LOGIN_PREFIX, entropy, KEY_BYTES)
    async with db.write() as tx:
        await people.add_login(tx, hash_secret(login), OPERATOR, tx.now + LOGIN_S)
    return login


def key_was_told(state_dir: Path) -> None:
    """The operator has the key: keep its text no longer."""
    (state_dir / UNTOLD).unlink(missing_ok=True)
