"""Names of things: how ids look, how a person may shorten them.

An id is a kind's prefix, an underscore and lower-case base32 (no ``l o 0 1`` look-alikes would
matter: ids are copied, not typed). Randomness is an argument.
"""

from __future__ import annotations

import base64
import hashlib
from typing import Literal

Kind = Literal["job", "task", "acct", "org", "key", "inv", "evt", "ses", "up", "hook"]

RANDOM_BYTES = 10
"""80 bits: no collision to be expected among 10^11 ids of one kind."""


def make_id(kind: Kind, entropy: bytes) -> str:
    """An id of ``kind`` from ``RANDOM_BYTES`` bytes of entropy."""
    if len(entropy) != RANDOM_BYTES:
        raise ValueError(f"an id takes {RANDOM_BYTES} bytes of entropy, not {len(entropy)}")
    return f"{kind}_{base64.b32encode(entropy).decode().lower()}"


def node_id(public_key: bytes) -> str:
    """A node's id: ``node_`` and the first 160 bits of its Ed25519 public key's SHA-256."""
    if len(public_key) != 32:
        raise ValueError("an Ed25519 public key has 32 bytes")
    return "node_" + base64.b32encode(hashlib.sha256(public_key).digest()[:20]).decode().lower()
