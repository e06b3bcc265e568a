"""How long a grid of real processes takes to go on after a process of it was killed with -9.

Three nodes train one job by DiLoCo rounds. Three things are killed in turn, again and again:

- **node**: the daemon of one node, which stays away. Until the samples of its task, or the first of
  them, are being trained by somebody else.
- **daemon**: the daemon of one node, which is started again at once on the same disk. Until it goes
  on with the same attempt of its task, beyond the step that it had reported, or with a newer task.
- **orchestrator**: started again at once on the same state. Until the first task is assigned.

All from the kill on, on the orchestrator's records and the host's clock. The liveness constants are
scaled down by the same factor, so the figures in heartbeats are those of the defaults; the start of
a process (a second for the orchestrator, several for a training child that imports torch) is not
scaled, and counts in full.
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import shutil
import signal
import statistics
import subprocess
import tempfile
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

from bench import common
from distribai import spawn
from distribai.api import answers
from distribai.client import Client
from distribai.core.architectures import family
from distribai.core.plain import to_plain
from distribai.core.spec import DataSpec, JobSpec, ModelSpec, RoundSpec
from distribai.core.states import TaskState
from distribai.errors import DistribAIError, Unavailable

NAME = "recovery"
HELP = "seconds, heartbeats and rounds from kill -9 to work going on"

T = TypeVar("T")

HEARTBEAT_S, QUICK_HEARTBEAT_S = 1.0, 0.5
LIVENESS = {
    "HEARTBEAT_S": 1.0,
    "DEGRADED_S": 3.0,
    "OFFLINE_S": 5.0,
    "STARTUP_GRACE_S": 6.0,
    "TICK_S": 0.5,
}
"""The defaults, in heartbeats."""

NODES = 3
PROGRESS_S = 0.2
"""Between two reports of a task's progress: what is looked for must be seen when it happens."""

CAP_S = 120.0
LAST_TASKS, LAST_LINES = 12, 5
"""What is said of tasks and logs when something did not happen within the cap."""

KINDS = ("node", "daemon", "orchestrator")
RECEIVED = (TaskState.SUBMITTED, TaskState.VERIFYING, TaskState.ACCEPTED)
BROUGHT_IN = -1.0
"""Instead of a time: there was nothing to train again."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The benchmark's own options."""
    parser.add_argument("--repetitions", type=int, default=5, help="kills of each kind")
    parser.add_argument("--inner-steps", type=int, default=60)


def run(args: argparse.Namespace) -> dict[str, Any]:
    """Kill each in turn and say how long it took."""
    repetitions = 1 if args.quick else args.repetitions
    heartbeat = QUICK_HEARTBEAT_S if args.quick else HEARTBEAT_S
    root = Path(tempfile.mkdtemp(prefix="distribai-bench-"))
    grid = _Grid(root, {name: beats * heartbeat for name, beats in LIVENESS.items()})
    try:
        grid.begin(args.inner_steps)
        figures: dict[str, list[float]] = {kind: [] for kind in KINDS}
        for turn in range(repetitions):
            for kind in KINDS:
                seconds = grid.kill(kind, turn)
                figures[kind].append(seconds)
                common.say(f"{kind}: {seconds:.1f} s")
        round_s = grid.round_seconds()
    finally:
        grid.stop()
        shutil.rmtree(root, ignore_errors=True)
    median = {kind: statistics.median(values) for kind, values in figures.items()}
    common.table(
        ["killed", "median s", "worst s", "heartbeats", "rounds"],
        [
            [k, median[k], max(figures[k]), median[k] / heartbeat, median[k] / round_s]
            for k in KINDS
        ],
    )
    return {
        "settings": {
            "nodes": NODES,
            "inner_steps": args.inner_steps,
            "liveness": grid.liveness,
            "round_s": round_s,
            "quick": args.quick,
        },
        "samples": {k: [round(v, 2) for v in values] for k, values in figures.items()},
        "spread": max(
            statistics.pstdev(v) / statistics.fmean(v) if len(v) > 1 else 0.0
            for v in figures.values()
        ),
        "recovery_s": median,
        "recovery_heartbeats": {k: v / heartbeat for k, v in median.items()},
        "recovery_rounds": {k: v / round_s for k, v in median.items()},
    }


class _Grid:
    """One orchestrator, its nodes, and the job they train."""

    def __init__(self, root: Path, liveness: dict[str, float]) -> None:
        self.liveness = liveness
        self._root = root
        self._processes: dict[str, subprocess.Popen[bytes]] = {}
        self._ports = ("0", "0")
        self._ready: dict[str, Any] = {}
        self._token = ""
        self._job = ""

    def begin(self, inner_steps: int) -> None:
        """Start everything and let the first round pass: it builds the models."""
        self._orchestrator()
        self._token = self._ready["operator_token"]
        for index in range(NODES):
            self._node(f"node{index}")
        model = ModelSpec(
            "decoder_transformer", to_plain(family("decoder_transformer").PROFILES["tiny"]), "tiny"
        )
        spec = JobSpec(
            NAME,
            model,
            DataSpec(),
            steps=1000 * inner_steps,
            batch=4,
            seq_len=32,
            rounds=RoundSpec(inner_steps=inner_steps),
        )
        with self._client() as client:
            self._job = client.create_job(spec).id
            client.accept(self._job)
        self._wait("two rounds", lambda client: client.job(self._job).version >= 2)

    def kill(self, kind: str, turn: int) -> float:
        """Kill one process; seconds until the work goes on, after which all is well again."""
        return {
            "node": self._kill_node,
            "daemon": self._kill_daemon,
            "orchestrator": self._kill_orchestrator,
        }[kind](f"node{turn % NODES}")

    def round_seconds(self) -> float:
        """Median time from a round's opening to the next one's."""
        with self._client() as client:
            opened = [r.opened_at for r in client.rounds(self._job)]
        return statistics.median(b - a for a, b in itertools.pairwise(opened))

    def stop(self) -> None:
        """End the nodes, then the orchestrator."""
        order = sorted(self._processes, key=lambda name: name == "orchestrator")
        for name in order:
            process = self._processes[name]
            for _ in range(2):  # a second signal: what it is at is of no use any more
                if process.poll() is None:
                    process.send_signal(signal.SIGTERM)
                    time.sleep(0.2)
            try:
                process.wait(30)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()

    # -------------------------------------------------------------- kills

    def _kill_node(self, name: str) -> float:
        while True:
            held = self._at_work(name)
            killed = self._strike(name)
            again = partial(self._again, held=held)
            found = self._wait("its samples are trained again", again)
            self._node(name)
            self._at_work(name)
            if found != BROUGHT_IN:
                return found - killed

    def _again(self, client: Client, held: answers.TaskRecord) -> float | None:
        """When somebody else trains what a killed node held; ``BROUGHT_IN`` if the node had been
        quicker than the kill, so that nobody has to."""
        for task in client.tasks(self._job):
            if task.id == held.id and task.attempt == held.attempt and task.state in RECEIVED:
                return BROUGHT_IN
            again = task.node_id != held.node_id or task.attempt > held.attempt
            if again and task.step > 0 and _overlap(task.samples, held.samples):
                return time.time()
        return None

    def _kill_daemon(self, name: str) -> float:
        held = self._at_work(name)
        killed = self._strike(name)
        self._node(name)

        def goes_on(client: Client) -> float | None:
            for task in self._of_node(client, held.node_id):
                newer = task.id != held.id or task.attempt > held.attempt
                if (newer and task.step > 0) or task.step > held.step:
                    return time.time()
            return None

        return self._wait("the daemon goes on", goes_on) - killed

    def _kill_orchestrator(self, _name: str) -> float:
        killed = self._strike("orchestrator")
        self._orchestrator()

        def assigned(client: Client) -> float | None:
            after = [t.leased_at for t in client.tasks(self._job) if (t.leased_at or 0) > killed]
            return min(after, default=None)

        return self._wait("a new assignment", assigned) - killed

    def _strike(self, name: str) -> float:
        process = self._processes[name]
        killed = time.time()
        process.kill()
        process.wait()
        return killed

    # -------------------------------------------------------------- looking

    def _at_work(self, name: str) -> answers.TaskRecord:
        """The training task that a node is in the middle of."""

        def probe(client: Client) -> answers.TaskRecord | None:
            ids = {n.name: n.id for n in client.nodes()}
            of_node = self._of_node(client, ids.get(name, "?"))
            return next((t for t in of_node if 0 < t.step < t.steps), None)

        return self._wait(f"{name} trains", probe)

    def _of_node(self, client: Client, node_id: str) -> list[answers.TaskRecord]:
        return [
            t
            for t in client.tasks(self._job)
            if t.node_id == node_id and t.phase == "train" and t.state == TaskState.LEASED
        ]

    def _wait(self, what: str, probe: Callable[[Client], T | None]) -> T:
        end = time.monotonic() + CAP_S
        while time.monotonic() < end:
            try:
                with self._client() as client:
                    found = probe(client)
            except Unavailable:
                found = None
            if found:
                return found
            time.sleep(0.05)
        raise RuntimeError(f"waited {CAP_S:.0f} s in vain: {what}\n{self._situation()}")

    def _situation(self) -> str:
        """What there is to see when something did not happen, for whoever looks for the reason."""
        lines = [f"{name} has ended" for name, p in self._processes.items() if p.poll() is not None]
        try:
            with self._client() as client:
                job = client.job(self._job)
                lines += [f"job: {job.state} {job.reason}, version {job.version}"]
                lines += [
                    f"{n.name}: {n.liveness} {n.standing} {n.intent} {n.intent_reason}"
                    for n in client.nodes()
                ]
                lines += [
                    f"{t.phase} {t.state} {t.step}/{t.steps} attempt {t.attempt} {t.node_id}"
                    for t in [*client.tasks(self._job)][-LAST_TASKS:]
                ]
        except DistribAIError as problem:
            lines.append(f"nothing more to be had: {problem}")
        for log in sorted(self._root.glob("*.log")):
            lines += [f"{log.name}: {line}" for line in log.read_text().splitlines()[-LAST_LINES:]]
        return "\n".join(lines)

    def _client(self) -> Client:
        return Client(self._ready["url"], self._token)

    # -------------------------------------------------------------- processes

    def _orchestrator(self) -> None:
        grpc, http = self._ports
        process = self._start(
            "orchestrator",
            *("orchestrator", "start", "--json", "--grpc-port", grpc, "--http-port", http),
        )
        assert process.stdout is not None
        with process.stdout:
            self._ready = json.loads(process.stdout.readline())
        self._ports = tuple(self._ready[k].rsplit(":", 1)[1] for k in ("grpc", "http"))

    def _node(self, name: str) -> None:
        state = str(self._root / name)
        self._start(
            name,
            *("node", "start", "--join", self._ready["join_link"], "--name", name),
            *("--state-dir", state, "--threads", "1", "--device", "cpu"),
        )

    def _start(self, name: str, *arguments: str) -> subprocess.Popen[bytes]:
        liveness = {f"DISTRIBAI_LIVENESS_{k}": str(v) for k, v in self.liveness.items()}
        with open(self._root / f"{name}.log", "ab") as log:
            self._processes[name] = subprocess.Popen(
                spawn.command("cli", *arguments),
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE if name == "orchestrator" else subprocess.DEVNULL,
                stderr=log,
                env={
                    **os.environ,
                    **spawn.environment(),
                    **liveness,
                    "DISTRIBAI_NODE_PROGRESS_S": str(PROGRESS_S),
                    "OMP_NUM_THREADS": "1",
                    "DISTRIBAI_HOME": str(self._root / "home"),
                },
            )
        return self._processes[name]


def _overlap(some: list[dict[str, int]], others: list[dict[str, int]]) -> bool:
    return any(a["start"] < b["stop"] and b["start"] < a["stop"] for a in some for b in others)
