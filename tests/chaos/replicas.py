"""Three replicas on PostgreSQL and S3 behind a load balancer, and everything that goes wrong there.

Replicas are killed, by signals and at points of their own code, and frozen beyond the lease of
their duties; PostgreSQL is restarted, the object store refuses; nodes bring things twice and out of
order (``tests.chaos.crowd``). Order and times come from a seed. Jobs go on all the while: when one
has ended, the next begins.
"""

from __future__ import annotations

import random
import signal
import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from distribai.testing.audit import audit
from tests.chaos.replicated import REPLICA_S, Replica, ReplicatedGrid
from tests.chaos.undoing import Undoing

JOBS = 2
"""Jobs at once."""

OWNERLESS_S = 45.0
"""How long a lease may be in nobody's hands on a busy machine: three times what the liveness above
needs to end one."""

BACK_S = 60.0
"""The longest that a node may be away, on its own clock."""

BREATH_S = 20.0
"""How long the next blow waits at most for two replicas that serve."""

PATIENCE_S = 300.0
"""How long everything may take from the last blow on before it counts as stuck."""

POINTS = (
    "commit.orchestrator.rounds.results.take_result.after",
    "commit.orchestrator.rounds.results.take_result.before",
    "commit.orchestrator.rounds.verifying._verify_work.after",
    "commit.orchestrator.rounds.merging._publish.before",
    "commit.orchestrator.rounds.merging._publish.after",
    "commit.orchestrator.rounds.scheduling.Scheduler.schedule.after",
    "commit.orchestrator.fleet.registration._enter.after",
    "blob.upload.s3.after",
    "merge.files.after",
)
"""Where a replica dies by itself when it was started with a fault."""


@dataclass
class Verdict:
    """What came of it. ``away`` are seconds that nodes were without a stream."""

    problems: list[str]
    blows: Counter[str]
    mischief: Counter[str]
    jobs: int = 0
    rounds: int = 0
    away: list[float] = field(default_factory=list)
    seconds: float = 0.0


class ReplicaEnded(AssertionError):
    """A replica ended by itself: of a defect."""


class Replicated(ReplicatedGrid):
    """The grid, and what happens to it. ``without`` are protections that it is robbed of."""

    def __init__(self, root: Path, seed: int, *, without: tuple[str, ...] = ()) -> None:
        super().__init__(root, without=without)
        self.random = random.Random(seed)
        self.blows: Counter[str] = Counter()
        self.problems: list[str] = []
        self.open: set[str] = set()
        self._undoing = Undoing(self.random)
        self._ownerless: dict[tuple[str, str, int], float] = {}
        self._looked_at = 0.0
        self._outages = 0

    # -------------------------------------------------------------- blows

    def rage(self, plan: Sequence[str]) -> None:
        """Deal the blows of ``plan``, one in some seconds, each undone a while later."""
        for blow in plan:
            self._wait(self.random.uniform(1.0, 4.0))
            self._breathe()
            self.blows[blow] += 1
            getattr(self, f"_{blow.replace(' ', '_')}")()
        while self._undoing:
            self._wait(0.2)

    def _breathe(self) -> None:
        """Wait until two replicas serve again, but not for ever: what is hit must have worked."""
        end = time.monotonic() + BREATH_S
        while len(self._living()) < 2 and time.monotonic() < end:
            self._wait(0.2)

    def _wait(self, seconds: float) -> None:
        """Let time pass, undo what is due, and look after everything."""
        self._undoing.wait(seconds, self._look_after, 0.1)

    def _look_after(self) -> None:
        """Restart what has died, keep jobs going, watch the leases."""
        for replica in self.replicas:
            self._look_after_replica(replica)
        now = time.monotonic()
        if now - self._looked_at >= 1.0:
            self._looked_at = now
            self._watch_leases()
            self._watch_jobs()

    def _look_after_replica(self, replica: Replica) -> None:
        process = replica.process
        assert process is not None
        if process.poll() is None:
            return
        now = time.monotonic()
        if replica.due is None:
            # Whoever runs a service starts it again, also one that found no database at its start.
            if process.returncode != -signal.SIGKILL and (replica.serves or not self._outages):
                raise ReplicaEnded(f"{replica.name} ended: {process.returncode}")
            replica.serves = replica.frozen = False
            replica.due = now + self.random.uniform(0.2, 3.0)
        elif now >= replica.due:
            at_a_point = self.random.random() < 0.4 and self._raging
            options = ("--kill", self.random.choice(POINTS)) if at_a_point else ()
            self.blows["kill at a point"] += at_a_point
            self._start(replica, *options)

    _raging = True

    def _living(self) -> list[Replica]:
        return [r for r in self.replicas if r.serves and not r.frozen]

    def _kill(self) -> None:
        replica = self.random.choice(self._living() or self.replicas)
        assert replica.process is not None
        if replica.process.poll() is None:
            replica.process.kill()
            replica.process.wait(60)

    def _freeze(self) -> None:
        """Whoever leads, for longer than its lease."""
        rows = self._ask_if_there("SELECT holder FROM duties WHERE name = 'control'") or []
        leaders = [r for r in self._living() if r.holder in {row["holder"] for row in rows}]
        replica = next(iter(leaders or self._living() or self.replicas))
        process = replica.process
        assert process is not None
        if process.poll() is not None:
            return
        process.send_signal(signal.SIGSTOP)
        replica.frozen = True

        def thaw() -> None:
            replica.frozen = False
            if process.poll() is None:
                process.send_signal(signal.SIGCONT)

        self._undoing.later(1.5 * REPLICA_S, 2.5 * REPLICA_S, thaw)

    def _restart_database(self) -> None:
        while self._outages:  # it is not back from the last one
            self._wait(0.2)
        self._outages += 1
        self.postgres.stop("immediate" if self.blows["restart database"] % 2 else "fast")
        self._undoing.later(0.5, 4.0, self._database_is_back)

    def _database_is_back(self) -> None:
        self.postgres.start()
        # Who found none at its start may find that out a while later.
        self._undoing.later(4.0, 4.0, self._forget_outage)

    def _forget_outage(self) -> None:
        self._outages -= 1

    def _refuse_blobs(self) -> None:
        self.store.refuse()
        self._undoing.later(2.0, 6.0, self.store.serve)

    # -------------------------------------------------------------- looking after it

    def _watch_leases(self) -> None:
        """A lease that is in nobody's hands must end by itself."""
        rows = self._ask_if_there("SELECT node_id, id, attempt FROM tasks WHERE state = 'leased'")
        if rows is None or self.crowd is None:
            return
        virtual = {node.node_id for node in self.crowd.nodes}
        in_hand, now = self.crowd.in_hand, time.monotonic()
        leased = {(r["node_id"], r["id"], r["attempt"]) for r in rows if r["node_id"] in virtual}
        self._ownerless = {lease: self._ownerless.get(lease, now) for lease in leased - in_hand}
        for lease, since in self._ownerless.items():
            if now - since > OWNERLESS_S:
                raise AssertionError(f"the lease {lease} has no owner for {now - since:.0f} s")

    def _watch_jobs(self) -> None:
        for job_id in list(self.open):
            found = self.record(job_id)
            if found is not None and found.state in ("completed", "failed", "cancelled"):
                self.open.discard(job_id)
                if found.state != "completed":
                    self.problems.append(f"{job_id} {found.state}: {found.reason}")
        while self._raging and len(self.open) < JOBS:
            if (job_id := self._submit()) is None:
                return
            self.jobs.append(job_id)
            self.open.add(job_id)

    # -------------------------------------------------------------- the verdict

    def run(self, plan: Sequence[str]) -> Verdict:
        """Jobs under the blows of ``plan``, and what is wrong with the records afterwards."""
        began = time.monotonic()
        self._wait(2.0)
        self.rage(plan)
        self._raging = False
        self._until("all replicas serve", lambda: all(r.holder for r in self.replicas))
        assert self.crowd is not None
        nodes = len(self.crowd.nodes) + len(self.nodes)
        self._until("every node is back", lambda: self._online() == nodes)
        self._until("who is gone holds nothing", lambda: not self._left_behind())
        self._until("every replica is shown", self._all_are_shown)
        self._until("every job ends", lambda: not self.open)
        self._until("no lease is left", lambda: not self._leases())
        rounds = self._audit()
        self.problems += self._defects()
        if late := [s for s in self.crowd.away if s > BACK_S]:
            self.problems.append(f"nodes were away for {late} s")
        self.problems += self.crowd.ended
        self.problems += [f"{n.args} ended" for n in self.nodes if n.poll() is not None]
        return Verdict(
            self.problems,
            self.blows,
            self.crowd.mischief,
            len(self.jobs),
            rounds,
            self.crowd.away,
            time.monotonic() - began,
        )

    def _until(self, what: str, holds: Callable[[], bool]) -> None:
        end = time.monotonic() + PATIENCE_S
        while not holds():
            if time.monotonic() > end:
                raise AssertionError(f"waited {PATIENCE_S} s in vain: {what}; {self._state()}")
            self._wait(0.5)

    def _state(self) -> str:
        jobs = [(j, r.state, r.version, r.reason) for j in self.open if (r := self.record(j))]
        return f"jobs {jobs}, left {self._left_behind()}, leases {self._leases()}"

    def _leases(self) -> list[dict[str, Any]]:
        return self._ask("SELECT id, node_id, attempt FROM tasks WHERE state = 'leased'")

    def _left_behind(self) -> list[dict[str, Any]]:
        """Sessions and duties of processes that are gone, and nodes with more sessions than one."""
        holders = ", ".join(f"'{r.holder}'" for r in self.replicas)
        return self._ask(
            f"SELECT node_id, holder FROM sessions WHERE ended_at IS NULL"
            f" AND holder NOT IN ({holders})"
            f" UNION ALL SELECT name, holder FROM duties WHERE holder NOT IN ({holders})"
            f" AND lease_until > extract(epoch FROM clock_timestamp())"
            f" UNION ALL SELECT node_id, 'twice' FROM sessions WHERE ended_at IS NULL"
            f" GROUP BY node_id HAVING count(*) > 1"
        )

    def _defects(self) -> list[str]:
        """What replicas have logged as an error: what goes wrong around them is none."""
        found = []
        for replica in self.replicas:
            lines = (self.root / f"{replica.name}.log").read_text().splitlines()
            found += [
                f"{replica.name}: {line[:2000]}"
                for line in lines
                if '"level": "error"' in line and "ASGI callable returned without" not in line
            ]
        return found

    def _audit(self) -> int:
        blobs = self.store.copy(self.root / "bucket") / "blobs"
        rounds = 0
        for job_id in self.jobs:
            found = audit(self.root, job_id, blobs, self.postgres.uri)
            self.problems += [f"{job_id}: {problem}" for problem in found.problems]
            rounds += found.rounds
        return rounds
