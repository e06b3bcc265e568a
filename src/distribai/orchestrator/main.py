"""One orchestrator process: start, serve, stop."""

from __future__ import annotations

import asyncio
import base64
import os
import shutil
import signal
import socket
import time
from collections.abc import Callable
from contextlib import AsyncExitStack
from pathlib import Path

import structlog

from distribai import durable
from distribai.core.ids import RANDOM_BYTES, make_id
from distribai.errors import Conflict, Unavailable
from distribai.orchestrator import addresses, certificates, places, serving
from distribai.orchestrator.addresses import join_address
from distribai.orchestrator.certificates import ServerTls
from distribai.orchestrator.context import Grid
from distribai.orchestrator.duties import Duties
from distribai.orchestrator.fleet import liveness, replicas, tokens
from distribai.orchestrator.fleet.registration import MODE, TRUSTED
from distribai.orchestrator.http import connections
from distribai.orchestrator.memory import old_objects_left_alone
from distribai.orchestrator.people import keys
from distribai.orchestrator.webhooks.duties import stranded
from distribai.sections import OrchestratorSettings
from distribai.store import leases
from distribai.store.blobs import BlobStore
from distribai.store.engine import Database
from distribai.store.lock import FileLock
from distribai.store.migrate import migrate
from distribai.store.presigning import presigner
from distribai.store.statements import facts
from distribai.tls import fingerprint

log = structlog.get_logger(__name__)


class Orchestrator:
    """One orchestrator.

    After :meth:`start`: ``grpc_address`` and ``http_address`` are ``host:port`` as bound, ``url``
    is the HTTP interface as this machine reaches it, ``public_url`` as others do, ``ca_pem`` the CA
    that vouches for it (empty without TLS, or where the system's authorities do; ``new_ca`` begins
    with another one),
    ``join_link`` is what contributors paste (``join_note`` what is wrong with it, mostly nothing),
    ``operator_token`` is the operator's first key, and
    ``operator_login`` a one-time login for another machine, both at the grid's first start and
    until :meth:`told`; empty at every later one.
    """

    def __init__(self, settings: OrchestratorSettings, *, new_ca: bool = False) -> None:
        self.settings = settings
        self._new_ca = new_ca
        self.grpc_address = ""
        self.http_address = ""
        self.url = ""
        self.public_url = ""
        self.ca_pem = ""
        self.join_link = ""
        self.join_note = ""
        self.operator_token = ""
        self.operator_login = ""
        self.grid: Grid
        self.duties: Duties
        self._stack = AsyncExitStack()

    async def start(self) -> None:
        """Lock, migrate, listen, run the duties. Whatever fails, nothing is left running.

        Raises:
            UsageError: ``config.invalid``: settings that contradict each other, an impossible
                database URL, a certificate that cannot be used.
            Conflict: ``grid.locked``, ``grid.port``, ``grid.schema``, ``grid.moved`` or
                ``grid.keys``.
            Unavailable: ``grid.database`` or ``blob.store``.
        """
        addresses.check(self.settings)
        try:
            await self._start()
        except BaseException:
            await self._stack.aclose()
            raise

    async def _start(self) -> None:
        invite = await self._open_stores()
        tls = await self._certificate()
        grpc_port = await serving.serve_grpc(self.grid, tls, self._stack)
        http_port = await serving.serve_http(self.grid, tls, self._stack)
        host = self.settings.host
        self.grpc_address = join_address(host, grpc_port)
        self.http_address = join_address(host, http_port)
        self.ca_pem = self.grid.ca_pem
        self.url = addresses.own_url(self.settings, http_port, tls)
        link = addresses.join_link(
            self.settings, grpc_port, http_port, tls, self.grid.grid_id, invite
        )
        self.join_link, self.public_url = str(link), link.http_url
        self.grid.join_link = self.join_link
        self.grid.replica = f"{socket.gethostname()}:{http_port}"
        self.duties = Duties(self.grid)
        self._stack.enter_context(old_objects_left_alone())
        self.duties.start()
        self._stack.push_async_callback(self.duties.stop)

    async def stop(self) -> None:
        """Tell the nodes to come back later, stop listening, write what was heard, let go of the
        database. A second call does nothing."""
        await self._stack.aclose()

    def told(self) -> None:
        """The operator has been told the key: its text is kept no longer."""
        keys.key_was_told(self.settings.state_dir)

    async def watch(self) -> None:
        """Wait until a duty dies of a defect, or because the grid was moved away, and raise it.

        Raises:
            Conflict: ``grid.moved``.
        """
        await self.duties.watch()

    async def _open_stores(self) -> str:
        """Open database and blobs and build the grid; the invite."""
        state = self.settings.state_dir
        durable.state_directory(state)
        db = Database(self.settings.database_url)
        if db.dialect == "sqlite":
            lock = FileLock(db.path)
            self._stack.callback(lock.release)
        self._stack.push_async_callback(db.close)
        await migrate(db)
        async with db.read() as tx:
            await places.check_here(tx)
        shutil.rmtree(state / "scratch", ignore_errors=True)
        blobs = BlobStore.open(
            self.settings.blob_place,
            state / "staging",
            max_bytes=self.settings.max_blob_bytes,
        )
        await places.check_blobs(db, blobs, self.settings.blob_place)
        await ensure_mode(db, self.settings.mode)
        self.operator_token = await keys.ensure_operator_key(db, state, os.urandom)
        if self.operator_token:
            self.operator_login = await keys.new_operator_login(db, os.urandom)
        invite = await self._invite(db)
        self.grid = Grid(
            db=db,
            blobs=blobs,
            settings=self.settings,
            clock=time.monotonic,
            entropy=os.urandom,
            grid_id=await _grid_id(db),
            holder=make_id("ses", os.urandom(RANDOM_BYTES)),
            presigner=presigner(
                self.settings.blob_place, self.settings.presign, self.settings.public_blobs
            ),
        )
        db.observe = self.grid.metrics.transaction
        if why := await stranded(self.grid):
            log.warning("webhook.key", problem=why, hint="Copy webhooks.key from another replica.")
        await liveness.after_start(self.grid)
        self._stack.push_async_callback(self._leave)
        return invite

    async def _invite(self, db: Database) -> str:
        """The text of the standing invite; empty where another replica has it."""
        keys, state = self.settings.keys, self.settings.state_dir
        try:
            invite = await tokens.ensure_invite(db, state, os.urandom, keys)
        except OSError as problem:
            raise keys_unreadable(Path(keys) if keys else state, problem) from problem
        self.join_note = "" if invite else tokens.NO_INVITE
        return invite

    async def _certificate(self) -> ServerTls | None:
        """What the servers show; None: they speak without TLS.

        Every replica must show certificates of one CA, which the database names."""
        settings = self.settings
        if not addresses.has_tls(settings):
            return None
        now = certificates.utc(time.time())
        own = (
            certificates.own_certificate(Path(settings.tls_cert), Path(settings.tls_key), now)
            if settings.tls_cert
            else None
        )
        if own is not None and not settings.asks_for_certificates:
            return own
        directory = Path(settings.keys) if settings.keys else settings.state_dir
        try:
            if self._new_ca:
                certificates.set_aside(directory)
            authority = certificates.ensure_authority(directory, now)
        except OSError as problem:
            raise keys_unreadable(directory, problem) from problem
        ca = fingerprint(authority.cert_pem)
        await check_authority(self.grid.db, directory, ca, replace=self._new_ca)
        tls = own or certificates.server_certificate(authority, addresses.hosts(settings), now)
        self.grid.ca_pem = tls.ca_pem
        self.grid.authority = authority if settings.asks_for_certificates else None
        return tls

    async def _leave(self) -> None:
        """The last words of this process to the database. Without it the process ends all the same:
        its leases run out by themselves."""
        try:
            await liveness.flush(self.grid)
            async with self.grid.db.write() as tx:
                await leases.drop_duties(tx, self.grid.holder)
                await replicas.leave(self.grid, tx)
        except Unavailable as problem:
            log.warning("stopped without a word to the database", problem=problem.message)


def run_orchestrator(
    settings: OrchestratorSettings,
    on_ready: Callable[[Orchestrator], None],
    *,
    new_ca: bool = False,
) -> int:
    """Run until SIGINT or SIGTERM; the exit status.

    ``on_ready`` is called once everything listens.

    Raises:
        DistribAIError: see :meth:`Orchestrator.start` and :meth:`Orchestrator.watch`.
    """
    return asyncio.run(_run(settings, on_ready, new_ca))


async def _run(
    settings: OrchestratorSettings, on_ready: Callable[[Orchestrator], None], new_ca: bool
) -> int:
    stopping = asyncio.Event()
    loop = asyncio.get_running_loop()
    loop.set_exception_handler(connections.quiet_accepts(time.monotonic))
    for name in (signal.SIGINT, signal.SIGTERM):
        if os.name == "posix":
            loop.add_signal_handler(name, stopping.set)
        else:
            signal.signal(name, lambda *_: loop.call_soon_threadsafe(stopping.set))
    orchestrator = Orchestrator(settings, new_ca=new_ca)
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


async def check_authority(db: Database, directory: Path, ca: str, *, replace: bool = False) -> None:
    """Refuse a replica whose CA is not the grid's: nodes that pinned that would refuse it.
    ``replace`` makes it the grid's.

    Raises:
        Conflict: ``grid.keys``.
    """
    async with db.write() as tx:
        if replace:
            await facts.put(tx, "ca", ca)
        else:
            await facts.put_once(tx, "ca", ca)
        known = await facts.get(tx, "ca")
    if known != ca:
        raise Conflict(
            "grid.keys",
            f"The CA in {directory} ({ca[:16]}...) is not this grid's ({str(known)[:16]}...).",
            "Copy `ca-key` and `ca-cert` from the grid's first replica, or let --keys name a "
            "directory that all replicas share. If they are lost: `orchestrator start --new-ca`, "
            "and every node needs the new join link.",
        )


async def ensure_mode(db: Database, wanted: str) -> None:
    """Write down whose nodes the grid takes: as ``wanted``, or, when nothing is said, as before."""
    async with db.write() as tx:
        if wanted:
            await facts.put(tx, MODE, wanted)
        else:
            await facts.put_once(tx, MODE, TRUSTED)


def keys_unreadable(directory: Path, problem: OSError) -> Conflict:
    """The keys are there, or should be, and cannot be had."""
    return Conflict(
        "grid.keys",
        f"The grid's keys in {directory} cannot be read or written: {problem.strerror}.",
        "The orchestrator's user must be able to read them, and at the first start to write there.",
    )


async def _grid_id(db: Database) -> str:
    """The grid's id, made at its first start."""
    fresh = "grid_" + base64.b32encode(os.urandom(RANDOM_BYTES)).decode().lower()
    async with db.write() as tx:
        await facts.put_once(tx, "grid_id", fresh)
        found = await facts.get(tx, "grid_id")
    assert found is not None
    return found
