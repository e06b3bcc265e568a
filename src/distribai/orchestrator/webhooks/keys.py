"""The key that the secrets of webhooks follow from: a file of the state directory, nothing else.

Replicas of one grid need the same file. Each webhook's row says which key it was made with, so that
a process with another one leaves it alone instead of sending what no receiver can verify.
"""

from __future__ import annotations

import os

from distribai import durable
from distribai.errors import Unavailable
from distribai.orchestrator.context import Grid

WEBHOOK_KEY = "webhooks.key"
"""The file's name."""

KEY_BYTES = 32


def key_of(grid: Grid, *, make: bool = False) -> bytes:
    """This process's key; with ``make`` a new one when there is none yet.

    Raises:
        Unavailable: ``webhook.key``: the file is missing, cannot be read or written, or is no key.
    """
    path = grid.settings.state_dir / WEBHOOK_KEY
    try:
        if make and not path.exists():
            fresh = grid.entropy(KEY_BYTES).hex()
            durable.write(path, f"{fresh}\n".encode(), point="webhooks.key", mode=0o600)
        if os.name == "posix" and path.stat().st_mode & 0o077:
            path.chmod(0o600)
        key = bytes.fromhex(path.read_text(encoding="ascii").strip())
    except (OSError, ValueError) as problem:
        raise _unusable(f"{path} cannot be used: {problem}") from problem
    if len(key) != KEY_BYTES:
        raise _unusable(f"{path} has no {KEY_BYTES} bytes in hexadecimal digits")
    return key


def _unusable(what: str) -> Unavailable:
    return Unavailable(
        "webhook.key",
        f"The key of the webhooks' secrets: {what}.",
        "Put the grid's own file back. If it is lost, delete the webhooks and make them again.",
    )
