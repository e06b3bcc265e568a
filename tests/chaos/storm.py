"""A grid of real processes behind bad networks, while everything goes wrong at random.

The orchestrator and three nodes are killed, frozen, cut off, told to leave and robbed of their
disks; the order and the times come from a seed. Nodes reach the orchestrator through proxies of
their own. What cannot come from a seed is how fast a busy machine is, so the same seed gives the
same blows, not the same job.
"""

from __future__ import annotations

import asyncio
import os
import random
import shutil
import signal
import subprocess
import threading
import time
from collections import Counter
from collections.abc import Callable, Coroutine
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, TypeVar

from distribai.api import answers
from distribai.errors import Unavailable
from distribai.testing import faults
from distribai.testing.audit import audit
from distribai.testing.proxy import Proxy
from distribai.testing.shaping import Shape, ShapedLink
from distribai.wire import joinlink
from tests.chaos.undoing import Undoing
from tests.e2e.harness import CLI, GridProcesses, descendants, wait_for

T = TypeVar("T")

NODES = 3
ROUNDS = 6
INNER_STEPS = 12

STEP_S = 0.05
"""Seconds of a pretended step: a round takes about as long as a real one of this size."""

PATIENCE_S = 300.0
"""How long the job may take from the last blow on before it counts as stuck."""

POINTS = (
    "commit.orchestrator.rounds.results.take_result.after",
    "commit.orchestrator.rounds.results.take_result.before",
    "commit.orchestrator.rounds.verifying._verify_work.after",
    "commit.orchestrator.rounds.merging._publish.before",
    "commit.orchestrator.rounds.merging._publish.after",
    "commit.orchestrator.rounds.scheduling.Scheduler.schedule.after",
    "blob.put.flushed",
)
"""Where the orchestrator dies by itself when it was started with a fault."""


class OrchestratorEnded(AssertionError):
    """The orchestrator ended by itself: of a defect."""


@dataclass
class Verdict:
    """What came of a storm: ``problems`` are sentences, ``losses`` held-out by version."""

    problems: list[str]
    blows: Counter[str]
    losses: dict[int, float]
    seconds: float
    version: int


class Wires:
    """Two proxies for each node, in a thread of their own."""

    def __init__(self, grpc: int, http: int) -> None:
        self._targets = (grpc, http)
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, daemon=True)
        self._thread.start()
        self._proxies: list[Proxy] = []

    def add(self) -> tuple[int, int]:
        """The ports of one more node."""
        link = ShapedLink()
        pair = [Proxy("127.0.0.1", port, link) for port in self._targets]
        for proxy in pair:
            self._call(proxy.__aenter__())
        self._proxies += pair
        return pair[0].port, pair[1].port

    def do(self, node: int, what: str) -> None:
        """``cut``, ``freeze`` or ``heal`` what leads to a node."""
        for proxy in self._proxies[2 * node : 2 * node + 2]:
            self._loop.call_soon_threadsafe(getattr(proxy, what))

    def slow(self, node: int, *, bytes_per_s: float, delay_s: float) -> None:
        """Slow down what leads to a node."""
        shape = Shape(bytes_per_s=bytes_per_s, latency_s=delay_s)
        self._loop.call_soon_threadsafe(self._proxies[2 * node].link.reshape, shape, shape)

    def close(self) -> None:
        """Close everything."""
        for proxy in self._proxies:
            self._call(proxy.__aexit__(None, None, None))
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join(10)
        self._loop.close()

    def _call(self, work: Coroutine[Any, Any, T]) -> T:
        return asyncio.run_coroutine_threadsafe(work, self._loop).result(30)


class Storm(GridProcesses):
    """One grid and what happens to it.

    ``pretend``: nodes only pretend to train (no torch), so that blows cost less. ``without`` are
    protections that the orchestrator is robbed of.
    """

    def __init__(
        self, root: Path, seed: int = 0, *, pretend: bool = True, without: tuple[str, ...] = ()
    ) -> None:
        root.mkdir(parents=True, exist_ok=True)
        super().__init__(root)
        self.pretend, self.without = pretend, without
        self.blows: Counter[str] = Counter()
        self.random = random.Random(seed)
        self.links: list[str] = []
        self.generation: Counter[int] = Counter()
        self._undoing = Undoing(self.random)

    # -------------------------------------------------------------- processes

    def start(self, *options: str) -> None:
        """Start the orchestrator, with faults if there are any; it may die before it serves."""
        without = [o for name in self.without for o in ("--without", name)]
        self.start_orchestrator(command=faults.command(*without, *options, arguments=()))

    def begin(self, *options: str, on_node: tuple[str, ...] = ()) -> None:
        """Orchestrator, proxies and nodes; ``options`` are faults of the orchestrator, ``on_node``
        those of the first node."""
        self.start(*options)
        link = joinlink.parse(self.ready["join_link"])
        ports = [int(self.ready[name].rsplit(":", 1)[1]) for name in ("grpc", "http")]
        self.wires = Wires(*ports)
        for index in range(NODES):
            grpc, http = self.wires.add()
            own = replace(link, grpc=f"127.0.0.1:{grpc}", http=f"127.0.0.1:{http}")
            self.links.append(str(own))
            self.nodes.append(self._node(index, *(on_node if index == 0 else ())))

    def _node(self, index: int, *options: str) -> subprocess.Popen[str]:
        name = f"node{index}"
        pretend = faults.command("--pretend", str(STEP_S), *options, arguments=())
        command = pretend if self.pretend else CLI
        return self.spawn(
            name,
            *("node", "start", "--join", self.links[index], "--name", name),
            *("--state-dir", str(self._state_of(index))),
            *("--threads", "1", "--device", "cpu"),
            command=command,
        )

    def _state_of(self, index: int) -> Path:
        return self.root / f"node{index}-{self.generation[index]}"

    def _reap(self, process: subprocess.Popen[str]) -> None:
        process.wait(60)
        if process.stdout is not None:
            process.stdout.close()

    # -------------------------------------------------------------- blows

    def rage(self, blows: int, over: Callable[[], bool]) -> None:
        """Deal ``blows`` blows, about one in two seconds, each undone a while later."""
        names = [
            *("kill orchestrator", "freeze orchestrator", "kill at a point"),
            *("kill node", "kill child", "freeze node", "cut", "silence", "leave", "lose disk"),
        ]
        plan = [self.random.choice(names) for _ in range(blows)]
        # What can fool a grid without its protections is always among them.
        plan[:3] = ["kill at a point", "freeze node", "kill orchestrator"]
        for blow in plan:
            if over():
                break
            self._wait(self.random.uniform(1.0, 3.0))
            self.blows[blow] += 1
            getattr(self, f"_{blow.replace(' ', '_')}")()
        while self._undoing:
            self._wait(0.2)

    def _wait(self, seconds: float) -> None:
        """Let time pass, and undo what is due."""
        self._undoing.wait(seconds, self._look_after_orchestrator, 0.05)

    def _look_after_orchestrator(self) -> None:
        """Start it again when it has died, as whoever runs a service does."""
        if self.orchestrator is not None and self.orchestrator.poll() is not None:
            if self.orchestrator.returncode != -signal.SIGKILL:
                raise OrchestratorEnded(f"the orchestrator ended: {self.orchestrator.returncode}")
            self._reap(self.orchestrator)
            self.start()

    def _kill_orchestrator(self) -> None:
        assert self.orchestrator is not None
        self.orchestrator.kill()
        self.orchestrator.wait(60)

    def _kill_at_a_point(self) -> None:
        self._kill_orchestrator()
        assert self.orchestrator is not None
        self._reap(self.orchestrator)
        point = self.random.choice(POINTS) if self.blows["kill at a point"] > 1 else POINTS[0]
        self.start("--kill", point)

    def _freeze_orchestrator(self) -> None:
        assert self.orchestrator is not None
        frozen = self.orchestrator
        frozen.send_signal(signal.SIGSTOP)
        self._undoing.later(1.0, 6.0, lambda: _send(frozen, signal.SIGCONT))

    def _some_node(self) -> int:
        return self.random.randrange(NODES)

    def _kill_node(self, *, lose_disk: bool = False) -> None:
        index = self._some_node()
        _send(self.nodes[index], signal.SIGKILL)
        self._reap(self.nodes[index])
        if lose_disk:
            shutil.rmtree(self._state_of(index))
            self.generation[index] += 1
        self._undoing.later(0.5, 3.0, lambda: self._restart(index))

    def _lose_disk(self) -> None:
        self._kill_node(lose_disk=True)

    def _leave(self) -> None:
        index = self._some_node()
        _send(self.nodes[index], signal.SIGCONT)
        _send(self.nodes[index], signal.SIGTERM)
        self._undoing.later(1.0, 3.0, lambda: self._restart(index))

    def _restart(self, index: int) -> None:
        try:
            self.nodes[index].wait(0.1)
        except subprocess.TimeoutExpired:  # it still leaves
            self._undoing.later(0.5, 1.0, lambda: self._restart(index))
            return
        if self.nodes[index].stdout is not None:
            self.nodes[index].stdout.close()  # type: ignore[union-attr]  # just checked
        self.nodes[index] = self._node(index)

    def _kill_child(self) -> None:
        for child in descendants(self.nodes[self._some_node()].pid):
            child.kill()

    def _freeze_node(self) -> None:
        node = self.nodes[self._some_node()]
        frozen = [node.pid, *(c.pid for c in descendants(node.pid))]
        for pid in frozen:
            _send_pid(node, pid, signal.SIGSTOP)
        # Longer than a lease lives: somebody else has its task by then.
        self._undoing.later(5.0, 8.0, lambda: _thaw(node, frozen))

    def _cut(self) -> None:
        self._bad_wire("cut")

    def _silence(self) -> None:
        self._bad_wire("freeze")

    def _bad_wire(self, how: str) -> None:
        index = self._some_node()
        self.wires.do(index, how)
        self._undoing.later(1.0, 7.0, lambda: self.wires.do(index, "heal"))

    def end(self) -> list[str]:
        """End everything, the nodes first: they may have something to report; what had to be
        killed."""
        for node in self.nodes:
            _send(node, signal.SIGCONT)
            _send(node, signal.SIGTERM)
        for node in self.nodes:
            with suppress(subprocess.TimeoutExpired):
                node.wait(30)
        stubborn = self.stop()
        self.wires.close()
        return stubborn

    # -------------------------------------------------------------- the job

    def run(self, blows: int) -> Verdict:
        """A whole job under ``blows`` blows, and what is wrong with its records afterwards."""
        began = time.monotonic()
        job = self.create()
        self.reach(job, 1)
        self.rage(blows, lambda: self._ended(job) is not None)
        return self.finish(job, began)

    def create(self, rounds: int = ROUNDS) -> str:
        """A job, accepted; its id."""
        job: str = self.json(
            *("job", "create", "storm", str(rounds * INNER_STEPS)),
            *("--inner-steps", str(INNER_STEPS), "--batch", "4", "--seq-len", "32"),
            *("--preset", "fast"),
        )["id"]
        self.cli("job", "accept", job)
        return job

    def reach(self, job: str, version: int) -> None:
        """Wait for a version."""
        wait_for(
            f"version {version}",
            lambda: (found := self.record(job)) is not None and found.version >= version,
        )

    def finish(self, job: str, began: float = 0.0) -> Verdict:
        """Wait for the job's end and audit it."""
        done = wait_for("the job ends", lambda: self._ended(job), PATIENCE_S)
        problems = [] if done.state == "completed" else [f"{done.state}: {done.reason}"]
        problems += audit(self.state, job).problems
        losses = {h.version: h.loss for h in done.held_out if h.loss is not None}
        spent = time.monotonic() - began
        return Verdict(problems, self.blows, losses, spent, done.version)

    def record(self, job: str) -> answers.JobRecord | None:
        """The job, or nothing while the orchestrator does not answer."""
        try:
            return self.look(lambda client: client.job(job))
        except Unavailable:
            return None

    def _ended(self, job: str) -> answers.JobRecord | None:
        self._look_after_orchestrator()
        found = self.record(job)
        over = found is not None and found.state in ("completed", "failed", "cancelled")
        return found if over else None


def _send(process: subprocess.Popen[str], what: signal.Signals) -> None:
    """Signal a process of ours that may be gone."""
    if process.poll() is None:
        process.send_signal(what)


def _send_pid(node: subprocess.Popen[str], pid: int, what: signal.Signals) -> None:
    """Signal a node or its child, as long as the node is the one that we started."""
    living = [node.pid, *(c.pid for c in descendants(node.pid))] if node.poll() is None else []
    if pid in living:
        os.kill(pid, what)


def _thaw(node: subprocess.Popen[str], frozen: list[int]) -> None:
    for pid in frozen:
        _send_pid(node, pid, signal.SIGCONT)
