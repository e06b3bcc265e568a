"""One small job on a real orchestrator that is killed at one point and started again.

The two nodes run in this process, with the torch-free child, and are never restarted. Their keys,
the job's seed and its rounds are fixed, every round waits for both, and the pretended training is
deterministic: whatever dies, all versions must come out with the bits of an undisturbed run.
"""

from __future__ import annotations

import asyncio
import json
import random
import shutil
import signal
import sqlite3
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal, TypeVar

from distribai.client import AsyncClient, Client, calls
from distribai.core.spec import DataSpec, JobSpec, ModelSpec, RoundSpec
from distribai.errors import DistribAIError, Unavailable
from distribai.node import identity
from distribai.node.daemon import Daemon
from distribai.sections import NodeSettings
from distribai.testing import child, faults
from distribai.testing.audit import audit
from distribai.testing.faults import Hit
from tests.e2e.harness import clean_environment

T = TypeVar("T")

CAP_S = 600.0
"""How long a scenario may take on a busy machine."""

ROUNDS = 3
NODES = 2

PATIENT = {
    "DISTRIBAI_LIVENESS_HEARTBEAT_S": "0.5",
    "DISTRIBAI_LIVENESS_TICK_S": "0.5",
    "DISTRIBAI_ORCHESTRATOR_MERGE_THREADS": "1",
}
"""Quick to look for work, but with the usual patience: nothing may hang on a lease that runs out,
for that would cost the job half a minute, and its bits."""

When = Literal["first start", "restart"]
"""In which process the fault is: the grid's first one, or one that starts on a running job."""


@dataclass(frozen=True, slots=True)
class Case:
    """Where the orchestrator dies; ``hit`` None: nowhere."""

    when: When
    hit: Hit | None = None

    def __str__(self) -> str:
        return f"{self.when}, {self.hit}"


@dataclass
class Result:
    """What came of a case. ``weights`` are the hashes of all versions."""

    case: Case
    killed: bool
    seconds: float
    problems: list[str] = field(default_factory=list)
    weights: list[str] = field(default_factory=list)


class Hasty(random.Random):
    """Chance that waits a short time only, before it tries again; not so short that a transfer has
    used up its tries, and its attempt failed, before a busy machine has started the next process.
    """

    def uniform(self, a: float, b: float) -> float:
        return min(super().uniform(a, b), 0.5)


class Grid:
    """An orchestrator that somebody starts again whenever it dies, and its nodes."""

    def __init__(self, root: Path, keys: Path) -> None:
        root.mkdir(parents=True)
        self.root = root
        self.keys = keys
        self.record = root / "points.txt"
        self.ready: dict[str, Any] = {}
        self.token = ""
        self.serving = asyncio.Event()
        self.killed = 0
        self.problems: list[str] = []
        self._stopping = False
        self._joined = False
        self._orchestrator: asyncio.subprocess.Process | None = None
        self._daemons: list[Daemon] = []
        self._nodes: list[asyncio.Task[None]] = []

    @property
    def state(self) -> Path:
        return self.root / "home" / "state" / "orchestrator"

    async def start(self, *options: str) -> None:
        """Start the orchestrator and wait until it serves or is dead."""
        ports = [self.ready.get(name, ":0").rsplit(":", 1)[1] for name in ("grpc", "http")]
        arguments = ["orchestrator", "start", "--json"]
        arguments += ["--grpc-port", ports[0], "--http-port", ports[1]]
        with (self.root / "orchestrator.log").open("a") as log:
            self._orchestrator = await asyncio.create_subprocess_exec(
                *faults.command(*options, arguments=arguments),
                stdin=asyncio.subprocess.DEVNULL,
                stdout=asyncio.subprocess.PIPE,
                stderr=log,
                env={**clean_environment(), **PATIENT, "DISTRIBAI_HOME": str(self.root / "home")},
                cwd=self.root,
            )
        assert self._orchestrator.stdout is not None
        line = await self._orchestrator.stdout.readline()
        if not line:
            return
        self.ready = json.loads(line)
        self.token = self.ready["operator_token"] or self.token
        self.serving.set()
        if not self._joined:
            self._joined = True
            self._start_nodes()

    async def keep_alive(self) -> None:
        """Start it again, without a fault, whenever it has been killed, until it ends in order."""
        while True:
            assert self._orchestrator is not None
            status = await self._orchestrator.wait()
            self.serving.clear()
            if status == -signal.SIGKILL:
                self.killed += 1
                await self.start()
                if self._stopping:
                    self._terminate()
                continue
            if status != 0 or not self._stopping:
                self.problems.append(f"the orchestrator ended with status {status}")
            return

    async def kill(self) -> None:
        """From outside, at any moment."""
        assert self._orchestrator is not None
        self._orchestrator.kill()
        await self._orchestrator.wait()
        self.serving.clear()

    async def leave(self) -> None:
        """Let the nodes leave in order."""
        if not self._nodes:
            return
        for daemon in self._daemons:
            daemon.finish(partial=True)
        _, late = await asyncio.wait(self._nodes, timeout=180.0)
        for node in late:
            self.problems.append("a node did not leave")
            node.cancel()
        for node in self._nodes:
            if node.done() and not node.cancelled() and node.exception() is not None:
                self.problems.append(f"a node ended: {node.exception()!r}")
        await asyncio.gather(*self._nodes, return_exceptions=True)
        self._nodes.clear()
        self._daemons.clear()

    async def stop(self) -> None:
        """Tell the orchestrator to end in order, once it serves."""
        await self.serving.wait()
        self._stopping = True
        self._terminate()

    def _terminate(self) -> None:
        assert self._orchestrator is not None
        if self._orchestrator.returncode is None:
            self._orchestrator.terminate()

    def clear_away(self) -> None:
        """Whatever went wrong, nothing stays."""
        if self._orchestrator is not None and self._orchestrator.returncode is None:
            self._orchestrator.kill()

    def _start_nodes(self) -> None:
        for number in range(NODES):
            state = self.root / f"node{number}"
            shutil.copytree(self.keys / f"node{number}", state)
            settings = NodeSettings(
                state_dir=state,
                join=self.ready["join_link"],
                name=f"node{number}",
                device="cpu",
                threads=1,
                progress_s=0.0,
                benchmark=False,
            )
            daemon = Daemon(settings, rng=Hasty(number), command=child.command())
            self._daemons.append(daemon)
            self._nodes.append(asyncio.create_task(daemon.run()))

    # ------------------------------------------------------------------ the operator

    async def create_job(self, key: str) -> str:
        """Upload the data, submit and accept a job: all of it again, with the same idempotency
        key, until it was answered."""
        text = self.root / "text.txt"
        text.write_text("".join(f"line {i} of the text\n" for i in range(200)))

        def attempt() -> str:
            with Client(self.ready["url"], self.token) as client:
                data = DataSpec(source="blobs", files=(client.upload(text),), held_out=0.1)
                job = client.create_job(_spec(data), key)
                # Asked for again, after a restart, it may have run to its end already.
                if client.job(job.id).state == "submitted":
                    client.accept(job.id)
                return job.id

        return await self._until_answered(lambda: asyncio.to_thread(attempt))

    async def job(self, job_id: str) -> Any:
        return await self._until_answered(lambda: self._send(calls.job(job_id)))

    async def _send(self, call: calls.Call[T]) -> T:
        async with AsyncClient(self.ready["url"], self.token) as client:
            return await client.send(call)

    async def until(self, job_id: str, wanted: Callable[[Any], bool]) -> None:
        """Wait until the job is as ``wanted``."""
        while True:
            job = await self.job(job_id)
            if wanted(job):
                return
            if any(node.done() for node in self._nodes):
                raise AssertionError("a node has ended while it had work")
            if job.state not in ("queued", "running"):
                raise AssertionError(f"the job is {job.state}: {job.reason}")
            await asyncio.sleep(0.25)

    async def _until_answered(self, ask: Callable[[], Awaitable[T]]) -> T:
        while True:
            await self.serving.wait()
            try:
                return await ask()
            except Unavailable as problem:
                if problem.code != "grid.unreachable":
                    raise
                await asyncio.sleep(0.05)


def _spec(data: DataSpec) -> JobSpec:
    return JobSpec(
        name="chaos",
        model=ModelSpec("decoder_transformer", {"dim": 8, "layers": 1, "heads": 2, "ffn_dim": 8}),
        data=data,
        steps=2 * ROUNDS,
        batch=2,
        seq_len=8,
        workers_min=NODES,
        workers_max=NODES,
        # Both ways have something to keep: what is merged depends on all rounds before.
        rounds=RoundSpec(
            inner_steps=2,
            min_inner_steps=1.0,
            quorum=1.0,
            grace_max=100.0,
            codec_up="int4",
            codec_down="int4",
        ),
    )


def make_keys(directory: Path) -> Path:
    """State directories with the keys of the nodes, to be copied."""
    for number in range(NODES):
        (directory / f"node{number}").mkdir(parents=True)
        identity.load_or_create(directory / f"node{number}")
    return directory


async def play(root: Path, keys: Path, case: Case) -> Result:
    """Run one case from an empty directory to the audit of its completed job."""
    began = time.monotonic()
    grid = Grid(root, keys)
    job_id = ""
    try:
        async with asyncio.timeout(CAP_S):
            job_id = await _to_the_end(grid, case)
    except TimeoutError:
        grid.problems.append(f"it took more than {CAP_S} s")
    except (AssertionError, DistribAIError) as problem:
        grid.problems.append(str(problem))
    finally:
        grid.clear_away()
        await grid.leave()
    result = Result(case, grid.killed > 0, time.monotonic() - began, grid.problems)
    if not result.problems:
        found = audit(grid.state, job_id)
        result.problems += found.problems
        result.weights = weights_of(grid.state, job_id)
        if len(result.weights) != ROUNDS + 1:
            result.problems.append(f"there are {len(result.weights)} versions")
        if found.submissions != ROUNDS * NODES:
            result.problems.append(f"{found.submissions} submissions were accepted")
    return result


async def _to_the_end(grid: Grid, case: Case) -> str:
    """Run the job, and let the nodes leave; its id."""
    options = ["--record", str(grid.record)]
    if case.hit is not None:
        options += ["--kill", str(case.hit)]
    job_id = ""
    if case.when == "first start":
        await grid.start(*options)
    else:
        await grid.start()
        job_id = await grid.create_job(grid.root.name)
        await grid.until(job_id, lambda job: job.version >= 1)
        await grid.kill()
        await grid.start(*options)
    async with _kept_alive(grid):
        job_id = await grid.create_job(grid.root.name)
        await grid.until(job_id, lambda job: job.state == "completed")
        await grid.leave()
        await grid.stop()
    return job_id


async def play_all(
    root: Path,
    keys: Path,
    cases: Sequence[Case],
    calm: Sequence[str],
    tell: Callable[[Result], None],
    at_once: int = 2,
) -> list[Result]:
    """All cases, some at once, each told of when it is over.

    One whose point was not reached so often is tried again at the first time. ``calm`` are the
    hashes of all versions of an undisturbed run.
    """
    places = asyncio.Semaphore(at_once)

    async def one(number: int, case: Case) -> Result:
        async with places:
            result = await play(root / f"{number}", keys, case)
            if case.hit is not None and not result.killed and not result.problems:
                first = Case(case.when, Hit(case.hit.point, 1))
                result = await play(root / f"{number}-first", keys, first)
            if not result.killed:
                result.problems.append("the point was never reached")
            elif not result.problems and result.weights != calm:
                result.problems.append("the weights are other ones than undisturbed")
            if not result.problems:
                shutil.rmtree(root / f"{number}")
            tell(result)
            return result

    return await asyncio.gather(*(one(i, case) for i, case in enumerate(cases)))


@asynccontextmanager
async def _kept_alive(grid: Grid) -> AsyncIterator[None]:
    """Somebody starts the orchestrator again while the block runs, and until it ends in order; one
    that ends otherwise ends the block."""
    keeper = asyncio.create_task(grid.keep_alive())
    body = asyncio.current_task()
    assert body is not None
    over = False

    def on_end(_task: asyncio.Task[None]) -> None:
        if not over:
            body.cancel()

    keeper.add_done_callback(on_end)
    try:
        yield
        over = True
        await keeper
    except asyncio.CancelledError:
        if over or not keeper.done():
            raise
        body.uncancel()
        raise AssertionError("the orchestrator is gone") from None
    finally:
        over = True
        keeper.cancel()
        await asyncio.wait({keeper})


def weights_of(state: Path, job_id: str) -> list[str]:
    """The hashes of all versions, from 0."""
    db = sqlite3.connect(state / "grid.sqlite3")
    try:
        query = "select weights_hash || outer_hash from versions where job_id = ? order by version"
        return [row[0] for row in db.execute(query, (job_id,))]
    finally:
        db.close()
