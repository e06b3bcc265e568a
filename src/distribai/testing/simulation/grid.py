"""A whole grid in one process and in virtual time: production orchestrator, virtual nodes."""

from __future__ import annotations

import asyncio
import os
import random
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from structlog.testing import capture_logs

from distribai.core.spec import DataSpec, JobSpec, ModelSpec, RoundSpec
from distribai.core.states import JOB, JobState, RoundState, is_terminal
from distribai.orchestrator.context import Grid, Wake
from distribai.orchestrator.duties import Duties
from distribai.orchestrator.fleet import tokens
from distribai.orchestrator.jobs import commands
from distribai.sections import LivenessSettings, OrchestratorSettings
from distribai.store.engine import AnyRow
from distribai.store.statements import jobs, submissions, work
from distribai.testing.simulation import loop as virtual
from distribai.testing.simulation.events import Event, read_events
from distribai.testing.simulation.machines import Machine, capacity, ceiling
from distribai.testing.simulation.node import VirtualNode
from distribai.testing.simulation.site import Payload, Site
from distribai.testing.simulation.stores import InlineDatabase, PacedBlobs
from distribai.testing.simulation.work import Workshop

MICRO = {"dim": 8, "layers": 1, "heads": 2, "ffn_dim": 8}
"""A model so small that merging it costs nothing, and real enough to be merged."""

GATHER_S = 5.0
"""Seconds that machines have to join before the job begins."""


@dataclass(frozen=True, slots=True)
class Scenario:
    """What is simulated.

    Args:
        machines: who takes part.
        rounds: the job's round settings; ``inner_steps`` are the H of the simulated job.
        count: rounds of the job.
        seed: of everything that is drawn during the run.
        liveness: the orchestrator's patience.
        payload: bytes that a real model would move.
        reaction_s: seconds between a hint and the duties' next look: their own duration.
        read_s: seconds in which the orchestrator reads and hashes one delta or one version.
        write_s: seconds in which it writes one.
        obedient: whether nodes heed ``finish``.
        workers_min: of the job; the round is abandoned below it.
        workers_max: of the job.
        horizon_s: virtual seconds after which the simulation ends in any case.
    """

    machines: tuple[Machine, ...]
    rounds: RoundSpec = field(default_factory=RoundSpec)
    count: int = 10
    seed: int = 0
    liveness: LivenessSettings = field(default_factory=LivenessSettings)
    payload: Payload = field(default_factory=Payload)
    reaction_s: float = 0.1
    read_s: float = 0.02
    write_s: float = 0.1
    obedient: bool = True
    workers_min: int = 1
    workers_max: int = 10_000
    horizon_s: float = 1e6


@dataclass(frozen=True, slots=True)
class Outcome:
    """What came of it. Seconds count from the moment at which the first machines join.

    ``boundaries``: when each round began, and the last one ended. ``tokens`` were merged, ``late``
    of them into a later round than the one that they were trained for, ``possible`` could have been
    if every machine had done nothing but train while it lived; ``computed`` were, whether or not
    they counted. ``spent`` seconds of all machines by activity. ``events`` are the grid's outbox.
    """

    state: str
    reason: str
    version: int
    boundaries: tuple[float, ...]
    tokens: int
    late: int
    computed: float
    possible: float
    ceiling: float
    spent: Mapping[str, float]
    seconds: float
    events: tuple[Event, ...] = field(repr=False, default=())

    @property
    def goodput(self) -> float:
        """Tokens merged over tokens that the living nodes could have computed in that time."""
        return self.tokens / self.possible if self.possible else 0.0


def simulate(scenario: Scenario, root: Path | None = None) -> Outcome:
    """Run a scenario; the same one gives the same outcome, event by event.

    What the orchestrator would log goes nowhere: its times are not this machine's, and all that
    counts is in the outcome's events.

    Args:
        scenario: what to run.
        root: an empty directory that keeps the grid's state; without it nothing stays.

    Raises:
        distribai.testing.simulation.loop.Stuck: the grid waits for nothing: a defect.
        Exception: whatever a defect raised in orchestrator or nodes.
    """
    with capture_logs():
        if root is not None:
            return virtual.run(_simulate(scenario, root))
        # Memory if there is any: a simulated disk needs no real one.
        memory = "/dev/shm" if os.access("/dev/shm", os.W_OK) else None
        with tempfile.TemporaryDirectory(prefix="simulation-", dir=memory) as made:
            return virtual.run(_simulate(scenario, Path(made)))


class _PacedWake(Wake):
    """Hints that are heeded a moment later: looking takes time, and many hints become one."""

    def __init__(self, reaction_s: float) -> None:
        super().__init__()
        self._reaction_s = reaction_s

    async def wait(self, looked: int, timeout_s: float) -> None:
        """As the production hint, ``reaction_s`` later if there was one."""
        await super().wait(looked, timeout_s)
        if self.count != looked:
            await asyncio.sleep(self._reaction_s)


async def _simulate(scenario: Scenario, root: Path) -> Outcome:
    clock = asyncio.get_running_loop().time
    rng = random.Random(f"{scenario.seed}/grid")
    # Cleaning goes by the real clock of real files: it has no place in virtual time.
    settings = OrchestratorSettings(
        state_dir=root,
        merge_threads=1,
        orphans_s=0.0,
        let_go_s=0.0,
        liveness=scenario.liveness,
    )
    db = await InlineDatabase.create(root / "grid.sqlite3", clock)
    try:
        blobs = PacedBlobs.open(root / "blobs", root / "staging", max_bytes=1 << 24)
        assert isinstance(blobs, PacedBlobs)
        grid = Grid(
            db=db,
            blobs=blobs,
            settings=settings,
            clock=clock,
            entropy=rng.randbytes,
            grid_id="grid_simulated",
            wake=_PacedWake(scenario.reaction_s),
        )
        invite = await tokens.ensure_invite(db, root, rng.randbytes)
        job_id = await commands.create_job(grid, await _job(scenario, blobs), None, "simulation")
        blobs.read_s, blobs.write_s = scenario.read_s, scenario.write_s
        site = Site(
            grid=grid,
            invite=invite,
            workshop=Workshop(grid, blobs),
            payload=scenario.payload,
            origin=clock(),
            seed=scenario.seed,
            defect=asyncio.get_running_loop().create_future(),
            obedient=scenario.obedient,
        )
        await _run(scenario, site, job_id)
        return await _outcome(scenario, site, job_id)
    finally:
        await db.close()


async def _job(scenario: Scenario, blobs: PacedBlobs) -> JobSpec:
    text = "".join(f"line {i} of the text\n" for i in range(100)).encode()
    return JobSpec(
        name="simulated",
        model=ModelSpec("decoder_transformer", MICRO),
        data=DataSpec(source="blobs", files=(await blobs.put_bytes(text),), held_out=0.1),
        steps=scenario.count * scenario.rounds.inner_steps,
        batch=1,
        seq_len=8,
        workers_min=scenario.workers_min,
        workers_max=scenario.workers_max,
        rounds=scenario.rounds,
        seed=scenario.seed,
    )


async def _run(scenario: Scenario, site: Site, job_id: str) -> None:
    """Let the grid live until the job has ended or the horizon is reached."""
    duties = Duties(site.grid)
    duties.start()
    nodes = [VirtualNode(site, machine) for machine in scenario.machines]
    lives = [asyncio.create_task(node.live()) for node in nodes]
    ways_out = [
        asyncio.create_task(duties.watch()),
        asyncio.create_task(_until_over(site, job_id)),
        site.defect,
    ]
    try:
        await asyncio.wait(
            [*ways_out, asyncio.ensure_future(_first_defect(lives))],
            timeout=scenario.horizon_s,
            return_when=asyncio.FIRST_COMPLETED,
        )
        for way in [*ways_out, *lives]:
            if way.done():
                way.result()
    finally:
        for task in [*ways_out, *lives]:
            task.cancel()
        await asyncio.gather(*ways_out, *lives, return_exceptions=True)
        await duties.stop()


async def _first_defect(lives: Sequence[asyncio.Task[None]]) -> None:
    """Return when a node ends by a defect; never when all leave in peace."""
    await asyncio.wait(lives, return_when=asyncio.FIRST_EXCEPTION)
    if all(life.done() and life.exception() is None for life in lives):
        await asyncio.Event().wait()


async def _until_over(site: Site, job_id: str) -> None:
    await asyncio.sleep(GATHER_S)
    await commands.accept_job(site.grid, job_id, "simulation")
    while True:
        looked = site.grid.wake.count
        async with site.grid.db.read() as tx:
            job = await jobs.get(tx, job_id)
        assert job is not None
        # The last version's evaluation is not waited for: it measures nothing here.
        if job.version >= job.rounds_total or is_terminal(JOB, JobState(job.state)):
            return
        await Wake.wait(site.grid.wake, looked, 60.0)
        await asyncio.sleep(1.0)


async def _outcome(scenario: Scenario, site: Site, job_id: str) -> Outcome:
    async with site.grid.db.read() as tx:
        job = await jobs.get(tx, job_id)
        assert job is not None
        opened = await work.rounds_of(tx, job_id)
        versions = await jobs.all_versions(tx, job_id)
        numbers = [(r.number, r.take) for r in opened if r.state == RoundState.MERGED]
        merged = [
            s for n in numbers for s in await submissions.submissions_of_round(tx, job_id, *n)
        ]
    ends = [v.created_at - site.origin for v in versions[1:]]
    boundaries = ([opened[0].opened_at - site.origin] if ends else []) + ends
    machines = scenario.machines
    per_step = int(job.spec["batch"]) * int(job.spec["seq_len"])
    possible = capacity(machines, boundaries[0], boundaries[-1]) if ends else 0.0
    return Outcome(
        state=job.state,
        reason=job.reason,
        version=job.version,
        boundaries=tuple(boundaries),
        tokens=int(job.tokens),
        late=_late(merged),
        computed=site.steps_computed * per_step,
        possible=possible * per_step,
        ceiling=ceiling(machines, boundaries) if ends else 0.0,
        spent=dict(site.spent),
        seconds=asyncio.get_running_loop().time() - site.origin,
        events=tuple(await read_events(site.grid.db)),
    )


def _late(merged: Sequence[AnyRow]) -> int:
    return sum(int(s.tokens) for s in merged if s.base_version < s.round)
