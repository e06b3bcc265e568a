"""The interface on a real port of the loopback, for tests of blocking clients."""

from __future__ import annotations

import asyncio
import socket
import threading
from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager

import uvicorn
from fastapi import FastAPI

from distribai.orchestrator.http import connections


class _Server(uvicorn.Server):
    """Says when it listens."""

    def __init__(self, config: uvicorn.Config) -> None:
        super().__init__(config)
        self.listening = threading.Event()

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await super().startup(sockets)
        self.listening.set()


@contextmanager
def serving(
    app: FastAPI,
    afterwards: Callable[[], Awaitable[None]] | None = None,
    http: type[connections.Connection] | None = None,
) -> Iterator[str]:
    """The address at which ``app`` is served while the block runs, by the protocol of a real
    orchestrator; ``afterwards`` is awaited in the server's own loop."""

    async def serve() -> None:
        await server.serve([listener])
        if afterwards is not None:
            await afterwards()

    listener = socket.socket()
    listener.bind(("127.0.0.1", 0))
    config = uvicorn.Config(
        app,
        http=http or connections.bounded(100),
        log_config=None,
        ws="none",
        lifespan="off",
        timeout_graceful_shutdown=1,
    )
    server = _Server(config)
    thread = threading.Thread(target=lambda: asyncio.run(serve()))
    thread.start()
    try:
        assert server.listening.wait(30), "the server does not come up"
        yield f"http://127.0.0.1:{listener.getsockname()[1]}"
    finally:
        server.should_exit = True
        thread.join(30)
        listener.close()
    assert not thread.is_alive()
