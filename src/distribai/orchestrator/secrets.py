"""Random secrets: told once, stored as SHA-256 only.

128 bits or more, so nothing in the database lets anybody in. (A fast hash is right here: there is
no dictionary to try against random bits.)
"""

from __future__ import annotations

import base64
import hashlib
from collections.abc import Callable

Entropy = Callable[[int], bytes]


def new_secret(prefix: str, entropy: Entropy, size: int) -> str:
    """A fresh secret of ``size`` random bytes, URL-safe, with a prefix that says what it is."""
    return prefix + base64.urlsafe_b64encode(entropy(size)).decode().rstrip("=")


def hash_secret(secret: str) -> str:
    """What is stored of a secret."""
    return hashlib.sha256(secret.encode()).hexdigest()
