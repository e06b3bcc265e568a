"""How many connections the HTTP port holds, and how long one may say nothing.

Rate limits count requests; a connection on which none comes costs a file descriptor all the same,
and without descriptors nothing goes on: no node's stream, no file, no database. So who has sent no
whole request head after a while is hung up on, and beyond the most connections the one that has
been silent for longest makes room. Slow bodies are uploads over slow links, and may take their
time.
"""

from __future__ import annotations

import asyncio
import os
from collections.abc import Callable
from typing import Any

import structlog
from uvicorn.protocols.http.h11_impl import H11Protocol

log = structlog.get_logger(__name__)

HEAD_S = 20.0
"""Seconds for a request's head; one over a satellite's link takes two."""

OTHERS = 256
"""Descriptors that are for neither streams nor HTTP: database, files, pipes, libraries."""

TOLD_EVERY_S = 10.0


def descriptors() -> int | None:
    """Let this process open as many files as the system lets it; how many. None: no such limit."""
    if os.name != "posix":
        return None
    import resource

    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    try:
        resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    except (ValueError, OSError) as problem:  # macOS calls it unlimited and takes less
        log.info("the limit of open files stays as it is", why=str(problem))
    soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    return None if soft == resource.RLIM_INFINITY else soft


def most_connections(wanted: int, files: int | None) -> int:
    """How many HTTP connections there may be: ``wanted``, or half of what ``files`` leaves; the
    other half is for the nodes' streams."""
    return wanted if files is None else max(1, min(wanted, (files - OTHERS) // 2))


def bounded(most: int) -> type[H11Protocol]:
    """uvicorn's protocol for one server that holds at most ``most`` connections."""
    silent: dict[_Bounded, None] = {}  # oldest first

    class Bounded(_Bounded):
        limit, waiting = most, silent

    return Bounded


class _Bounded(H11Protocol):
    limit: int
    waiting: dict[_Bounded, None]

    def __init__(self, *args: Any, **named: Any) -> None:
        super().__init__(*args, **named)
        self._patience: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        self._await_head()
        if len(self.connections) > self.limit:
            next(iter(self.waiting), self).transport.abort()

    def connection_lost(self, exc: Exception | None) -> None:
        self._head_came()
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        super().data_received(data)
        if self.cycle is None or self.cycle.response_complete:
            self._await_head()
        else:
            self._head_came()

    def _await_head(self) -> None:
        if self._patience is None and not self.transport.is_closing():
            self.waiting[self] = None
            self._patience = self.loop.call_later(HEAD_S, self.transport.abort)

    def _head_came(self) -> None:
        self.waiting.pop(self, None)
        if self._patience is not None:
            self._patience.cancel()
            self._patience = None


def quiet_accepts(
    clock: Callable[[], float],
) -> Callable[[asyncio.AbstractEventLoop, dict[str, Any]], None]:
    """A handler of the loop's own errors that tells of used-up descriptors in words, and not a
    thousand times a second; everything else is told as ever."""
    told = [-TOLD_EVERY_S]

    def handle(loop: asyncio.AbstractEventLoop, context: dict[str, Any]) -> None:
        if not str(context.get("message", "")).startswith("socket.accept() out of"):
            loop.default_exception_handler(context)
        elif clock() - told[0] >= TOLD_EVERY_S:
            told[0] = clock()
            log.error(
                "connections.refused",
                why=str(context.get("exception")),
                hint="Raise the process's limit of open files (ulimit -n, LimitNOFILE).",
            )

    return handle
