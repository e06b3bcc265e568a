"""Jobs, tasks, rounds and nodes under everything that people, machines and crashes do, in any
order: no reachable state breaks an invariant.

``DISTRIBAI_MACHINE_EXAMPLES`` and ``DISTRIBAI_MACHINE_STEPS`` ask for more than the suite has time
for (``make chaos``).
"""

from __future__ import annotations

import asyncio
import os
import random
import shutil
import tempfile
from collections.abc import Coroutine
from dataclasses import replace
from pathlib import Path
from typing import Any, TypeVar

from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from distribai.core.ranges import SampleRange
from distribai.core.spec import RoundSpec
from distribai.core.states import JOB, STANDING, JobState, Standing
from distribai.core.tasks import Outcome
from distribai.errors import Conflict
from distribai.orchestrator.context import Grid
from distribai.orchestrator.duties import Duties
from distribai.orchestrator.fleet import standing, tokens
from distribai.orchestrator.fleet.liveness import after_start
from distribai.orchestrator.fleet.queries import node_state
from distribai.orchestrator.fleet.standing import ORDERS
from distribai.orchestrator.fleet.tokens import BARRED
from distribai.orchestrator.jobs import commands, queries
from distribai.orchestrator.jobs.retry import retry_job
from distribai.sections import OrchestratorSettings
from distribai.testing.simulation.loop import VirtualLoop
from distribai.testing.simulation.stores import InlineDatabase, PacedBlobs
from tests.orchestrator.harness import LIVENESS, FakeNode, World, breathe
from tests.orchestrator.invariants import check_all, read_all

T = TypeVar("T")

EXAMPLES = int(os.environ.get("DISTRIBAI_MACHINE_EXAMPLES", "10"))
STEPS = int(os.environ.get("DISTRIBAI_MACHINE_STEPS", "25"))
NODES = 4
JOBS = 2

COMMANDS = {
    "accept": (JobState.QUEUED, lambda g, j: commands.accept_job(g, j, "tester")),
    "decline": (JobState.DECLINED, lambda g, j: commands.decline_job(g, j, "no", "tester")),
    "pause": (JobState.PAUSED, lambda g, j: commands.pause_job(g, j, "tester")),
    "resume": (JobState.RUNNING, lambda g, j: commands.resume_job(g, j, "tester")),
    "cancel": (JobState.CANCELLED, lambda g, j: commands.cancel_job(g, j, "", "tester")),
}


class QuickWorld(World):
    """A world whose database has no threads."""

    async def open(self) -> QuickWorld:
        rng = random.Random(self.seed)
        path = self.root / "grid.sqlite3"
        made = InlineDatabase(path, self.time) if path.exists() else None
        db = made or await InlineDatabase.create(path, self.time)
        blobs = PacedBlobs.open(self.root / "blobs", self.root / "staging", max_bytes=1 << 24)
        self.grid = Grid(
            db=db,
            blobs=blobs,
            settings=OrchestratorSettings(state_dir=self.root, merge_threads=1, liveness=LIVENESS),
            clock=self.time,
            entropy=rng.randbytes,
            grid_id="grid_test",
            holder=f"holder{self.seed}",
        )
        self.invite = await tokens.ensure_invite(db, self.root, rng.randbytes)
        self.duties = Duties(self.grid)
        return self


class GridMachine(RuleBasedStateMachine):
    """One grid; each rule is one thing that happens to it."""

    def __init__(self) -> None:
        super().__init__()
        self._runner = asyncio.Runner(loop_factory=VirtualLoop)
        self._root = Path(tempfile.mkdtemp(prefix="machine-"))
        self.world: QuickWorld = self.run(QuickWorld(self._root, "unused").open())
        self.nodes: list[FakeNode] = []
        self.connected: set[int] = set()
        self.jobs: list[str] = []
        self.past: list[tuple[FakeNode, Outcome]] = []
        self.starts = 0

    def run(self, work: Coroutine[Any, Any, T]) -> T:
        """Run something on the grid's loop."""
        return self._runner.run(work)

    def teardown(self) -> None:
        """End everything; hypothesis calls this after each example."""
        try:
            self.run(self._close())
        finally:
            self._runner.close()
            shutil.rmtree(self._root)

    async def _close(self) -> None:
        for node in self.nodes:
            await node.vanish()
        await self.world.grid.db.close()

    # ------------------------------------------------------------ people

    @initialize()
    def begin(self) -> None:
        """A grid with a node and a job."""
        self.submit(workers_min=1, quorum=0.5, attempts=3, staleness=1)
        self.command("accept", 0)
        self.join()

    @precondition(lambda self: len(self.jobs) < JOBS)
    @rule(
        workers_min=st.integers(1, 2),
        quorum=st.sampled_from([0.3, 0.5, 1.0]),
        attempts=st.integers(1, 3),
        staleness=st.sampled_from([0, 1, 1, 2]),
    )
    def submit(self, workers_min: int, quorum: float, attempts: int, staleness: int) -> None:
        """Somebody submits a job of two or three rounds."""

        async def work() -> str:
            spec = await self.world.spec(
                name=f"job-{len(self.jobs)}",
                workers_min=workers_min,
                max_attempts=attempts,
                rounds=RoundSpec(
                    inner_steps=2,
                    quorum=quorum,
                    grace_min=2.0,
                    grace_max=20.0,
                    staleness=staleness,
                ),
            )
            return await commands.create_job(self.world.grid, spec, None, "tester")

        self.jobs.append(self.run(work()))

    @rule(what=st.sampled_from([*COMMANDS, "pause", "resume"]), number=st.integers(0, JOBS - 1))
    def command(self, what: str, number: int) -> None:
        """Somebody decides about a job: refused exactly where the table refuses it."""
        if number >= len(self.jobs):
            return
        new, call = COMMANDS[what]
        before = JobState(self.run(queries.show_job(self.world.grid, self.jobs[number])).state)
        done = before is new or (what == "accept" and before in ACCEPTED)
        allowed = done or new in JOB[before]
        if what == "resume":
            allowed = before in (JobState.PAUSED, JobState.RUNNING)
        try:
            self.run(call(self.world.grid, self.jobs[number]))
        except Conflict:
            assert not allowed, f"{what} was refused for a job that is {before}"
        else:
            assert allowed, f"{what} was allowed for a job that is {before}"

    @precondition(lambda self: len(self.jobs) < JOBS)
    @rule()
    def retry(self) -> None:
        """Somebody tries the first job again: allowed exactly when it failed or was cancelled."""
        job = self.run(queries.show_job(self.world.grid, self.jobs[0]))
        allowed = job.state in ("failed", "cancelled") and job.version < job.rounds_total
        try:
            again = self.run(retry_job(self.world.grid, job.id, None, "tester"))
        except Conflict:
            assert not allowed, f"a {job.state} job at version {job.version} was not retried"
        else:
            assert allowed
            self.jobs.append(again)

    # ------------------------------------------------------------ nodes

    @rule(number=st.integers(0, NODES - 1), verb=st.sampled_from([*ORDERS, "resume"]))
    def order(self, number: int, verb: str) -> None:
        """The operator tells a node to pause, to go on, or to leave; it obeys when it hears it."""
        if number >= len(self.nodes):
            return
        node = self.nodes[number]
        state = self.run(node_state(self.world.grid, node.id))
        try:
            self.run(standing.order(self.world.grid, node.id, verb, "tester"))
        except Conflict:
            assert (verb, state.liveness) == ("drain", "offline")

    @rule(
        number=st.integers(0, NODES - 1),
        verb=st.sampled_from([*standing.VERBS, "pardon", "trust", "pardon"]),
    )
    def stand(self, number: int, verb: str) -> None:
        """The operator changes a node's standing: refused exactly where the table refuses it."""
        if number >= len(self.nodes):
            return
        node, new = self.nodes[number], standing.VERBS[verb]
        before = Standing(self.run(node_state(self.world.grid, node.id)).standing)
        try:
            self.run(standing.set_standing(self.world.grid, node.id, verb, "so", "tester"))
        except Conflict:
            assert new is not before
            assert new not in STANDING[before]
            return
        assert new is before or new in STANDING[before]
        if new.value in BARRED and number in self.connected:
            self.run(breathe())
            assert node.end is not None
            self.connected.discard(number)

    @precondition(lambda self: len(self.nodes) < NODES)
    @rule()
    def join(self) -> None:
        """A new node comes."""
        node = self.run(self.world.node(f"node-{len(self.nodes)}"))
        self.connected.add(len(self.nodes))
        self.nodes.append(node)

    @rule(number=st.integers(0, NODES - 1))
    def vanish(self, number: int) -> None:
        """A node's connection breaks."""
        if number in self.connected:
            self.run(self.nodes[number].vanish())
            self.connected.discard(number)

    @rule(number=st.integers(0, NODES - 1), memory=st.sampled_from(["all", "tasks", "none"]))
    def come_back(self, number: int, memory: str) -> None:
        """A node connects again: with its session, as a restarted daemon with its tasks, or with
        nothing but its key."""
        if number >= len(self.nodes) or number in self.connected:
            return
        node = self.nodes[number]
        if memory != "all":
            node.session = ""
            node.channel = type(node.channel)()
        if memory == "none":
            node.tasks.clear()
        node.intent = "contribute"
        barred = self.run(node_state(self.world.grid, node.id)).standing in BARRED
        self.run(node.connect())
        assert (node.end is not None) is barred
        if not barred:
            self.connected.add(number)

    @rule(number=st.integers(0, NODES - 1))
    def leave(self, number: int) -> None:
        """A node drops what it has, says so, and goes."""
        if number in self.connected:
            node = self.nodes[number]
            node.tasks.clear()
            self.run(node.heartbeat(intent="drain"))
            self.run(node.leave())
            self.connected.discard(number)

    @rule(number=st.integers(0, NODES - 1))
    def fence(self, number: int) -> None:
        """A second daemon with a node's key appears: the older one is told to go."""
        if number not in self.connected:
            return
        old = self.nodes[number]
        # One that was silent for too long has been hung up on already, without a word.
        known = self.world.grid.fleet.of(old.id) is not None
        self.nodes[number] = self.run(self.world.node(old.name, key=old.key))
        assert (old.end is not None) is known
        assert old.end is None or old.end.code == "node.fenced"

    # ------------------------------------------------------------ work

    @rule(number=st.integers(0, NODES - 1), how=st.sampled_from(["whole", "whole", "partial"]))
    def report(self, number: int, how: str) -> None:
        """A node hands in what it has in hand, whatever the grid thinks of it by now."""
        if number not in self.connected:
            return
        node = self.nodes[number]
        for task in list(node.tasks.values()):
            steps = 1 if how == "partial" and task.phase == "train" else None
            outcome = self.run(node.outcome(task, steps=steps))
            self.past.append((node, outcome))
            self.run(node.report(outcome))

    @rule(
        number=st.integers(0, NODES - 1),
        how=st.sampled_from(["failed", "no delta", "others' samples", "another base"]),
    )
    def spoil(self, number: int, how: str) -> None:
        """A node fails, or lies about a task."""
        training = [t for t in self._in_hand(number) if t.phase == "train"]
        if not training:
            return
        node, task = self.nodes[number], training[0]
        if how == "failed":
            self.run(node.fail(task, "node.child", "bad luck"))
            node.tasks.pop(task.task_id, None)
            return
        honest = self.run(node.outcome(task))
        moved = tuple(SampleRange(r.start + 1, r.stop + 1) for r in honest.samples)
        spoiled = {
            "no delta": replace(honest, delta=None),
            "others' samples": replace(honest, samples=moved),
            "another base": replace(honest, base_hash="0" * 64),
        }[how]
        self.past.append((node, spoiled))
        self.run(node.report(spoiled))

    @precondition(lambda self: self.past)
    @rule(which=st.integers(0, 100), number=st.integers(0, NODES - 1))
    def repeat(self, which: int, number: int) -> None:
        """An old result comes again, from its own node or another."""
        if number in self.connected:
            _, outcome = self.past[which % len(self.past)]
            self.run(self.nodes[number].report(outcome))

    @rule(number=st.integers(0, NODES - 1), other=st.integers(0, NODES - 1))
    def pose(self, number: int, other: int) -> None:
        """A node reports what another has in hand."""
        if number in self.connected and number != other:
            for task in self._in_hand(other)[:1]:
                outcome = self.run(self.nodes[other].outcome(task))
                self.run(self.nodes[number].report(outcome))
                assert self.nodes[number].acks[-1].code == "task.not_held"

    @rule(number=st.integers(0, NODES - 1))
    def drop(self, number: int) -> None:
        """A node heeds what it was told to stop."""
        if number in self.connected:
            for task_id in self.nodes[number].stopped:
                self.nodes[number].tasks.pop(task_id, None)

    def _in_hand(self, number: int) -> list[Any]:
        if number not in self.connected:
            return []
        return list(self.nodes[number].tasks.values())

    # ------------------------------------------------------------ time and duties

    @rule(seconds=st.sampled_from([1.0, 5.0, 25.0, 60.0]), beating=st.booleans())
    def time_passes(self, seconds: float, beating: bool) -> None:
        """Time passes; the connected nodes are heard meanwhile, or are not."""
        self.world.time.now += seconds
        if beating:
            for number in sorted(self.connected):
                self.run(self.nodes[number].heartbeat())

    @rule(duty=st.sampled_from(["control", "verify", "merge"]))
    def look(self, duty: str) -> None:
        """One duty looks once."""
        self.run(getattr(self.world.duties, duty)())
        self.run(asyncio.sleep(0.001))

    @rule()
    def settle(self) -> None:
        """All duties run until none has anything to do."""
        self.run(self.world.settle())

    @rule()
    def restart(self) -> None:
        """The orchestrator dies between two transactions, and another one starts."""
        self.run(self._restart())

    async def _restart(self) -> None:
        await self._close()
        self.connected.clear()
        self.starts += 1
        world = QuickWorld(self._root, "unused", self.world.time, self.starts)
        self.world = await world.open()
        await after_start(world.grid)
        for node in self.nodes:
            node.world = world

    # ------------------------------------------------------------ what must hold

    @invariant()
    def everything_holds(self) -> None:
        """Every invariant, after every rule."""
        self.run(self._check())

    async def _check(self) -> None:
        async with self.world.grid.db.read() as tx:
            rows = await read_all(tx)
        check_all(rows)


ACCEPTED = (JobState.QUEUED, JobState.RUNNING, JobState.PAUSED)

TestGridMachine = GridMachine.TestCase
TestGridMachine.settings = settings(
    max_examples=EXAMPLES,
    stateful_step_count=STEPS,
    deadline=None,
    suppress_health_check=list(HealthCheck),
)
