"""One orchestrator process: start, serve, stop."""

from __future__ import annotations

import asyncio
import base64
import os
import shutil
import signal
import socket
import time
from collections.abc import Callable, Iterator
from contextlib import AsyncExitStack, contextmanager
from ipaddress import ip_address

import structlog
import uvicorn
from grpc import aio

from distribai.config import OrchestratorSettings
from distribai.core.ids import RANDOM_BYTES, make_id
from distribai.errors import Conflict, UsageError
from distribai.orchestrator.context import Grid
from distribai.orchestrator.duties import Duties
from distribai.orchestrator.fleet import liveness, tokens
from distribai.orchestrator.grpc import NodeService
from distribai.orchestrator.http.app import create_app
from distribai.store import leases
from distribai.store.blobs import BlobStore
from distribai.store.engine import Database
from distribai.store.lock import FileLock
from distribai.store.migrate import migrate
from distribai.store.statements import fleet
from distribai.wire.joinlink import JoinLink
from distribai.wire.options import SERVER_OPTIONS
from distribai.wire.v1 import distribai_pb2 as pb
from distribai.wire.v1.distribai_pb2_grpc import add_NodeServiceServicer_to_server

log = structlog.get_logger(__name__)

GOODBYE_S = 2.0
"""Seconds that open streams and requests have to end by themselves when the process stops."""


class Orchestrator:
    """One orchestrator.

    After :meth:`start`: ``grpc_address`` and ``http_address`` are ``host:port`` as bound,
    ``join_link`` is what contributors paste, and ``operator_token`` is the operator's token at the
    grid's first start, and until :meth:`told`; empty at every later one.
    """

    def __init__(self, settings: OrchestratorSettings) -> None:
        self.settings = settings
        self.grpc_address = ""
        self.http_address = ""
        self.join_link = ""
        self.operator_token = ""
        self.grid: Grid
        self.duties: Duties
        self._stack = AsyncExitStack()

    async def start(self) -> None:
        """Lock, migrate, listen, run the duties. Whatever fails, nothing is left running.

        Raises:
            UsageError: ``grid.insecure``; ``config.invalid``: an impossible database URL.
            Conflict: ``grid.locked``, ``grid.port`` or ``grid.schema``.
            Unavailable: ``grid.database`` or ``blob.store``.
        """
        check_bind(self.settings)
        try:
            await self._start()
        except BaseException:
            await self._stack.aclose()
            raise

    async def _start(self) -> None:
        invite = await self._open_stores()
        grpc_port = await self._serve_grpc()
        http_port = await self._serve_http()
        host = self.settings.host
        self.grpc_address = _address(host, grpc_port)
        self.http_address = _address(host, http_port)
        public = public_host(host)
        self.join_link = str(
            JoinLink(
                host=_bracketed(public),
                grpc=_address(public, grpc_port),
                http=_address(public, http_port),
                grid=self.grid.grid_id,
                invite=invite,
            )
        )
        self.duties = Duties(self.grid)
        self.duties.start()
        self._stack.push_async_callback(self.duties.stop)

    async def stop(self) -> None:
        """Tell the nodes to come back later, stop listening, write what was heard, let go of the
        database. A second call does nothing."""
        await self._stack.aclose()

    def told(self) -> None:
        """The operator has been told the token: it is kept no longer."""
        tokens.token_was_told(self.settings.state_dir)

    async def watch(self) -> None:
        """Wait until a duty dies of a defect, and raise it."""
        await self.duties.watch()

    async def _open_stores(self) -> str:
        """Open database and blobs and build the grid; the invite."""
        state = self.settings.state_dir
        state.mkdir(parents=True, exist_ok=True, mode=0o700)
        path = state / "grid.sqlite3"
        db = Database(self.settings.db or f"sqlite:///{path}")
        if db.dialect == "sqlite":
            lock = FileLock(db.path)
            self._stack.callback(lock.release)
        self._stack.push_async_callback(db.close)
        await migrate(db)
        shutil.rmtree(state / "scratch", ignore_errors=True)
        blobs = BlobStore.open(
            self.settings.blobs or state / "blobs",
            state / "staging",
            max_bytes=self.settings.max_blob_bytes,
        )
        self.operator_token = await tokens.ensure_operator_token(db, state, os.urandom)
        invite = await tokens.ensure_invite(db, state, os.urandom)
        self.grid = Grid(
            db=db,
            blobs=blobs,
            settings=self.settings,
            clock=time.monotonic,
            entropy=os.urandom,
            grid_id=await _grid_id(db),
            holder=make_id("ses", os.urandom(RANDOM_BYTES)),
        )
        db.observe = self.grid.metrics.transaction
        await liveness.after_start(self.grid)
        self._stack.push_async_callback(self._leave)
        return invite

    async def _leave(self) -> None:
        """The last words of this process to the database."""
        await liveness.flush(self.grid)
        async with self.grid.db.write() as tx:
            await leases.drop_duties(tx, self.grid.holder)

    async def _serve_grpc(self) -> int:
        server = aio.server(options=list(SERVER_OPTIONS))
        # Generated code has no types.
        add_NodeServiceServicer_to_server(NodeService(self.grid), server)  # type: ignore[no-untyped-call]
        wanted = self.settings.grpc_port
        try:
            port: int = server.add_insecure_port(_address(self.settings.host, wanted))
        except RuntimeError as problem:
            raise _port_in_use(self.settings.host, wanted, "--grpc-port") from problem
        await server.start()

        async def stop() -> None:
            for session in self.grid.fleet:
                if session.stream is not None:
                    session.stream.close(_goodbye())
            await server.stop(GOODBYE_S)

        self._stack.push_async_callback(stop)
        return port

    async def _serve_http(self) -> int:
        host, wanted = self.settings.host, self.settings.http_port
        family = socket.AF_INET6 if ":" in host else socket.AF_INET
        listener = socket.socket(family, socket.SOCK_STREAM)
        self._stack.callback(listener.close)
        if os.name == "posix":  # elsewhere the option lets two processes share a port
            listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            listener.bind((host, wanted))
        except OSError as problem:
            raise _port_in_use(host, wanted, "--http-port") from problem
        server = _HttpServer(
            uvicorn.Config(
                create_app(self.grid),
                log_config=None,
                access_log=False,
                lifespan="off",
                timeout_graceful_shutdown=int(GOODBYE_S),
            )
        )
        task = asyncio.create_task(server.serve(sockets=[listener]), name="http")

        async def stop() -> None:
            self.grid.tail.close()  # who waits is answered before connections are cut off
            self.grid.wake.set()
            server.should_exit = True
            await task

        self._stack.push_async_callback(stop)
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


def run_orchestrator(
    settings: OrchestratorSettings, on_ready: Callable[[Orchestrator], None]
) -> int:
    """Run until SIGINT or SIGTERM; the exit status.

    ``on_ready`` is called once everything listens.

    Raises:
        DistribAIError: see :meth:`Orchestrator.start`.
    """
    return asyncio.run(_run(settings, on_ready))


async def _run(settings: OrchestratorSettings, on_ready: Callable[[Orchestrator], None]) -> int:
    stopping = asyncio.Event()
    loop = asyncio.get_running_loop()
    for name in (signal.SIGINT, signal.SIGTERM):
        if os.name == "posix":
            loop.add_signal_handler(name, stopping.set)
        else:
            signal.signal(name, lambda *_: loop.call_soon_threadsafe(stopping.set))
    orchestrator = Orchestrator(settings)
    await orchestrator.start()
    try:
        on_ready(orchestrator)
        orchestrator.told()
        waits = [
            asyncio.create_task(stopping.wait(), name="signals"),
            asyncio.create_task(orchestrator.watch(), name="watch"),
        ]
        done, pending = await asyncio.wait(waits, return_when=asyncio.FIRST_COMPLETED)
        for task in pending:
            task.cancel()
        await asyncio.gather(*pending, return_exceptions=True)
        for task in done:
            task.result()
    finally:
        await orchestrator.stop()
    return 0


def check_bind(settings: OrchestratorSettings) -> None:
    """Refuse to listen to the world without TLS unless told so.

    Raises:
        UsageError: ``grid.insecure``.
    """
    if settings.insecure or is_loopback(settings.host):
        return
    raise UsageError(
        "grid.insecure",
        f"Listening on {settings.host} would carry tokens in the clear beyond this machine.",
        "Bind to 127.0.0.1 behind a tunnel, or add --insecure on a network that you trust.",
        field="host",
    )


def is_loopback(host: str) -> bool:
    """Whether ``host`` is only this machine."""
    if host == "localhost":
        return True
    try:
        return ip_address(host).is_loopback
    except ValueError:
        return False


def public_host(host: str) -> str:
    """What others can reach a bind address by: a wildcard becomes this machine's own address."""
    try:
        wildcard = ip_address(host).is_unspecified
    except ValueError:
        wildcard = False
    if not wildcard:
        return host
    family, target = (
        (socket.AF_INET6, "2001:db8::1") if ":" in host else (socket.AF_INET, "192.0.2.1")
    )
    # Connecting a datagram socket sends nothing; it only picks the address that would be used.
    with socket.socket(family, socket.SOCK_DGRAM) as probe:
        try:
            probe.connect((target, 9))
        except OSError:
            return socket.gethostname()
        return str(probe.getsockname()[0])


async def _grid_id(db: Database) -> str:
    """The grid's id, made at its first start."""
    fresh = "grid_" + base64.b32encode(os.urandom(RANDOM_BYTES)).decode().lower()
    async with db.write() as tx:
        await fleet.set_fact_once(tx, "grid_id", fresh)
        found = await fleet.fact(tx, "grid_id")
    assert found is not None
    return found


def _goodbye() -> pb.SessionEnd:
    return pb.SessionEnd(
        code="grid.unreachable", message="The orchestrator is stopping.", retry=True
    )


def _port_in_use(host: str, port: int, flag: str) -> Conflict:
    return Conflict(
        "grid.port",
        f"{_address(host, port)} cannot be listened on: the port is in use, or the address is not "
        "this machine's.",
        f"Stop what uses it, or take another port: {flag} (0 takes any free one).",
    )


def _address(host: str, port: int) -> str:
    return f"{_bracketed(host)}:{port}"


def _bracketed(host: str) -> str:
    return f"[{host}]" if ":" in host else host
