"""One orchestrator per SQLite file.

The lock is an exclusive transaction, held for the life of the process, on a small database beside
the real one: SQLite's own file locks work on every system, and the kernel lets go of them when the
process dies, however it dies.
"""

from __future__ import annotations

import sqlite3
from pathlib import Path

from distribai.errors import Conflict


class FileLock:
    """Holds ``<path>.lock`` from construction to :meth:`release`.

    Raises:
        Conflict: ``grid.locked``: somebody else holds it.
    """

    def __init__(self, path: Path) -> None:
        self._connection = sqlite3.connect(
            f"{path}.lock", timeout=0, isolation_level=None, check_same_thread=False
        )
        try:
            self._connection.execute("BEGIN EXCLUSIVE")
        except sqlite3.OperationalError as problem:
            self._connection.close()
            raise Conflict(
                "grid.locked",
                f"Another orchestrator already runs on {path} ({problem}).",
                "Stop it first, or give this one another --state-dir. "
                "Several replicas need PostgreSQL.",
            ) from problem

    def release(self) -> None:
        """Let go; a second call is no error."""
        self._connection.close()
