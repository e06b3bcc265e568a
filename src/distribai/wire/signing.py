"""What a node signs: the challenge when it registers, what it asks the grid's CA for, and every
result.

Ed25519 (RFC 8032). The signed bytes start with the purpose and a zero byte, so that a signature
made for one purpose is worth nothing for another. Outcomes are signed as canonical JSON
(:func:`distribai.core.plain.canonical_json`: sorted keys, no spaces, shortest round-trip floats).
"""

from __future__ import annotations

import dataclasses

from cryptography.exceptions import InvalidSignature
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey, Ed25519PublicKey

from distribai.core.plain import canonical_json
from distribai.core.tasks import Outcome
from distribai.errors import NotAllowed

REGISTER = b"distribai-register-v1"
CERTIFY = b"distribai-certify-v1"
RESULT = b"distribai-result-v1"

_SMALL_ORDER = frozenset(
    bytes.fromhex(y)
    for y in (
        "0100000000000000000000000000000000000000000000000000000000000000",
        "eeffffffffffffffffffffffffffffffffffffffffffffffffffffffffffff7f",
        "ecffffffffffffffffffffffffffffffffffffffffffffffffffffffffffff7f",
        "0000000000000000000000000000000000000000000000000000000000000000",
        "edffffffffffffffffffffffffffffffffffffffffffffffffffffffffffff7f",
        "26e8958fc2b227b045c3f489f2ef98f0d5dfac05d3c63339b13802886d53fc05",
        "c7176a703d4dd84fba3c0b760d10670f2a2053fa2c39ccc64ec7fd7792ac037a",
    )
)
"""Every y, little-endian, of the eight points whose order divides 8: 1 and p + 1 (order 1), p - 1
(2), 0 and p (4), and two of order 8. From libsodium (``ge25519_has_small_order``), which like this
does not look at the last bit, the sign of x."""


def register_message(grid_id: str, nonce: bytes) -> bytes:
    """The bytes that answer a challenge: purpose, 0, grid id, 0, nonce."""
    return b"\0".join((REGISTER, grid_id.encode(), nonce))


def certify_message(grid_id: str, challenge: str, request: str) -> bytes:
    """The bytes that vouch for a certificate's request: purpose, 0, grid id, 0, challenge, 0, the
    request as it is sent (PEM)."""
    return b"\0".join((CERTIFY, grid_id.encode(), challenge.encode(), request.encode()))


def outcome_message(outcome: Outcome) -> bytes:
    """The bytes that vouch for a result: purpose, 0, canonical JSON of the outcome.

    Metrics are floats on the wire, so an integer is signed as the float that the reader will see.
    """
    metrics = {name: float(value) for name, value in outcome.metrics.items()}
    same = dataclasses.replace(outcome, metrics=metrics)
    return RESULT + b"\0" + canonical_json(same).encode()


def sign_register(key: Ed25519PrivateKey, grid_id: str, nonce: bytes) -> bytes:
    """The 64 bytes of ``RegisterSession.signature``."""
    return key.sign(register_message(grid_id, nonce))


def verify_register(public_key: bytes, signature: bytes, grid_id: str, nonce: bytes) -> None:
    """Check the answer to a challenge.

    Raises:
        NotAllowed: ``node.key``, not an Ed25519 key or not its signature.
    """
    _verify(public_key, signature, register_message(grid_id, nonce), "the challenge")


def sign_certify(key: Ed25519PrivateKey, grid_id: str, challenge: str, request: str) -> bytes:
    """The 64 bytes by which a node's key vouches for a certificate's request."""
    return key.sign(certify_message(grid_id, challenge, request))


def verify_certify(
    public_key: bytes, signature: bytes, grid_id: str, challenge: str, request: str
) -> None:
    """Check what vouches for a certificate's request.

    Raises:
        NotAllowed: ``node.key``, not an Ed25519 key or not its signature.
    """
    said = certify_message(grid_id, challenge, request)
    _verify(public_key, signature, said, "its request for a certificate")


def sign_outcome(key: Ed25519PrivateKey, outcome: Outcome) -> bytes:
    """The 64 bytes of ``TaskResult.signature``."""
    return key.sign(outcome_message(outcome))


def verify_outcome(public_key: bytes, signature: bytes, outcome: Outcome) -> None:
    """Check a result's signature.

    Raises:
        NotAllowed: ``node.key``, not an Ed25519 key or not its signature.
    """
    _verify(public_key, signature, outcome_message(outcome), f"task {outcome.task_id}")


def _verify(public_key: bytes, signature: bytes, message: bytes, what: str) -> None:
    """Check one signature.

    A key of small order is refused: there are signatures that it "makes" of most messages, or of
    all, without anybody having a private key (Chalkias, Garillot, Nikolaenko: Taming the many
    EdDSAs, 2020), and RFC 8032 leaves it to the verifier whether to take it.
    """
    try:
        key = Ed25519PublicKey.from_public_bytes(public_key)
        if public_key[:31] + bytes([public_key[31] & 0x7F]) in _SMALL_ORDER:
            raise InvalidSignature
        key.verify(signature, message)
    except (InvalidSignature, ValueError) as problem:
        raise NotAllowed(
            "node.key",
            f"The node's signature of {what} is not valid for its key.",
            "Check that the node's key file is the one it registered with.",
        ) from problem
