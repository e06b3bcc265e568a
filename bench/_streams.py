"""The control benchmark's streams: what one costs in memory, and a storm of them."""

from __future__ import annotations

import argparse
import asyncio
import multiprocessing
import statistics
import time
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import grpc.aio
import psutil

from bench import _crowd, _processes
from distribai.client import AsyncClient, calls
from distribai.wire.options import SERVER_OPTIONS
from distribai.wire.v1 import distribai_pb2 as pb
from distribai.wire.v1.distribai_pb2_grpc import (
    NodeServiceServicer,
    add_NodeServiceServicer_to_server,
)

KB = 1000.0


def measure(args: argparse.Namespace, root: Path, database: str, _pid: int) -> dict[str, Any]:
    """Memory by stream, of an orchestrator and of the echo server; then the storm."""
    with (
        _processes.replicas(root, database, 1) as (replica,),
        _processes.Client([replica.grpc], replica.invite) as client,
    ):
        ours = _memory_by_stream(replica.process.pid, args.streams, client)
        storm = _storm(args.streams, replica, client)
    context = multiprocessing.get_context("spawn")
    pipe, end = context.Pipe()
    echo = context.Process(target=_echo_child, args=(end,), daemon=True)
    echo.start()
    try:
        assert echo.pid is not None
        address = pipe.recv()
        with _processes.Client([address], "") as client:
            bare = _memory_by_stream(echo.pid, args.streams, client)
    finally:
        echo.kill()
        echo.join()
    return {"kb_per_stream": ours, "kb_per_stream_echo": bare, **storm}


def _memory_by_stream(pid: int, streams: int, client: _processes.Client) -> float:
    """kB of resident memory of a server process by stream, its first fifty aside."""
    client.connect(50)
    before = _resident(pid)
    client.connect(streams)
    return (_resident(pid) - before) / KB / (streams - 50)


def _storm(streams: int, replica: _processes.Replica, client: _processes.Client) -> dict[str, Any]:
    """Break all connections while every node has a task."""
    slots = min(streams, _crowd.ROUND)
    job = asyncio.run(_begin_round(replica, slots))
    client.working(slots)
    cpu = _processes.cpu_of([replica.process.pid])
    away = sorted(client.storm(streams))
    return {
        "storm_streams": len(away),
        "storm_p50_s": statistics.median(away),
        "storm_recovery_s": away[-1],
        "storm_cpu_s": _processes.cpu_of([replica.process.pid]) - cpu,
        "storm_lost_tasks": asyncio.run(_lost(replica, job, slots)),
    }


async def _begin_round(replica: _processes.Replica, slots: int) -> str:
    async with AsyncClient(replica.url, replica.token) as client:
        job = (await client.send(calls.create_job(_crowd.spec(slots), "storm"))).id
        await client.send(calls.accept(job))
        return job


async def _lost(replica: _processes.Replica, job: str, slots: int) -> int:
    """Training tasks of a job that are not with a node under their first attempt."""
    kept, cursor = 0, ""
    async with AsyncClient(replica.url, replica.token) as client:
        while True:
            page = await client.send(calls.tasks(job, 200, cursor))
            trained = [t for t in page.items if t.phase == "train"]
            kept += sum(t.state == "leased" and t.attempt == 1 and not t.causes for t in trained)
            cursor = page.next_cursor
            if not cursor:
                return slots - kept


def _resident(pid: int) -> float:
    time.sleep(2.0)  # what registering has left behind is written and freed
    return float(psutil.Process(pid).memory_info().rss)


def _echo_child(pipe: Connection) -> None:
    asyncio.run(_echo(pipe))


async def _echo(pipe: Connection) -> None:
    """A server that does nothing but answer, on the same library and contract."""

    class Echo(NodeServiceServicer):
        async def Session(self, incoming: Any, _context: Any) -> Any:  # noqa: N802  # the contract's
            yield pb.OrchestratorMessage(register_ack=pb.RegisterAck(session_id="x"))
            async for message in incoming:
                yield pb.OrchestratorMessage(ack=message.ack)

    server = grpc.aio.server(options=list(SERVER_OPTIONS))
    add_NodeServiceServicer_to_server(Echo(), server)  # type: ignore[no-untyped-call]
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    pipe.send(f"127.0.0.1:{port}")
    await server.wait_for_termination()
