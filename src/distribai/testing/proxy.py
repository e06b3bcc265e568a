"""A TCP proxy that a test can cut, freeze and slow down: a bad network between real processes; and
a load balancer of the same making.

::

    async with Proxy("127.0.0.1", 50051) as proxy:
        ...  # connect to 127.0.0.1:proxy.port
        proxy.cut()        # every connection is reset, new ones are refused at once
        proxy.freeze()     # bytes stop, nobody is told: a cable that was pulled
        proxy.heal()

What is slowed down: ``bytes_per_s`` over all connections and each direction on its own, ``delay_s``
for every chunk. Bytes are never changed or reordered: that is TCP's promise.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from contextlib import suppress
from types import TracebackType

CHUNK = 1 << 14


class Proxy:
    """Forwards connections to one address.

    Args:
        host, port: where connections go.
        bytes_per_s: 0 is unlimited.
        delay_s: what every chunk waits in either direction.
    """

    def __init__(
        self, host: str, port: int, *, bytes_per_s: float = 0.0, delay_s: float = 0.0
    ) -> None:
        self._target = (host, port)
        self.bytes_per_s, self.delay_s = bytes_per_s, delay_s
        self.port = 0
        self.accepted = 0
        self._cut = False
        self._flows = asyncio.Event()
        self._flows.set()
        self._writers: set[asyncio.StreamWriter] = set()
        self._tasks: set[asyncio.Task[None]] = set()
        self._free_at = {"up": 0.0, "down": 0.0}

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
        self._reset()
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        await self._server.wait_closed()

    def cut(self) -> None:
        """Reset every connection and refuse new ones."""
        self._cut = True
        self._reset()

    def freeze(self) -> None:
        """Let no byte pass, and tell nobody."""
        self._flows.clear()

    def heal(self) -> None:
        """Let everything pass again; connections that were cut stay cut."""
        self._cut = False
        self._flows.set()

    def _reset(self) -> None:
        for writer in self._writers:
            writer.transport.abort()
        self._writers.clear()

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
        pumps = [
            asyncio.ensure_future(self._pump("up", reader, far_writer)),
            asyncio.ensure_future(self._pump("down", far_reader, writer)),
        ]
        self._tasks.update(pumps)
        await asyncio.wait(pumps)
        self._tasks.difference_update(pumps)
        for end in (writer, far_writer):
            self._writers.discard(end)
            end.close()

    async def _pump(
        self, direction: str, reader: asyncio.StreamReader, writer: asyncio.StreamWriter
    ) -> None:
        try:
            while data := await reader.read(CHUNK):
                await self._hold_up(direction, len(data))
                await self._flows.wait()
                writer.write(data)
                await writer.drain()
            writer.write_eof()
        except OSError:
            writer.transport.abort()  # one end is gone: so is the other

    async def _hold_up(self, direction: str, size: int) -> None:
        if self.delay_s:
            await asyncio.sleep(self.delay_s)
        if self.bytes_per_s:
            now = asyncio.get_running_loop().time()
            start = max(now, self._free_at[direction])
            self._free_at[direction] = start + size / self.bytes_per_s
            await asyncio.sleep(self._free_at[direction] - now)


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
