"""Nodes' certificates: who gets one. That each shows its own is seen to when it registers.

::

    GET  /api/v1/certificates/challenge                    -> 200 {"challenge"}, 404: none are asked
    POST /api/v1/certificates  {"public_key", "challenge", "request", "signature", "invite"}
                                                           -> 200 {"certificate", "lifetime_s"}

A port that asks for certificates cannot hand out a node's first one, so the HTTP interface does,
to whoever may join: a key that the grid knows and that is not banned, or one that brings an invite.
The node's key signs the challenge and the request (PKCS #10) for a key of its own making, which
never leaves it. An invite is looked at and not used up: that is done when the node registers. The
next certificate is got in the same way as the first.

A certificate proves at the stream whose key is on the other side, in the name of the node's id, and
nothing else. Whether the node may do anything is asked of the database, as ever: so there is no
list of revoked certificates.
"""

from __future__ import annotations

from dataclasses import dataclass

import structlog
from cryptography.hazmat.primitives.serialization import Encoding

from distribai.core.ids import node_id as id_of_key
from distribai.core.states import Standing
from distribai.errors import NotFound
from distribai.orchestrator.certificates import Authority, node_certificate, utc
from distribai.orchestrator.context import Grid
from distribai.orchestrator.fleet import passes
from distribai.orchestrator.fleet.registration import not_invited
from distribai.orchestrator.fleet.tokens import barred
from distribai.orchestrator.secrets import hash_secret
from distribai.store.engine import Tx
from distribai.store.statements import fleet, invites
from distribai.wire.signing import verify_certify

log = structlog.get_logger(__name__)


@dataclass(frozen=True, slots=True)
class Wanted:
    """A node's request: its public key (32 bytes), the challenge, the request in PEM, the key's
    signature of both (64 bytes), and an invite, which a key needs that is new to the grid."""

    public_key: bytes
    challenge: str
    request: str
    signature: bytes
    invite: str = ""


@dataclass(frozen=True, slots=True)
class Certified:
    """A node's certificate (PEM), and for how many seconds from now it is good."""

    certificate: str
    lifetime_s: float


async def challenge(grid: Grid) -> str:
    """What a node signs to get a certificate.

    Raises:
        NotFound: ``grid.missing``: this grid asks for none.
        Unavailable: ``grid.database``.
    """
    _authority(grid)
    return await passes.challenge(grid)


async def certify(grid: Grid, wanted: Wanted) -> Certified:
    """A certificate for a node that may join.

    Raises:
        NotFound: ``grid.missing``: this grid asks for none.
        Unauthenticated: ``auth.invalid``: no challenge of this grid, or an old one.
        NotAllowed: ``node.key``, ``node.certificate``; ``node.invite``: an unknown key without a
            valid invite; ``node.banned``.
        Unavailable: ``grid.database``.
    """
    authority = _authority(grid)
    async with grid.db.read() as tx:
        await passes.check_challenge(grid, tx, wanted.challenge)
        verify_certify(
            wanted.public_key, wanted.signature, grid.grid_id, wanted.challenge, wanted.request
        )
        node_id = id_of_key(wanted.public_key)
        await _may_join(tx, node_id, wanted.invite)
        now = utc(tx.now)
    lifetime_s = grid.settings.certificate_s
    made = node_certificate(authority, node_id, wanted.request, now, lifetime_s)
    log.info(
        "node.certified", node=node_id, serial=f"{made.serial_number:x}", good_for_s=lifetime_s
    )
    return Certified(made.public_bytes(Encoding.PEM).decode(), lifetime_s)


def _authority(grid: Grid) -> Authority:
    if grid.authority is None:
        raise NotFound("grid.missing", "This grid asks its nodes for no certificates.")
    return grid.authority


async def _may_join(tx: Tx, node_id: str, invite: str) -> None:
    known = await fleet.nodes_by_id(tx, [node_id])
    for node in known:  # one that is quarantined may show its certificate, and hears why
        if node.standing == Standing.BANNED and (refusal := barred(node)) is not None:
            raise refusal
    if not known and await invites.valid_invite(tx, hash_secret(invite)) is None:
        raise not_invited()
