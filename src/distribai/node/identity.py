"""The node's key: who it is to every grid.

One Ed25519 key per state directory, in PEM (PKCS #8), readable by its owner alone.
"""

from __future__ import annotations

import os
import stat
from dataclasses import dataclass
from pathlib import Path

import structlog
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
from cryptography.hazmat.primitives.serialization import (
    Encoding,
    NoEncryption,
    PrivateFormat,
    load_pem_private_key,
)

from distribai.core.ids import node_id
from distribai.errors import NotAllowed
from distribai.node.platform import POSIX

log = structlog.get_logger("distribai.node")

KEY_FILE = "node.key"


@dataclass(frozen=True, slots=True)
class Identity:
    """A node's private key and what follows from it."""

    key: Ed25519PrivateKey

    @property
    def public_key(self) -> bytes:
        """The 32 bytes that the grid knows the node by."""
        return self.key.public_key().public_bytes_raw()

    @property
    def node_id(self) -> str:
        """The node's id."""
        return node_id(self.public_key)


def load_or_create(directory: Path) -> Identity:
    """The key of a state directory; a new one if there is none yet.

    The caller holds the directory's lock. A new key is complete on disk before it gets its name.

    Raises:
        NotAllowed: ``node.key``, the file is not an Ed25519 key.
        OSError: it cannot be read or written.
    """
    path = directory / KEY_FILE
    if not path.exists():
        _write(path, Ed25519PrivateKey.generate())
    try:
        key = load_pem_private_key(path.read_bytes(), password=None)
    except (ValueError, TypeError) as problem:
        raise _bad(path) from problem
    if not isinstance(key, Ed25519PrivateKey):
        raise _bad(path)
    if POSIX and stat.S_IMODE(path.stat().st_mode) & 0o077:
        log.warning("the node's key could be read by others; closing it", path=str(path))
        path.chmod(0o600)
    return Identity(key)


def _write(path: Path, key: Ed25519PrivateKey) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    text = key.private_bytes(Encoding.PEM, PrivateFormat.PKCS8, NoEncryption())
    partial = path.with_suffix(".new")
    partial.unlink(missing_ok=True)
    with open(os.open(partial, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "wb") as file:
        file.write(text)
        file.flush()
        os.fsync(file.fileno())
    partial.replace(path)


def _bad(path: Path) -> NotAllowed:
    return NotAllowed(
        "node.key",
        f"{path} is not an Ed25519 key.",
        "Restore it from a copy, or move it away to join as a new node.",
    )
