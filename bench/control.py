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
- **Replicas.** Three orchestrator processes and their PostgreSQL against one, in turn, by
  assignments a CPU second of all of them; once one of the three is killed: how long its nodes are
  away.
"""

from __future__ import annotations

import argparse
import asyncio
import logging
import shutil
import signal
import statistics
import tempfile
import time
from collections.abc import Sequence
from contextlib import AsyncExitStack
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import structlog

from bench import _crowd, _processes, _streams, common
from bench._processes import BATCH, CAP_S
from distribai.client import AsyncClient, calls
from distribai.orchestrator.context import Grid
from distribai.orchestrator.jobs.commands import accept_job, create_job
from distribai.orchestrator.jobs.generation import request_generation
from distribai.orchestrator.main import Orchestrator
from distribai.sections import OrchestratorSettings
from distribai.store.statements import work
from distribai.wire import joinlink

NAME = "control"
HELP = "assignments, heartbeats, streams and replicas of the control plane"

HEARTBEAT_S = 10.0
WARM_UP = 20
PAUSE_S = 0.01
PAIRS = 2
"""Times that one replica and three are measured, in turn."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The benchmark's own options."""
    parser.add_argument("--nodes", type=int, default=10_000, help="virtual nodes on one replica")
    parser.add_argument("--streams", type=int, default=2_000, help="real gRPC streams")
    parser.add_argument("--samples", type=int, default=500, help="assignments that are timed")
    parser.add_argument(
        "--assignments", type=int, default=1500, help="of each measurement of replicas"
    )
    parser.add_argument(
        "--parts", nargs="+", choices=list(PARTS), default=list(PARTS), help="only these parts"
    )


def run(args: argparse.Namespace) -> dict[str, Any]:
    """Measure each part with processes of its own."""
    if args.quick:
        args.nodes, args.streams, args.samples, args.assignments = 100, 120, 20, 20
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
            "assignments": args.assignments,
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

    job = await create_job(grid, _crowd.spec(), None, "bench")
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
    slots = min(nodes - 1, _crowd.ROUND)
    large = await create_job(grid, _crowd.spec(slots), None, "bench")
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


# ------------------------------------------------------------------ replicas


def _three(args: argparse.Namespace, root: Path, database: str, pid: int) -> dict[str, Any]:
    """Pairs of one replica and of three, in turn."""
    nodes = 30 if args.quick else 300
    rates: dict[int, list[float]] = {1: [], 3: []}
    away: list[float] = []
    for index, count in enumerate((1, 3) * PAIRS):
        _processes.empty(database)
        with _processes.replicas(root / str(index), database, count) as replicas:
            addresses = [r.grpc for r in replicas]
            with _processes.Client(addresses, replicas[0].invite) as client:
                client.connect(nodes)
                rates[count].append(_rate(replicas, pid, args.assignments))
                if count == 3 and not away:
                    replicas[-1].process.send_signal(signal.SIGKILL)
                    replicas[-1].process.wait()
                    away = client.away(nodes)
    return {
        "replica_efficiency": sum(rates[3]) / sum(rates[1]),
        "failover_p99_s": sorted(away)[round(0.99 * (len(away) - 1))],
        "failover_nodes": len(away),
        "assignments_per_cpu_s": statistics.mean(rates[1]),
        "_away_s": [round(a, 2) for a in away],
        "_per_cpu_s": {str(count): [round(r, 2) for r in found] for count, found in rates.items()},
    }


def _rate(replicas: Sequence[_processes.Replica], pid: int, wanted: int) -> float:
    """Assignments by CPU second of all orchestrators and of PostgreSQL, once they are warm."""
    processes = [r.process.pid for r in replicas]
    asyncio.run(_ask(replicas, wanted // 4))
    before = _processes.cpu_of(processes, pid)
    asyncio.run(_ask(replicas, wanted))
    return wanted / (_processes.cpu_of(processes, pid) - before)


async def _ask(replicas: Sequence[_processes.Replica], wanted: int, at_once: int = 16) -> None:
    """Have ``wanted`` samples generated, through every replica in turn."""
    async with AsyncExitStack() as stack:
        clients = [
            await stack.enter_async_context(AsyncClient(r.url, replicas[0].token)) for r in replicas
        ]
        jobs = [j.id for j in (await clients[0].send(calls.jobs())).items]
        if not jobs:
            await clients[0].send(calls.create_job(_crowd.spec(), "bench"))
            jobs = [j.id for j in (await clients[0].send(calls.jobs())).items]
        job = jobs[0]
        left = iter(range(wanted))

        async def worker() -> None:
            for number in left:
                await clients[number % len(clients)].send(calls.generate(job, "x", max_tokens=1))

        await asyncio.gather(*(worker() for _ in range(at_once)))


async def _until_done(grid: Grid, job: str) -> None:
    """Wait until no task of the job is open."""
    async with asyncio.timeout(CAP_S):
        while True:
            async with grid.db.read() as tx:
                if not await work.tasks_in(tx, work.OPEN_TASKS, job_id=job):
                    return
            await asyncio.sleep(0.1)


PARTS = {"assigning": _assigning, "streams": _streams.measure, "replicas": _three}
