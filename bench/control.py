"""What the control plane costs and how fast it is, apart from any training.

Virtual nodes (``bench._crowd``) do no work: what they are given, a sample to generate, they hand in
at once. So there is always idle capacity, and every figure is the orchestrator's own.

- **Assigning.** One orchestrator with PostgreSQL and all virtual nodes in one process, over the
  production server without sockets: the nodes' half of the protocol counts against the figures.
  ``assign_*_ms``: from asking for a sample until its assignment reaches a node, one at a time every
  few milliseconds. ``assignments_per_s``: a job for 2,000 nodes is accepted; until its first
  round is split, leased and told to all of them.
- **Heartbeats.** CPU time of that process while every node sends a heartbeat each 10 s, beyond what
  it takes while they are silent.
- **Streams.** Memory of an orchestrator process by the streams that it holds, over real gRPC,
  beside that of a bare echo server on the same library.
- **Storm.** Every one of these nodes holds a task when all connections break at the same moment:
  how long they are away, and how many tasks did not stay with their node under their attempt.
- **Replicas.** Three orchestrator processes and their PostgreSQL against one, by assignments a CPU
  second of all of them; then one of the three is killed: how long its nodes are away.
"""

from __future__ import annotations

import argparse
import asyncio
import logging
import multiprocessing
import shutil
import signal
import statistics
import tempfile
import time
from collections.abc import Sequence
from contextlib import AsyncExitStack, suppress
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import grpc.aio
import psutil
import structlog

from bench import _crowd, _processes, common
from bench._processes import BATCH, CAP_S
from distribai.client import AsyncClient, calls
from distribai.core.architectures import family
from distribai.core.plain import to_plain
from distribai.core.spec import DataSpec, JobSpec, ModelSpec
from distribai.orchestrator.context import Grid
from distribai.orchestrator.jobs.commands import accept_job, create_job, request_generation
from distribai.orchestrator.main import Orchestrator
from distribai.sections import OrchestratorSettings
from distribai.store.statements import work
from distribai.wire import joinlink
from distribai.wire.options import SERVER_OPTIONS
from distribai.wire.v1 import distribai_pb2 as pb
from distribai.wire.v1.distribai_pb2_grpc import (
    NodeServiceServicer,
    add_NodeServiceServicer_to_server,
)

NAME = "control"
HELP = "assignments, heartbeats, streams and replicas of the control plane"

HEARTBEAT_S = 10.0
WARM_UP = 20
PAUSE_S = 0.01
ROUND = 2000
"""Slots of the round whose assignments are timed, at most."""

KB = 1000.0


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The benchmark's own options."""
    parser.add_argument("--nodes", type=int, default=10_000, help="virtual nodes on one replica")
    parser.add_argument("--streams", type=int, default=2_000, help="real gRPC streams")
    parser.add_argument("--samples", type=int, default=500, help="assignments that are timed")
    parser.add_argument(
        "--parts", nargs="+", choices=list(PARTS), default=list(PARTS), help="only these parts"
    )


def run(args: argparse.Namespace) -> dict[str, Any]:
    """Measure each part with processes of its own."""
    if args.quick:
        args.nodes, args.streams, args.samples = 100, 120, 20
    root = Path(tempfile.mkdtemp(prefix="distribai-bench-"))
    found: dict[str, Any] = {}
    try:
        with _processes.postgres() as (database, pid):
            for part in args.parts:
                common.say(f"{part} ...")
                _processes.empty(database)
                found |= PARTS[part](args, root / part, database, pid)
    finally:
        shutil.rmtree(root, ignore_errors=True)
    figures = {k: v for k, v in found.items() if not k.startswith("_")}
    common.table(["figure", "value"], list(figures.items()))
    spread = found.pop("_spread", None)  # of every other assignment against the rest
    return {
        "settings": {
            "nodes": args.nodes,
            "streams": args.streams,
            "samples": args.samples,
            "parts": args.parts,
            "quick": args.quick,
        },
        "samples": {k[1:]: v for k, v in found.items() if k.startswith("_")},
        "spread": spread,
        "noisy": spread is not None and spread > common.NOISY,
        **figures,
    }


# ------------------------------------------------------------------ assigning, heartbeats


def _assigning(args: argparse.Namespace, root: Path, database: str, _pid: int) -> dict[str, Any]:
    return _processes.in_child(_assign_child, root, database, args.nodes, args.samples)


def _assign_child(pipe: Connection, root: Path, database: str, nodes: int, samples: int) -> None:
    structlog.configure(wrapper_class=structlog.make_filtering_bound_logger(logging.ERROR))
    pipe.send(asyncio.run(_assign(root, database, nodes, samples)))


async def _assign(root: Path, database: str, nodes: int, samples: int) -> dict[str, Any]:
    orchestrator = Orchestrator(
        OrchestratorSettings(state_dir=root, db=database, grpc_port=0, http_port=0)
    )
    await orchestrator.start()
    grid = orchestrator.grid
    arrivals = _Arrivals()
    invite = joinlink.parse(orchestrator.join_link).invite
    began = time.monotonic()
    crowd: list[_crowd.Attached] = []
    beating = asyncio.create_task(_beat(crowd))
    for first in range(0, nodes, BATCH):
        crowd += [
            _crowd.Attached(grid, _crowd.VirtualNode(i, invite, arrivals.note))
            for i in range(first, min(nodes, first + BATCH))
        ]
        await _processes.registered(crowd[-BATCH:])
    joined_s = time.monotonic() - began

    job = await create_job(grid, _spec(), None, "bench")
    times: list[float] = []
    for _ in range(WARM_UP + samples):
        at = time.monotonic()
        task = await request_generation(grid, job, None, "x", 1, 1.0, 0)
        times.append(1000 * (await arrivals.of(task) - at))
        await asyncio.sleep(PAUSE_S)
    times = times[WARM_UP:]
    halves = [statistics.median(times[0::2]), statistics.median(times[1::2])]
    times.sort()
    await _until_done(grid, job)

    beats = await _core_share()
    beating.cancel()
    quiet = await _core_share()
    beating = asyncio.create_task(_beat(crowd))
    slots = min(nodes - 1, ROUND)
    large = await create_job(grid, _spec(slots), None, "bench")
    began = time.monotonic()
    await accept_job(grid, large, "bench")
    # The evaluation of version 0 is assigned as well.
    round_s = await arrivals.last_of(slots + 1, after=began) - began
    beating.cancel()
    for node in crowd:
        await node.leave()
    await orchestrator.stop()
    return {
        "assign_p50_ms": statistics.median(times),
        "assign_p99_ms": times[min(len(times) - 1, round(0.99 * len(times)))],
        "assignments_per_s": (slots + 1) / round_s,
        "heartbeat_core_share": beats - quiet,
        "idle_core_share": quiet,
        "joins_per_s": nodes / joined_s,
        "_spread": abs(halves[0] / halves[1] - 1),
        "_assign_ms": [round(t, 2) for t in times],
    }


class _Arrivals:
    """When each task's assignment reached a node."""

    def __init__(self) -> None:
        self._at: dict[str, float] = {}
        self._news = asyncio.Event()

    def note(self, task_id: str, at: float) -> None:
        """A task has arrived."""
        self._at[task_id] = at
        self._news.set()

    async def of(self, task_id: str) -> float:
        """When the task arrived; waits for it."""
        async with asyncio.timeout(CAP_S):
            while task_id not in self._at:
                self._news.clear()
                await self._news.wait()
        return self._at[task_id]

    async def last_of(self, count: int, after: float) -> float:
        """When the last of ``count`` tasks arrived of those that came after a time."""
        async with asyncio.timeout(CAP_S):
            while len(late := [at for at in self._at.values() if at > after]) < count:
                self._news.clear()
                await self._news.wait()
        return sorted(late)[count - 1]


async def _beat(crowd: Sequence[_crowd.Attached]) -> None:
    """Every node sends a heartbeat each :data:`HEARTBEAT_S`, spread evenly."""
    parts, part = 100, 0
    while True:
        for node in crowd[part % parts :: parts]:
            node.beat()
        part += 1
        await asyncio.sleep(HEARTBEAT_S / parts)


async def _core_share() -> float:
    """CPU seconds a second of this process over one interval of heartbeats."""
    began, cpu = time.monotonic(), time.process_time()
    await asyncio.sleep(HEARTBEAT_S)
    return (time.process_time() - cpu) / (time.monotonic() - began)


# ------------------------------------------------------------------ streams


def _streams(args: argparse.Namespace, root: Path, database: str, _pid: int) -> dict[str, Any]:
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
    slots = min(streams, ROUND)
    job = asyncio.run(_begin_round(replica, slots))
    client.working(slots)
    cpu = _cpu_of([replica.process.pid])
    away = sorted(client.storm(streams))
    return {
        "storm_streams": len(away),
        "storm_p50_s": statistics.median(away),
        "storm_recovery_s": away[-1],
        "storm_cpu_s": _cpu_of([replica.process.pid]) - cpu,
        "storm_lost_tasks": asyncio.run(_lost(replica, job, slots)),
    }


async def _begin_round(replica: _processes.Replica, slots: int) -> str:
    async with AsyncClient(replica.url, replica.token) as client:
        job = (await client.send(calls.create_job(_spec(slots), "storm"))).id
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


# ------------------------------------------------------------------ replicas


def _three(args: argparse.Namespace, root: Path, database: str, pid: int) -> dict[str, Any]:
    nodes, wanted = (30, 20) if args.quick else (300, 3000)
    rates: dict[int, float] = {}
    away: list[float] = []
    for count in (1, 3):
        _processes.empty(database)
        with _processes.replicas(root / str(count), database, count) as replicas:
            addresses = [r.grpc for r in replicas]
            with _processes.Client(addresses, replicas[0].invite) as client:
                client.connect(nodes)
                processes = [r.process.pid for r in replicas]
                asyncio.run(_ask(replicas, wanted // 4))  # warm
                before = _cpu_of(processes, pid)
                asyncio.run(_ask(replicas, wanted))
                rates[count] = wanted / (_cpu_of(processes, pid) - before)
                if count == 3:
                    replicas[-1].process.send_signal(signal.SIGKILL)
                    replicas[-1].process.wait()
                    away = client.away(nodes)
    return {
        "replica_efficiency": rates[3] / rates[1],
        "failover_p99_s": sorted(away)[round(0.99 * (len(away) - 1))],
        "failover_nodes": len(away),
        "assignments_per_cpu_s": rates[1],
        "_away_s": [round(a, 2) for a in away],
    }


async def _ask(replicas: Sequence[_processes.Replica], wanted: int, at_once: int = 16) -> None:
    """Have ``wanted`` samples generated, through every replica in turn."""
    async with AsyncExitStack() as stack:
        clients = [
            await stack.enter_async_context(AsyncClient(r.url, replicas[0].token)) for r in replicas
        ]
        jobs = [j.id for j in (await clients[0].send(calls.jobs())).items]
        if not jobs:
            await clients[0].send(calls.create_job(_spec(), "bench"))
            jobs = [j.id for j in (await clients[0].send(calls.jobs())).items]
        job = jobs[0]
        left = iter(range(wanted))

        async def worker() -> None:
            for number in left:
                await clients[number % len(clients)].send(calls.generate(job, "x", max_tokens=1))

        await asyncio.gather(*(worker() for _ in range(at_once)))


def _cpu_of(processes: Sequence[int], postgres: int | None = None) -> float:
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


def _spec(workers: int = 1) -> JobSpec:
    config = to_plain(family("decoder_transformer").PROFILES["tiny"])
    model = ModelSpec("decoder_transformer", config, "tiny")
    return JobSpec(
        NAME, model, DataSpec(), steps=1, batch=1, workers_min=workers, workers_max=workers
    )


async def _until_done(grid: Grid, job: str) -> None:
    """Wait until no task of the job is open."""
    async with asyncio.timeout(CAP_S):
        while True:
            async with grid.db.read() as tx:
                if not await work.tasks_in(tx, work.OPEN_TASKS, job_id=job):
                    return
            await asyncio.sleep(0.1)


PARTS = {"assigning": _assigning, "streams": _streams, "replicas": _three}
