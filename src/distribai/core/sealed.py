"""Small records on disk that notice a flipped bit: a line with the hash, then JSON."""

from __future__ import annotations

import hashlib
import json

from distribai.core.plain import Plain, canonical_json
from distribai.errors import Integrity


def seal(value: object) -> bytes:
    """The bytes of a record: SHA-256 (hex) of the rest, a line break, canonical JSON."""
    text = canonical_json(value).encode()
    return hashlib.sha256(text).hexdigest().encode() + b"\n" + text


def unseal(data: bytes) -> Plain:
    """What was sealed.

    Raises:
        Integrity: ``blob.hash``, the bytes are torn or changed.
    """
    digest, _, text = data.partition(b"\n")
    if hashlib.sha256(text).hexdigest().encode() != digest:
        raise Integrity("blob.hash", "The record is torn or changed: its hash does not fit.")
    return json.loads(text)
