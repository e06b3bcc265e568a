"""An orchestrator's end of the node's stream, in memory, with a connection that a test can cut."""

from __future__ import annotations

import asyncio

from distribai.node.transport import ConnectionLost
from distribai.wire.v1 import distribai_pb2 as pb


class MemoryConnection:
    """One stream. The node reads and writes it; the test speaks for the orchestrator."""

    def __init__(self) -> None:
        self._to_node: asyncio.Queue[pb.OrchestratorMessage | None] = asyncio.Queue()
        self._to_orchestrator: asyncio.Queue[pb.NodeMessage] = asyncio.Queue()
        self._broken = asyncio.Event()
        self.ended = False
        self.closed = False

    # the node's side

    async def read(self) -> pb.OrchestratorMessage | None:
        """The next message; what was said before the cut is still heard."""
        get = asyncio.ensure_future(self._to_node.get())
        cut = asyncio.ensure_future(self._broken.wait())
        try:
            await asyncio.wait({get, cut}, return_when=asyncio.FIRST_COMPLETED)
            if get.done():
                return get.result()
            raise ConnectionLost("cut")
        finally:
            get.cancel()
            cut.cancel()

    async def write(self, message: pb.NodeMessage) -> None:
        """Send a copy; fails once the connection is cut."""
        if self._broken.is_set() or self.closed:
            raise ConnectionLost("cut")
        copy = pb.NodeMessage()
        copy.CopyFrom(message)
        self._to_orchestrator.put_nowait(copy)

    async def end(self) -> None:
        """The node will write no more."""
        self.ended = True

    async def close(self) -> None:
        """The node is done with it."""
        self.closed = True

    # the test's side

    def say(self, message: pb.OrchestratorMessage | None) -> None:
        """Send to the node; None ends the stream in order."""
        self._to_node.put_nowait(message)

    async def hear(self) -> pb.NodeMessage:
        """The node's next message."""
        return await self._to_orchestrator.get()

    def heard(self) -> list[pb.NodeMessage]:
        """All that has arrived and was not taken by :meth:`hear`, without waiting."""
        found = []
        while not self._to_orchestrator.empty():
            found.append(self._to_orchestrator.get_nowait())
        return found

    def cut(self) -> None:
        """Break the connection."""
        self._broken.set()


class MemoryTransport:
    """Hands each new connection to the test."""

    def __init__(self) -> None:
        self._made: asyncio.Queue[MemoryConnection] = asyncio.Queue()
        self.refuse = False

    async def connect(self) -> MemoryConnection:
        """A new connection, or :class:`ConnectionLost` while ``refuse`` is set."""
        if self.refuse:
            raise ConnectionLost("refused")
        connection = MemoryConnection()
        self._made.put_nowait(connection)
        return connection

    async def accept(self) -> MemoryConnection:
        """The node's next connection."""
        return await self._made.get()
