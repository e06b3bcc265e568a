"""Short-lived tokens of nodes' sessions, with which they fetch and bring blobs.

A token is a JWT (RFC 7519) signed with Ed25519 (``EdDSA``, RFC 8037). It names the grid (``iss``),
the blobs (``aud``), the node (``sub``: the hash of its key), the session (``sid``), and ends after
:data:`LIFETIME_S`. The session's stream brings the next one when half of that has passed. All times
are database time. It opens nothing alone: at each request the session must be open and the node's
standing good, whatever the token says.

Each process signs with a key of its own that it never writes down, and changes every
:data:`ROTATE_S`; its public half lies in the database under the token's ``kid``, where every
replica finds it for as long as a token of it can be good. So there is no signing key to keep, share
or lose.
"""

from __future__ import annotations

import asyncio
import base64
import hashlib
import math
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import jwt
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey, Ed25519PublicKey

from distribai.errors import Unauthenticated
from distribai.store.statements import fleet
from distribai.wire.v1 import distribai_pb2 as pb

if TYPE_CHECKING:
    from distribai.orchestrator.context import Grid
    from distribai.store.engine import Tx

LIFETIME_S = 900.0
"""Seconds that a token is good for."""

ROTATE_S = 86_400.0
"""Seconds that a process signs with one key."""

FIRST_PROTOCOL = 2
"""The first protocol version whose nodes take new tokens over the stream; older ones get a token
that is good as long as their session."""

BATCH = 500
"""Tokens that are renewed at one go, about 50 ms; half a lifetime is there for the others."""

AUDIENCE = "distribai-blobs"
ALGORITHM = "EdDSA"
MAX_TOKEN = 2048
_FACT = "token_key."
_CLAIMS = ("iss", "aud", "sub", "sid", "iat", "exp")


@dataclass(frozen=True, slots=True)
class Pass:
    """What a good token says."""

    node_id: str
    session_id: str


@dataclass
class Ring:
    """One process's keys: the one that it signs with (``made_at`` on its own clock), and public
    ones by ``kid`` that it has looked up, each with the database time until which it counts."""

    key: Ed25519PrivateKey | None = None
    kid: str = ""
    made_at: float = -math.inf
    known: dict[str, tuple[Ed25519PublicKey, float]] = field(default_factory=dict)
    lock: asyncio.Lock = field(default_factory=asyncio.Lock)


async def ready(grid: Grid) -> None:
    """Have a key to sign with, whose public half is in the database.

    Raises:
        Unavailable: ``grid.database``.
    """
    ring = grid.ring
    async with ring.lock:
        if ring.key is not None and grid.clock() - ring.made_at < ROTATE_S:
            return
        key = Ed25519PrivateKey.from_private_bytes(grid.entropy(32))
        public = key.public_key().public_bytes_raw()
        kid = base64.urlsafe_b64encode(hashlib.sha256(public).digest()[:12]).decode()
        made_at = grid.clock()
        async with grid.db.write() as tx:
            for name, value in await fleet.facts(tx, _FACT):
                if _until(value) < tx.now:
                    await fleet.drop_fact(tx, name)
            until = tx.now + ROTATE_S + 2 * LIFETIME_S
            await fleet.set_fact_once(tx, _FACT + kid, f"{public.hex()} {until:.0f}")
        ring.key, ring.kid, ring.made_at = key, kid, made_at


def issue(grid: Grid, node_id: str, session_id: str, now: float) -> tuple[str, float]:
    """A token from ``now`` (database time) on, and when it ends; after :func:`ready`."""
    assert grid.ring.key is not None, "ready() comes first"
    until = now + LIFETIME_S
    claims = {
        "iss": grid.grid_id,
        "aud": AUDIENCE,
        "sub": node_id,
        "sid": session_id,
        "iat": now,
        "exp": until,
    }
    token = jwt.encode(claims, grid.ring.key, ALGORITHM, headers={"kid": grid.ring.kid})
    return token, until


def looks_like(token: str) -> bool:
    """Whether ``token`` is a JWT, good or bad, and none of the grid's other secrets."""
    return token.count(".") == 2


async def verify(grid: Grid, tx: Tx, token: str) -> Pass:
    """What a token says, if this grid signed it and it has not ended.

    Raises:
        Unauthenticated: ``auth.invalid``, with which of its promises does not hold.
    """
    if len(token) > MAX_TOKEN:
        raise _refused("it is too long")
    try:
        kid = jwt.get_unverified_header(token).get("kid")
        key = await _public_key(grid, tx, kid if isinstance(kid, str) else "")
        claims = jwt.decode(
            token,
            key,
            # Fixed: what the token itself says about it must decide nothing (RFC 8725, 3.1).
            algorithms=[ALGORITHM],
            audience=AUDIENCE,
            issuer=grid.grid_id,
            # Times are judged below, by the database's clock.
            options={
                "require": list(_CLAIMS),
                "verify_exp": False,
                "verify_iat": False,
                "verify_nbf": False,
            },
        )
    except jwt.PyJWTError as problem:
        raise _refused(str(problem)) from problem
    begin, end = claims["iat"], claims["exp"]
    if not all(type(t) in (int, float) for t in (begin, end)):
        raise _refused("its times are no numbers")
    if not begin <= end <= begin + LIFETIME_S or tx.now >= end:
        raise _refused("it has expired")
    return Pass(str(claims["sub"]), str(claims["sid"]))


async def renew(grid: Grid, now: float) -> int:
    """Send new tokens over the streams whose sessions' tokens have passed half of their time at
    ``now`` (database time); how many."""
    old = [
        s
        for s in grid.fleet
        if s.protocol >= FIRST_PROTOCOL
        and s.stream is not None
        and s.token_until - now < LIFETIME_S / 2
    ][:BATCH]
    if old:
        await ready(grid)
    for session in old:
        token, session.token_until = issue(grid, session.node_id, session.id, now)
        session.send(pb.OrchestratorMessage(session_token=pb.SessionToken(token=token)))
    return len(old)


async def _public_key(grid: Grid, tx: Tx, kid: str) -> Ed25519PublicKey:
    known = grid.ring.known
    if kid not in known:
        value = await fleet.fact(tx, _FACT + kid) if 0 < len(kid) <= 32 else None
        if value is None:
            raise _refused("nobody here has signed it")
        public = Ed25519PublicKey.from_public_bytes(bytes.fromhex(value.split()[0]))
        known[kid] = (public, _until(value))
    public, until = known[kid]
    if until < tx.now:
        del known[kid]
        raise _refused("its key is used no more")
    return public


def _until(value: str) -> float:
    return float(value.split()[1])


def _refused(why: str) -> Unauthenticated:
    return Unauthenticated(
        "auth.invalid",
        f"The node's token is not accepted: {why}.",
        "A node gets a new one over its stream, and whenever it connects.",
    )
