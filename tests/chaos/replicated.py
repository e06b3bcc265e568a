"""Three replicas on one PostgreSQL and one S3 server, behind a load balancer, and their nodes."""

from __future__ import annotations

import asyncio
import json
import signal
import subprocess
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import asyncpg

from distribai.api import answers
from distribai.client import Client
from distribai.core.spec import DataSpec, JobSpec, ModelSpec, RoundSpec
from distribai.errors import Unavailable
from distribai.testing import faults
from distribai.wire import joinlink
from tests.chaos.crowd import Crowd
from tests.chaos.front import BUCKET, LoadBalancer, Loop, ObjectStore
from tests.e2e.harness import CLI, GridProcesses, wait_for
from tests.store.databases import Postgres

REPLICAS = 3
ROUNDS = 4
INNER_STEPS = 8
STEP_S = 0.1

REPLICA_S = 3.0
LIVENESS = {
    "DISTRIBAI_LIVENESS_HEARTBEAT_S": "1",
    "DISTRIBAI_LIVENESS_DEGRADED_S": "3",
    "DISTRIBAI_LIVENESS_OFFLINE_S": "5",
    "DISTRIBAI_LIVENESS_STARTUP_GRACE_S": "6",
    "DISTRIBAI_LIVENESS_REPLICA_S": str(REPLICA_S),
    "DISTRIBAI_LIVENESS_TICK_S": "0.5",
    "DISTRIBAI_ORCHESTRATOR_MERGE_THREADS": "1",
}
"""A tenth of the defaults."""


@dataclass
class Replica:
    """One orchestrator process after another, on the same ports and state directory.

    ``holder`` is the name of the present one in leased rows, empty until it serves.
    """

    name: str
    process: subprocess.Popen[str] | None = None
    ready: dict[str, Any] = field(default_factory=dict)
    serves: bool = False
    frozen: bool = False
    due: float | None = None
    reader: threading.Thread | None = None

    @property
    def holder(self) -> str:
        return str(self.ready.get("replica", "")) if self.serves else ""


class ReplicatedGrid(GridProcesses):
    """The grid. ``without`` are protections that every replica is robbed of."""

    def __init__(self, root: Path, *, without: tuple[str, ...] = ()) -> None:
        root.mkdir(parents=True, exist_ok=True)
        super().__init__(root, LIVENESS)
        self.without = without
        self.jobs: list[str] = []
        self.replicas = [Replica(f"replica{i}") for i in range(REPLICAS)]
        self.crowd: Crowd | None = None
        self._ends: list[Callable[[], list[str] | None]] = []

    # -------------------------------------------------------------- beginning and end

    def begin(self, virtual: int, real: int, *, pretend: bool) -> None:
        """Everything starts; returns once all nodes are in."""
        self.front = Loop("front")
        self._ends.append(self.front.close)
        self.postgres = Postgres(crashes=True)
        self._ends.append(self._end_postgres)
        self.store = ObjectStore(self.front)
        self._ends.append(self.store.close)
        self.env |= self.store.env
        self._ends.append(self._end_replicas)
        self._start_all(self.replicas[:1])  # it makes the schema and the operator's key
        self._start_all(self.replicas[1:])
        first = self.replicas[0].ready
        self.balancer = LoadBalancer(
            self.front,
            [r.ready["grpc"] for r in self.replicas],
            [r.ready["url"] for r in self.replicas],
        )
        self._ends.append(self.balancer.close)
        link = replace(
            joinlink.parse(first["join_link"]), grpc=self.balancer.grpc, http=self.balancer.http
        )
        self.ready = {"url": link.http_url, "ca": ""}
        self.token = first["operator_token"]
        self.crowd = Crowd(
            self.root / "crowd", str(link), virtual, STEP_S, lambda: self.balancer.serves_since
        )
        self._ends.append(self.crowd.close)
        for index in range(real):
            self._start_node(index, str(link), pretend=pretend)
        wait_for("all nodes are in", lambda: self._online() == virtual + real)

    def _start_all(self, replicas: Sequence[Replica]) -> None:
        for replica in replicas:
            self._start(replica)
        for replica in replicas:
            assert replica.reader is not None
            replica.reader.join(120)
            assert replica.serves, (self.root / f"{replica.name}.log").read_text()

    def _start_node(self, index: int, link: str, *, pretend: bool) -> None:
        name = f"real{index}"
        pretended = faults.command("--pretend", str(STEP_S), arguments=())
        node = self.spawn(
            name,
            *("node", "start", "--join", link, "--name", name),
            *("--state-dir", str(self.root / name), "--threads", "1", "--device", "cpu"),
            command=pretended if pretend else CLI,
            env={"DISTRIBAI_NODE_BENCHMARK": "false"},
        )
        self.nodes.append(node)

    def _start(self, replica: Replica, *options: str) -> None:
        """Start a replica; a thread waits until it serves or is dead."""
        without = [o for name in self.without for o in ("--without", name)]
        ports = [replica.ready.get(name, ":0").rsplit(":", 1)[1] for name in ("grpc", "http")]
        replica.process = process = self.spawn(
            replica.name,
            *("orchestrator", "start", "--json", "--grpc-port", ports[0], "--http-port", ports[1]),
            *("--db", self.postgres.uri, "--blobs", f"s3://{BUCKET}/blobs"),
            *("--state-dir", str(self.root / replica.name)),
            command=faults.command(*without, *options, arguments=()),
            env={"DISTRIBAI_HOME": str(self.root / f"{replica.name}-home")},
        )
        replica.serves, replica.due = False, None

        def read() -> None:
            assert process.stdout is not None
            with process.stdout:
                line = process.stdout.readline()
            if line and replica.process is process:
                replica.ready, replica.serves = json.loads(line), True

        replica.reader = threading.Thread(target=read, daemon=True)
        replica.reader.start()

    def end(self) -> list[str]:
        """End everything, the nodes first; what had to be killed."""
        for replica in self.replicas:
            if replica.process is not None and replica.process.poll() is None:
                replica.process.send_signal(signal.SIGCONT)
        stubborn = self.stop()
        for undo in reversed(self._ends):
            stubborn += undo() or []
        return stubborn

    def _end_postgres(self) -> None:
        (self.root / "postgres.log").write_text(self.postgres.log())
        self.postgres.close()

    def _end_replicas(self) -> list[str]:
        living = [r for r in self.replicas if r.process is not None and r.process.poll() is None]
        for replica in living:
            assert replica.process is not None
            replica.process.terminate()
        stubborn = []
        for replica in living:
            assert replica.process is not None
            try:
                replica.process.wait(30)
            except subprocess.TimeoutExpired:
                stubborn.append(replica.name)
                replica.process.kill()
                replica.process.wait(10)
        return stubborn

    # -------------------------------------------------------------- looking

    def _ask(self, query: str) -> list[dict[str, Any]]:
        async def ask() -> list[dict[str, Any]]:
            db = await asyncpg.connect(self.postgres.uri, timeout=30)
            try:
                return [dict(row) for row in await db.fetch(query)]
            finally:
                await db.close()

        return asyncio.run(ask())

    def _ask_if_there(self, query: str) -> list[dict[str, Any]] | None:
        try:
            return self._ask(query)
        except (OSError, asyncpg.PostgresError, asyncpg.InterfaceError):
            return None

    def _submit(self) -> str | None:
        """One more job, accepted, unless the grid is away: then it is asked for again."""
        number = len(self.jobs)
        text = self.root / "text.txt"
        text.write_text("".join(f"line {i} of the text\n" for i in range(400)))

        def ask(client: Client) -> str:
            data = DataSpec(source="blobs", files=(client.upload(text),), held_out=0.1)
            job = client.create_job(_spec(number, data), f"job {number}")
            if client.job(job.id).state == "submitted":
                client.accept(job.id)
            return job.id

        try:
            return self.look(ask)
        except Unavailable:
            return None

    def record(self, job_id: str) -> answers.JobRecord | None:
        """A job, or nothing while no replica answers."""
        try:
            return self.look(lambda client: client.job(job_id))
        except Unavailable:
            return None

    def _online(self) -> int:
        try:
            return self.look(lambda c: sum(n.liveness == "online" for n in c.nodes()))
        except Unavailable:
            return -1

    def _all_are_shown(self) -> bool:
        try:
            found = self.look(lambda client: client.health())
        except Unavailable:
            return False
        return len(found.replicas) == REPLICAS and not found.problems


def _spec(number: int, data: DataSpec) -> JobSpec:
    return JobSpec(
        name=f"chaos {number}",
        model=ModelSpec("decoder_transformer", {"dim": 8, "layers": 1, "heads": 2, "ffn_dim": 8}),
        data=data,
        steps=ROUNDS * INNER_STEPS,
        batch=2,
        seq_len=8,
        seed=number,
        workers_min=2,
        workers_max=14,
        rounds=RoundSpec(inner_steps=INNER_STEPS, grace_min=1.0, grace_max=10.0),
    )
