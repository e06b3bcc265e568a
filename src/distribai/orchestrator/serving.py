"""What listens for nodes and for requests: the gRPC and the HTTP server of one process."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Iterator
from contextlib import AsyncExitStack, contextmanager

import uvicorn
from grpc import aio

from distribai.orchestrator import addresses, certificates
from distribai.orchestrator.addresses import join_address
from distribai.orchestrator.certificates import ServerTls
from distribai.orchestrator.context import Grid
from distribai.orchestrator.grpc import NodeService
from distribai.orchestrator.http import connections
from distribai.orchestrator.http.app import create_app
from distribai.wire.options import SERVER_OPTIONS
from distribai.wire.v1 import distribai_pb2 as pb
from distribai.wire.v1.distribai_pb2_grpc import add_NodeServiceServicer_to_server

GOODBYE_S = 2.0
"""Seconds that open streams and requests have to end by themselves when the process stops."""


async def serve_grpc(grid: Grid, tls: ServerTls | None, stack: AsyncExitStack) -> int:
    """Listen as the settings say, until ``stack`` is closed; the port.

    Raises:
        Conflict: ``grid.port``.
    """
    settings = grid.settings
    server = aio.server(options=list(SERVER_OPTIONS))
    # Generated code has no types.
    add_NodeServiceServicer_to_server(NodeService(grid), server)  # type: ignore[no-untyped-call]
    # gRPC writes a line of its own about a port that it cannot have.
    addresses.bound(settings.host, settings.grpc_port, "--grpc-port").close()
    try:
        where = join_address(settings.host, settings.grpc_port)
        port: int = (
            server.add_insecure_port(where)
            if tls is None
            else server.add_secure_port(where, certificates.grpc_credentials(tls, grid.authority))
        )
    except RuntimeError as problem:
        raise addresses.port_in_use(settings.host, settings.grpc_port, "--grpc-port") from problem
    await server.start()

    async def stop() -> None:
        for session in grid.fleet:
            if session.stream is not None:
                session.stream.close(_goodbye())
        await server.stop(GOODBYE_S)

    stack.push_async_callback(stop)
    return port


async def serve_http(grid: Grid, tls: ServerTls | None, stack: AsyncExitStack) -> int:
    """Listen as the settings say, until ``stack`` is closed; the port.

    Raises:
        Conflict: ``grid.port``.
    """
    settings = grid.settings
    listener = addresses.bound(settings.host, settings.http_port, "--http-port")
    stack.callback(listener.close)
    config = uvicorn.Config(
        create_app(grid),
        http=connections.bounded(
            connections.most_connections(settings.limits.connections, connections.descriptors())
        ),
        log_config=None,
        access_log=False,
        lifespan="off",
        timeout_graceful_shutdown=int(GOODBYE_S),
        forwarded_allow_ips=settings.proxies,
    )
    if tls is not None:
        context = certificates.http_context(tls, settings.state_dir)
        config.ssl_context_factory = lambda *_: context
    server = _HttpServer(config)
    task = asyncio.create_task(server.serve(sockets=[listener]), name="http")

    async def stop() -> None:
        grid.tail.close()  # who waits is answered before connections are cut off
        grid.news.ring()
        server.should_exit = True
        await task

    stack.push_async_callback(stop)
    await asyncio.wait(
        [task, asyncio.create_task(server.ready.wait())], return_when=asyncio.FIRST_COMPLETED
    )
    if task.done():
        task.result()
    return int(listener.getsockname()[1])


class _HttpServer(uvicorn.Server):
    """uvicorn inside a process that handles its signals itself; ``ready`` once it listens."""

    def __init__(self, config: uvicorn.Config) -> None:
        super().__init__(config)
        self.ready = asyncio.Event()

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        """Listen, and say so."""
        await super().startup(sockets)
        self.ready.set()

    @contextmanager
    def capture_signals(self) -> Iterator[None]:
        """Leave the signals alone."""
        yield


def _goodbye() -> pb.SessionEnd:
    return pb.SessionEnd(
        code="grid.unreachable", message="The orchestrator is stopping.", retry=True
    )
