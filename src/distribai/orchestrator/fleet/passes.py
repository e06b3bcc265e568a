"""Short-lived tokens of nodes' sessions, with which they fetch and bring blobs, and challenges.

A token is a JWT (RFC 7519) signed with Ed25519 (``EdDSA``, RFC 8037). It names the grid (``iss``),
the blobs (``aud``), the node (``sub``: the hash of its key), the session (``sid``), and ends after
:data:`LIFETIME_S`. The session's stream brings the next one when half of that has passed. All times
are database time. It opens nothing alone: at each request the session must be open and the node's
standing good, whatever the token says.

Each process signs with a key of its own that it never writes down, and changes every
:data:`ROTATE_S`; its public half lies in the database under the token's ``kid``, where every
replica finds it for as long as a token of it can be good. So there is no signing key to keep, share
or lose.

A challenge, which a node signs to get a certificate (``fleet.certification``), is such a JWT, too,
for another audience: any replica knows it for its own, and none has to remember it.
"""

from __future__ import annotations

import asyncio
import base64
import hashlib
import math
import re
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import jwt
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey, Ed25519PublicKey

from distribai.errors import Unauthenticated
from distribai.store.statements import facts
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

CHALLENGE_S = 120.0
"""Seconds that a challenge is good for. Within them an answer may come twice, and brings its node
another certificate for the same key."""

AUDIENCE, CHALLENGE = "distribai-blobs", "distribai-certificates"
ALGORITHM = "EdDSA"
MAX_TOKEN = 2048
_FACT = "token_key."
_CLAIMS = ("iss", "aud", "iat", "exp")
_KID = re.compile("[A-Za-z0-9_-]{1,32}")
"""What :func:`ready` may name a key: base64url. Nothing else is asked of the database."""


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
            for name, value in await facts.beginning(tx, _FACT):
                if _until(value) < tx.now:
                    await facts.drop(tx, name)
            until = tx.now + ROTATE_S + 2 * LIFETIME_S
            await facts.put_once(tx, _FACT + kid, f"{public.hex()} {until:.0f}")
        ring.key, ring.kid, ring.made_at = key, kid, made_at


def issue(grid: Grid, node_id: str, session_id: str, now: float) -> tuple[str, float]:
    """A token from ``now`` (database time) on, and when it ends; after :func:`ready`."""
    until = now + LIFETIME_S
    return _signed(grid, AUDIENCE, now, until, sub=node_id, sid=session_id), until


async def challenge(grid: Grid) -> str:
    """Something fresh for a node to sign.

    Raises:
        Unavailable: ``grid.database``.
    """
    await ready(grid)
    async with grid.db.read() as tx:
        now = tx.now
    drawn = base64.urlsafe_b64encode(grid.entropy(16)).decode().rstrip("=")
    return _signed(grid, CHALLENGE, now, now + CHALLENGE_S, jti=drawn)


def _signed(grid: Grid, audience: str, now: float, until: float, **claims: str) -> str:
    assert grid.ring.key is not None, "ready() comes first"
    said = {"iss": grid.grid_id, "aud": audience, **claims, "iat": now, "exp": until}
    return jwt.encode(said, grid.ring.key, ALGORITHM, headers={"kid": grid.ring.kid})


def looks_like(token: str) -> bool:
    """Whether ``token`` is a JWT, good or bad, and none of the grid's other secrets."""
    return token.count(".") == 2


async def verify(grid: Grid, tx: Tx, token: str) -> Pass:
    """What a token says, if this grid signed it and it has not ended.

    Raises:
        Unauthenticated: ``auth.invalid``, with which of its promises does not hold.
    """
    said = await _claims(grid, tx, token, AUDIENCE, LIFETIME_S, "sub", "sid")
    return Pass(str(said["sub"]), str(said["sid"]))


async def check_challenge(grid: Grid, tx: Tx, token: str) -> None:
    """Refuse what is no challenge of this grid, or an old one.

    Raises:
        Unauthenticated: ``auth.invalid``.
    """
    await _claims(grid, tx, token, CHALLENGE, CHALLENGE_S, "jti")


async def _claims(
    grid: Grid, tx: Tx, token: str, audience: str, lifetime_s: float, *names: str
) -> dict[str, Any]:
    if len(token) > MAX_TOKEN:
        raise _refused("it is too long")
    try:
        kid = jwt.get_unverified_header(token).get("kid")
        key = await _public_key(grid, tx, kid if isinstance(kid, str) else "")
        claims: dict[str, Any] = jwt.decode(
            token,
            key,
            # Fixed: what the token itself says about it must decide nothing (RFC 8725, 3.1).
            algorithms=[ALGORITHM],
            audience=audience,
            issuer=grid.grid_id,
            # Times are judged below, by the database's clock.
            options={
                "require": [*_CLAIMS, *names],
                "verify_exp": False,
                "verify_iat": False,
                "verify_nbf": False,
            },
        )
    except jwt.PyJWTError as problem:
        # It may repeat what stands in the token, which no answer could be written with.
        why = str(problem).encode("ascii", "backslashreplace").decode()
        raise _refused(why) from problem
    begin, end = claims["iat"], claims["exp"]
    if not all(type(t) in (int, float) for t in (begin, end)):
        raise _refused("its times are no numbers")
    if not begin <= end <= begin + lifetime_s or tx.now >= end:
        raise _refused("it has expired")
    return claims


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
        value = await facts.get(tx, _FACT + kid) if _KID.fullmatch(kid) else None
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
