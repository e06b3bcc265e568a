"""How many connections the HTTP port holds, who makes room, and how long one may say nothing.

Rate limits count requests; a connection on which none comes costs a file descriptor all the same,
and without descriptors nothing goes on: no node's stream, no file, no database. So every connection
on which it is the caller's turn has its time::

    a request's head           HEAD_S; also what is thrown away of a body that was refused
    its body                   BODY_S, and a second more for each BODY_RATE bytes that have come
    an upload of known callers STALL_S after the last byte: uploads over slow links take long
    what it reads              STALL_S after the last byte that the network took

Beyond the most connections the one without progress for longest makes room, in the order of
:meth:`Connection.rank`; and callers who have proven nothing hold no more than UNPROVEN_BYTES.
"""

from __future__ import annotations

import asyncio
import math
import os
import socket
from collections.abc import Callable
from typing import Any

import structlog
from starlette.types import Scope
from uvicorn.protocols.http.h11_impl import H11Protocol
from uvicorn.server import ServerState

log = structlog.get_logger(__name__)

HEAD_S = 20.0
"""Seconds for a request's head; one over a satellite's link takes two."""

BODY_S = 20.0
"""Seconds for a request's body, as for its head."""

BODY_RATE = 4096
"""Bytes of a body for which there is a second more: what a poor modem sends."""

STALL_S = 120.0
"""Seconds in which some byte must move. We see :data:`AHEAD` bytes at a time go: so long it takes
over 10 kbit/s."""

AHEAD = 1 << 17
"""Bytes of answers that a connection, and the system for it, takes before the network has: on a
slow line a download that breaks off has hardly moved more than what was handed over less this."""

WORK_S = 30.0
"""Seconds for which work of known callers is safe from newcomers, whatever it waits for: event
streams send something every 15 s."""

UNPROVEN_BYTES = 64 << 20
"""Bytes of bodies, and of answers that are not taken, of all callers without proven credentials."""

LOOK_S = 1.0
"""Seconds between two looks at the connections; a look at 4000 takes some milliseconds."""

_STATE = "connection"
"""Under this name a request's scope has its connection."""

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


class Port:
    """The connections of one server, at most ``most``."""

    def __init__(self, most: int) -> None:
        self._most = most
        self.connections: set[Connection] = set()
        self._look: asyncio.TimerHandle | None = None

    def enter(self, newcomer: Connection) -> None:
        """Let a connection in; one that must make room for it is hung up on."""
        self.connections.add(newcomer)
        if self._look is None:
            self._look = newcomer.loop.call_later(LOOK_S, self._look_around, newcomer.loop)
        if len(self.connections) <= self._most:
            return
        now = newcomer.loop.time()
        others = self.connections - {newcomer}
        last = min(others, key=Connection.rank, default=newcomer)
        # Else whoever connects over and over again would cut off all that is at work.
        safe = last.at_work and last.proven and now - last.moved < WORK_S
        (newcomer if safe else last).cut("room")

    def leave(self, connection: Connection) -> None:
        """It is gone, or as good as gone."""
        self.connections.discard(connection)

    def _look_around(self, loop: asyncio.AbstractEventLoop) -> None:
        now = loop.time()
        for connection in list(self.connections):
            connection.look(now)
            if connection.overdue(now):
                connection.cut("time")
        unproven = [(c, c.bytes_held()) for c in self.connections if not c.proven]
        excess = sum(size for _, size in unproven) - UNPROVEN_BYTES
        for connection, size in sorted(unproven, key=lambda held: held[0].moved):
            if excess <= 0:
                break
            if size:
                connection.cut("memory")
                excess -= size
        self._look = loop.call_later(LOOK_S, self._look_around, loop) if self.connections else None


def bounded(most: int) -> type[Connection]:
    """uvicorn's protocol for one server that holds at most ``most`` connections."""

    class Bounded(Connection):
        port = Port(most)

    return Bounded


def of(scope: Scope) -> Connection | None:
    """The connection that a request came on; None where there is none (tests without a network)."""
    found: Connection | None = scope.get("state", {}).get(_STATE)
    return found


def prove(scope: Scope) -> None:
    """The request's credentials are good."""
    if (connection := of(scope)) is not None:
        connection.proven = True


class Connection(H11Protocol):
    """One connection, and how it stands with it.

    ``proven``: the credentials of its latest request are good. ``patient``: its latest request may
    take its time to send. ``moved``: when a byte last moved, in the loop's time.
    """

    port: Port

    def __init__(
        self,
        config: Any,
        server_state: ServerState,
        app_state: dict[str, Any],
        _loop: asyncio.AbstractEventLoop | None = None,
    ) -> None:
        super().__init__(config, server_state, {**app_state, _STATE: self}, _loop)
        self.proven = self.patient = False
        self.moved = self.loop.time()
        self._since = self.moved  # the caller's turn began then
        self._received = self._unsent = 0

    @property
    def at_work(self) -> bool:
        """A request is being read or answered."""
        return self.cycle is not None and not self.cycle.response_complete

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        transport.set_write_buffer_limits(high=AHEAD)
        found = transport.get_extra_info("socket")
        if found is not None and hasattr(socket, "TCP_NOTSENT_LOWAT"):
            found.setsockopt(socket.IPPROTO_TCP, socket.TCP_NOTSENT_LOWAT, AHEAD)
        self.port.enter(self)

    def connection_lost(self, exc: Exception | None) -> None:
        self.port.leave(self)
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        self.progress()
        if not self.at_work and self._since == math.inf:
            self._since = self.moved
        super().data_received(data)
        self._received += len(data)

    def handle_events(self) -> None:
        before = self.cycle
        super().handle_events()
        if self.cycle is not before:  # a head is whole; its request runs in a task, after this
            self.proven = self.patient = False
            self._since, self._received = self.loop.time(), 0

    def on_response_complete(self) -> None:
        # From here on uvicorn waits for a next request, until a byte of it comes.
        self._since = math.inf
        super().on_response_complete()

    def resume_writing(self) -> None:
        self.progress()
        super().resume_writing()

    def progress(self) -> None:
        """A byte has moved."""
        self.moved = self.loop.time()

    def rank(self) -> tuple[bool, bool, float]:
        """Who makes room first: callers who have proven nothing, then those with no request, and
        among equals who made no progress for longest."""
        return self.proven, self.proven and self.at_work, self.moved

    def bytes_held(self) -> int:
        """What its caller makes us keep in memory."""
        return self._unsent + (self._received if self.at_work else 0)

    def look(self, now: float) -> None:
        """See whether the network has taken anything since the last look."""
        unsent = self.transport.get_write_buffer_size()
        if unsent < self._unsent:
            self.moved = now
        self._unsent = unsent

    def overdue(self, now: float) -> bool:
        """It is the caller's turn, and has been for too long."""
        stalled = now - self.moved > STALL_S
        if self.transport.is_closing():
            return stalled
        if not self.at_work:
            return now - self._since > HEAD_S
        # While we do not read on, it is not the caller who keeps us waiting.
        awaited = self.cycle.more_body and not self.flow.read_paused
        if awaited and not (self.proven and self.patient):
            return now - self._since > BODY_S + self._received / BODY_RATE
        return stalled and (awaited or self._unsent > 0)

    def cut(self, why: str) -> None:
        """Hang up at once: nothing that was written waits to be taken."""
        log.debug("connection.cut", why=why, client=self.client, proven=self.proven)
        self.port.leave(self)
        self.transport.abort()


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
