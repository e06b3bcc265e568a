"""A virtual node's end of its stream: the production server's messages over a slow link."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import AsyncIterator, Callable
from typing import Any

from distribai.orchestrator.context import Grid
from distribai.orchestrator.grpc import serve
from distribai.wire.channel import RELIABLE, Channel
from distribai.wire.v1 import distribai_pb2 as pb

Body = pb.RegisterSession | pb.Heartbeat | pb.TaskAccept | pb.TaskProgress | pb.TaskResult
FIELDS = {
    pb.RegisterSession: "register",
    pb.Heartbeat: "heartbeat",
    pb.TaskAccept: "task_accept",
    pb.TaskProgress: "task_progress",
    pb.TaskResult: "task_result",
}


class Post:
    """One connection.

    Args:
        grid: whose server answers.
        channel: numbers of the session, which outlives connections.
        latency_s: virtual seconds one way.
        hello: makes the registration that answers a challenge.
        receive: gets every new message of the orchestrator's.
    """

    def __init__(
        self,
        grid: Grid,
        channel: Channel[Body],
        latency_s: float,
        hello: Callable[[pb.Challenge], pb.RegisterSession],
        receive: Callable[[pb.OrchestratorMessage], None],
    ) -> None:
        self._channel, self._latency_s = channel, latency_s
        self._hello, self._receive = hello, receive
        self._loop = asyncio.get_running_loop()
        self._in: asyncio.Queue[pb.NodeMessage | None] = asyncio.Queue()
        self._cut = False
        self._travelling: deque[Callable[[], None]] = deque()
        self._stream = asyncio.create_task(self._run(serve(grid, self._incoming())))

    async def ended(self) -> None:
        """Return when the connection has ended, whoever ended it.

        Raises:
            Exception: a defect of the server.
        """
        await asyncio.shield(self._stream)

    def send(self, body: Body) -> None:
        """Send a message; a reliable one is kept by the channel until it is acknowledged."""
        name = FIELDS[type(body)]
        seq = self._channel.number(body, reliable=name in RELIABLE)
        self._send(seq, name, body)

    def send_again(self) -> None:
        """Send what was not acknowledged on an earlier connection of the session."""
        for seq, body in self._channel.unacked():
            self._send(seq, FIELDS[type(body)], body)

    def hang_up(self) -> None:
        """End the stream in order, after what was sent."""
        self._travel(lambda: self._in.put_nowait(None))

    async def cut(self) -> None:
        """Break the connection: what is on its way is lost."""
        self._cut = True
        self._stream.cancel()
        await asyncio.gather(self._stream, return_exceptions=True)

    def _send(self, seq: int, name: str, body: Body) -> None:
        fields: dict[str, Any] = {name: body}
        message = pb.NodeMessage(seq=seq, ack=self._channel.received, **fields)
        self._travel(lambda: self._in.put_nowait(message))

    def _travel(self, arrive: Callable[[], None]) -> None:
        # Timers of the same moment fire in no set order: each takes what was sent first.
        self._travelling.append(arrive)
        self._loop.call_later(self._latency_s, self._arrive)

    def _arrive(self) -> None:
        arrive = self._travelling.popleft()
        if not self._cut:
            arrive()

    async def _incoming(self) -> AsyncIterator[pb.NodeMessage]:
        while (message := await self._in.get()) is not None:
            yield message

    async def _run(self, stream: AsyncIterator[pb.OrchestratorMessage]) -> None:
        async for message in stream:
            self._travel(lambda message=message: self._take(message))  # type: ignore[misc]

    def _take(self, message: pb.OrchestratorMessage) -> None:
        kind = message.WhichOneof("body")
        if kind == "challenge":
            self.send(self._hello(message.challenge))
        elif self._channel.on_receive(message.seq, message.ack) == "deliver":
            self._receive(message)
