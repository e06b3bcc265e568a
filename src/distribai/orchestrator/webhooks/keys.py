"""The key that the secrets of webhooks follow from: a file beside the grid's CA, nothing else.

Replicas of one grid need the same file. Each webhook's row says which key it was made with, so that
a process with another one leaves it alone instead of sending what no receiver can verify, and makes
none itself; at its start it says so (``webhooks.duties.stranded``).
"""

from __future__ import annotations

import os
from pathlib import Path

from distribai import durable
from distribai.errors import Unavailable
from distribai.orchestrator.context import Grid
from distribai.sections import OrchestratorSettings

WEBHOOK_KEY = "webhooks.key"
"""The file's name."""

KEY_BYTES = 32


def key_path(settings: OrchestratorSettings) -> Path:
    """Where the file is, or is to be: where all replicas have their keys from, if a directory for
    them is named; one that was made in the state directory before there was one stays there."""
    own = settings.state_dir / WEBHOOK_KEY
    if not settings.keys:
        return own
    shared = Path(settings.keys) / WEBHOOK_KEY
    return own if own.exists() and not shared.exists() else shared


def key_of(grid: Grid, *, make: bool = False) -> bytes:
    """This process's key; with ``make`` a new one when there is none yet.

    Raises:
        Unavailable: ``webhook.key``: the file is missing, cannot be read or written, or is no key.
    """
    path = key_path(grid.settings)
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
        "Put the grid's own file there, from another replica or a backup. If it is lost, delete "
        "the webhooks and make them again.",
    )
