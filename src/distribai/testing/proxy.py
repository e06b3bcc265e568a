"""A TCP proxy that a test can cut, freeze and shape: a bad network between real processes;
and a load balancer of the same making.

::

    async with Proxy("127.0.0.1", 50051, ShapedLink(up=Shape(bytes_per_s=1.25e6))) as proxy:
        ...  # connect to 127.0.0.1:proxy.port
        proxy.reset()      # every connection breaks; new ones are welcome
        proxy.cut()        # every connection breaks, new ones are refused at once
        proxy.freeze()     # bytes stop, nobody is told: a cable that was pulled
        proxy.heal()

What a link is like stands in :mod:`distribai.testing.shaping`: rate, burst, latency, jitter and
resets of each direction, and how many bytes passed. The handshake of a connection is not delayed.
Bytes are never changed or reordered: that is TCP's promise.
"""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Callable, Sequence
from contextlib import suppress
from types import TracebackType

from distribai.testing.shaping import Direction, ShapedLink

CHUNK = 1 << 14

ON_THE_WAY = 64
"""Chunks of a connection and direction that may be on their way at once: a megabyte, so that
latency costs no rate up to a megabyte for each latency."""

BUFFER = 1 << 16
"""Bytes that the system may hold for the proxy: a modem buffers little, and what it buffers counts
for the sender as sent."""


class Proxy:
    """Forwards connections to one address.

    Args:
        host, port: where connections go.
        link: what it is like on the way, perhaps shared with other proxies; without limits if not
            given.
    """

    def __init__(self, host: str, port: int, link: ShapedLink | None = None) -> None:
        self._target = (host, port)
        self.link = link or ShapedLink()
        self.port = 0
        self.accepted = 0
        self._cut = False
        self._flows = asyncio.Event()
        self._flows.set()
        self._writers: set[asyncio.StreamWriter] = set()
        self._tasks: set[asyncio.Task[None]] = set()

    async def __aenter__(self) -> Proxy:
        """Listen on a free port of loopback."""
        self._server = await asyncio.start_server(self._serve, "127.0.0.1", 0)
        self.port = int(self._server.sockets[0].getsockname()[1])
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        problem: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        """Close everything."""
        self._server.close()
        self.reset()
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        await self._server.wait_closed()

    def reset(self) -> None:
        """Break every connection that is open now."""
        for writer in self._writers:
            writer.transport.abort()
        self._writers.clear()

    def cut(self) -> None:
        """Break every connection and refuse new ones."""
        self._cut = True
        self.reset()

    def freeze(self) -> None:
        """Let no byte pass, and tell nobody."""
        self._flows.clear()

    def heal(self) -> None:
        """Let everything pass again; connections that broke stay broken."""
        self._cut = False
        self._flows.set()

    async def _reach(self) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
        """A connection to the other side.

        Raises:
            OSError: there is none to be had.
        """
        return await asyncio.open_connection(*self._target)

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.accepted += 1
        if self._cut:
            writer.transport.abort()
            return
        try:
            far_reader, far_writer = await self._reach()
        except OSError:
            writer.transport.abort()  # as if the proxy were not there
            return
        self._writers |= {writer, far_writer}
        for end in (writer, far_writer):
            _buffer_little(end)
        pumps = [
            asyncio.ensure_future(self._pump("up", reader, writer, far_writer)),
            asyncio.ensure_future(self._pump("down", far_reader, far_writer, writer)),
        ]
        self._tasks.update(pumps)
        await asyncio.wait(pumps)
        self._tasks.difference_update(pumps)
        for end in (writer, far_writer):
            self._writers.discard(end)
            end.close()

    async def _pump(
        self,
        direction: Direction,
        reader: asyncio.StreamReader,
        source: asyncio.StreamWriter,
        writer: asyncio.StreamWriter,
    ) -> None:
        """Carry one direction of a connection: one task takes chunks in at the link's rate, this
        one hands them out when they have arrived. ``source`` is the end that ``reader`` reads."""
        way: asyncio.Queue[tuple[float, bytes] | None] = asyncio.Queue(ON_THE_WAY)
        taking = asyncio.ensure_future(self._take_in(direction, reader, way))
        try:
            while (chunk := await way.get()) is not None:
                arrives_at, data = chunk
                await asyncio.sleep(arrives_at - asyncio.get_running_loop().time())
                await self._flows.wait()
                writer.write(data)
                await writer.drain()
            if await taking:
                source.transport.abort()
                writer.transport.abort()
            else:
                writer.write_eof()
        except OSError:
            writer.transport.abort()  # one end is gone: so is the other
        finally:
            taking.cancel()
            await asyncio.wait({taking})

    async def _take_in(
        self,
        direction: Direction,
        reader: asyncio.StreamReader,
        way: asyncio.Queue[tuple[float, bytes] | None],
    ) -> bool:
        """Put what is sent on its way; whether it ended by a reset."""
        lane, now = self.link.lanes[direction], asyncio.get_running_loop().time
        reset = False
        with suppress(OSError):
            while not reset and (data := await reader.read(CHUNK)):
                passage = lane.admit(len(data), now())
                await asyncio.sleep(passage.hold_s)
                await way.put((now() + passage.delay_s, data[: passage.size]))
                reset = passage.reset
            await way.put(None)
            return reset
        await way.put(None)
        return True


class Balancer(Proxy):
    """Spreads connections over several addresses in turn, as a load balancer does.

    Args:
        targets: where connections go: host and port.
        is_well: whether the target of that index is to get new ones, by whatever health check there
            is. Of those that are, one that refuses is passed over.

    Connections that are open stay with their target, however it fares.
    """

    def __init__(self, targets: Sequence[tuple[str, int]], is_well: Callable[[int], bool]) -> None:
        super().__init__(*targets[0])
        self._targets, self._is_well = tuple(targets), is_well
        self._next = 0

    async def _reach(self) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
        for _ in self._targets:
            index, self._next = self._next, (self._next + 1) % len(self._targets)
            if not self._is_well(index):
                continue
            with suppress(OSError):
                return await asyncio.open_connection(*self._targets[index])
        raise ConnectionRefusedError("no target takes connections")


def _buffer_little(end: asyncio.StreamWriter) -> None:
    found: socket.socket = end.get_extra_info("socket")
    for which in (socket.SO_RCVBUF, socket.SO_SNDBUF):
        found.setsockopt(socket.SOL_SOCKET, which, BUFFER)
