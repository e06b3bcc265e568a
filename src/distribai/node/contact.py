"""Keeping on disk what stands between the node and its grid: the log may scroll by, or be nowhere;
``distribai node status`` tells it as long as it holds."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path

import structlog

from distribai import durable
from distribai.core.contact import FILE, Trouble
from distribai.core.sealed import seal
from distribai.errors import DistribAIError

log = structlog.get_logger("distribai.node")


class Contact:
    """The record of one daemon. Nothing here fails: what cannot be kept is logged.

    Args:
        state: the node's state directory; what an earlier daemon kept there is forgotten.
        wall: seconds since 1970.
    """

    def __init__(self, state: Path, wall: Callable[[], float] = time.time) -> None:
        self._path = state / FILE
        self._wall = wall
        self._kept: Trouble | None = None
        self._keep(None)

    def made(self) -> None:
        """The grid has taken the node."""
        if self._kept is not None:
            self._keep(None)

    def lost(self, why: str, hint: str) -> None:
        """There is no connection, and the node goes on trying."""
        before = self._kept
        if before is None or (before.why, before.hint) != (why, hint):
            since = self._wall() if before is None else before.since
            self._keep(Trouble(since, why, hint))

    def ended(self, error: DistribAIError) -> None:
        """The node ends, because of ``error``."""
        self._keep(Trouble(self._wall(), error.message, error.hint, error.code))

    def _keep(self, trouble: Trouble | None) -> None:
        self._kept = trouble
        try:
            if trouble is None:
                self._path.unlink(missing_ok=True)
            else:
                durable.write(self._path, seal(trouble), point="node.contact")
        except OSError as problem:
            log.warning("what is wrong cannot be kept for `node status`", why=str(problem))
