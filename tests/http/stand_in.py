"""A grid whose jobs live in memory: what the HTTP interface needs of the orchestrator's rooms.

The real commands and queries are tested in their own rooms and end to end; here only the interface
is on trial.
"""

from __future__ import annotations

import asyncio
import dataclasses
import os
import time
from pathlib import Path
from typing import Any

import pytest

from distribai.core.forecast import forecast, overhead_of
from distribai.core.people import ALL_SCOPES, HOME, OPERATOR_NAME, Excess, Principal, Role
from distribai.core.people import OPERATOR as OPERATOR_ID
from distribai.core.proposal import propose
from distribai.core.ranges import SampleRange
from distribai.core.spec import BlobRef, DataSpec, JobSpec, ModelSpec
from distribai.core.states import JOB, JobState, check
from distribai.core.why import Held, JobWhy, NodeWhy, Reason
from distribai.errors import NotFound, Unauthenticated, Unavailable
from distribai.orchestrator.context import Grid
from distribai.orchestrator.feed import Events, Wanted
from distribai.orchestrator.fleet.standing import ORDERS, VERBS
from distribai.orchestrator.idempotency import Key
from distribai.orchestrator.jobs.forecasting import Outlook
from distribai.orchestrator.people.records import Identity
from distribai.orchestrator.records import (
    ByteTotals,
    DeviceRecord,
    EventRecord,
    GridSummary,
    HeldOut,
    JobRecord,
    JobSummary,
    LogRecord,
    MemberRecord,
    NodeRecord,
    NodeState,
    Page,
    RoundProgress,
    RoundRecord,
    TaskRecord,
    VersionRecord,
)
from distribai.sections import OrchestratorSettings
from distribai.store.blobs import BlobStore, StoredBlob

OPERATOR, NODE = "operator-token", "node-token"
NOW = 1_700_000_000.0


def spec(name: str = "my-model", **changes: Any) -> JobSpec:
    """A spec that can be planned."""
    from distribai.api.recipe import recipe_of

    made = recipe_of({"name": name, "steps": 1000, **changes}, "test").to_spec({})
    assert isinstance(made.model, ModelSpec)
    assert isinstance(made.data, DataSpec)
    return made


class Orchestrator:
    """The in-memory rooms. Methods have the names and arguments of the real functions."""

    def __init__(self) -> None:
        self.jobs: dict[str, JobRecord] = {}
        self.withdrawn: list[str] = []
        self.keys: dict[str, str] = {}
        self.events: list[EventRecord] = []
        self.logs: list[LogRecord] = []
        self.tasks: dict[str, TaskRecord] = {}
        self.weights: dict[str, list[BlobRef]] = {}
        self.counted: list[tuple[str, str, int, int]] = []
        self.nodes: list[NodeRecord] = []
        self.problems: tuple[str, ...] = ()
        self.away = False
        self.excess: Excess | None = None
        self.answer = "accepted"

    def install(self, monkeypatch: pytest.MonkeyPatch) -> None:
        """Stand in for the real rooms."""
        base = "distribai.orchestrator."
        for room, names in {
            "jobs.commands": [
                "create_job",
                "accept_job",
                "decline_job",
                "cancel_job",
                "pause_job",
                "resume_job",
                "set_weight",
            ],
            "jobs.generation": ["request_generation", "withdraw_generation"],
            "jobs.queries": [
                "resolve_job",
                "list_jobs",
                "show_job",
                "page_rounds",
                "list_tasks",
                "page_versions",
                "list_logs",
                "wait_for_task",
                "weights_blob",
            ],
            "jobs.forecasting": ["plan_with"],
            "jobs.why": ["why_job"],
            "jobs.retry": ["retry_job"],
            "fleet.queries": ["knock", "node_state", "page_nodes", "summary"],
            "fleet.standing": ["order", "set_standing"],
            "fleet.why": ["resolve_node", "why_node"],
            "feed": ["read"],
            "feed.Tail": ["beyond"],
            "callers": ["verify_token"],
            "fleet.supplies": ["may_fetch", "job_of", "check_upload"],
            "people.admission": ["organization_for", "foresee"],
            "people.queries": ["whoami"],
            "people.sight": ["has_sent"],
            "traffic": ["count"],
            "http.blobs": ["is_settled"],
        }.items():
            for name in names:
                monkeypatch.setattr(f"{base}{room}.{name}", getattr(self, name))

    async def verify_token(self, grid: Grid, token: str) -> Principal:
        if token == OPERATOR:
            roles = {HOME: Role.OPERATOR}
            return Principal("account", "", OPERATOR_ID, OPERATOR_NAME, "key_a", roles, ALL_SCOPES)
        if token == NODE:
            return Principal("node", "node_a")
        raise Unauthenticated("auth.invalid", "Nobody issued this token.")

    async def may_fetch(self, grid: Grid, node_id: str, sha256: str, job_id: str) -> bool:
        return True

    async def job_of(self, grid: Grid, node_id: str, job_id: str) -> str:
        return job_id

    async def is_settled(self, grid: Grid, blob: StoredBlob) -> bool:
        return True

    async def check_upload(self, grid: Grid, node_id: str, ref: BlobRef) -> None:
        return None

    async def has_sent(self, grid: Grid, caller: Principal, ref: BlobRef) -> None:
        if caller.kind == "node":
            grid.stock.bring(caller.node_id, ref.sha256)

    async def organization_for(self, grid: Grid, caller: Principal, ref: str) -> str:
        return ref or HOME

    async def foresee(self, grid: Grid, organization_id: str, spec: JobSpec) -> Excess | None:
        return self.excess

    async def create_job(
        self,
        grid: Grid,
        spec: JobSpec,
        idempotency_key: str | None,
        by: str,
        organization_id: str = HOME,
        caller: Principal | None = None,
    ) -> str:
        if idempotency_key in self.keys:
            return self.keys[idempotency_key]
        job_id = grid.new_id("job")
        self.jobs[job_id] = job_record(job_id, spec, organization_id=organization_id)
        self._event(job_id, "job.submitted")
        if idempotency_key:
            self.keys[idempotency_key] = job_id
        return job_id

    def _set(self, job_id: str, state: JobState, reason: str = "") -> None:
        job = self.jobs[job_id]
        check(JOB, JobState(job.state), state, f"Job {job_id}")
        self.jobs[job_id] = dataclasses.replace(job, state=state.value, reason=reason)
        self._event(job_id, f"job.{state.value}")

    def _event(self, job_id: str, kind: str) -> None:
        cursor = str(len(self.events) + 1)
        self.events.append(EventRecord(cursor, NOW, kind, job_id, "", ""))

    async def accept_job(self, grid: Grid, job_id: str, by: str) -> None:
        self._set(job_id, JobState.QUEUED)

    async def decline_job(self, grid: Grid, job_id: str, why: str, by: str) -> None:
        self._set(job_id, JobState.DECLINED, why)

    async def cancel_job(self, grid: Grid, job_id: str, why: str, by: str) -> None:
        self._set(job_id, JobState.CANCELLED, why)

    async def pause_job(self, grid: Grid, job_id: str, by: str) -> None:
        self._set(job_id, JobState.PAUSED)

    async def resume_job(self, grid: Grid, job_id: str, by: str) -> None:
        self._set(job_id, JobState.RUNNING)

    async def set_weight(self, grid: Grid, job_id: str, weight: float, by: str) -> None:
        self.jobs[job_id] = dataclasses.replace(self.jobs[job_id], weight=weight)

    async def retry_job(
        self,
        grid: Grid,
        job_id: str,
        idempotency_key: str | None,
        by: str,
        caller: Principal | None = None,
    ) -> str:
        made = await self.create_job(grid, self.jobs[job_id].spec, idempotency_key, by)
        self.jobs[made] = dataclasses.replace(self.jobs[made], retry_of=job_id)
        return made

    async def withdraw_generation(self, grid: Grid, task_id: str, why: str) -> None:
        self.withdrawn.append(task_id)

    async def request_generation(
        self,
        grid: Grid,
        job_id: str,
        version: int | None,
        prompt: str,
        max_tokens: int,
        temperature: float,
        seed: int,
        key: Key | None = None,
    ) -> str:
        task_id = grid.new_id("task")
        number, _ = await self.weights_blob(grid, job_id, version)
        text = f"{prompt}/{number}/{max_tokens}/{temperature}/{seed}"
        made = task_record(task_id, job_id, self.answer, text)
        self.tasks[task_id] = dataclasses.replace(made, round=number)
        return task_id

    async def wait_for_task(self, grid: Grid, task_id: str, patience: float) -> TaskRecord:
        return self.tasks[task_id]

    async def resolve_job(
        self, grid: Grid, ref: str, organizations: frozenset[str] | None = None
    ) -> str:
        found = [j.id for j in self.jobs.values() if ref in (j.id, j.name)]
        if not found:
            raise NotFound("job.unknown", f"There is no job {ref!r}.", "See `distribai job list`.")
        return found[0]

    async def list_jobs(
        self,
        grid: Grid,
        state: str | None = None,
        limit: int = 50,
        cursor: str = "",
        organizations: frozenset[str] | None = None,
    ) -> Page[JobSummary]:
        wanted = [j for j in reversed(self.jobs.values()) if state in (None, j.state)]
        start = int(cursor or 0)
        shown = wanted[start : start + limit]
        more = str(start + limit) if start + limit < len(wanted) else ""
        return Page(tuple(job_summary(j) for j in shown), more)

    async def show_job(self, grid: Grid, job_id: str) -> JobRecord:
        return self.jobs[job_id]

    async def page_rounds(
        self, grid: Grid, job_id: str, limit: int, cursor: str = ""
    ) -> Page[RoundRecord]:
        members = (MemberRecord("node_a", 0, 50),)
        return Page((RoundRecord(0, 0, "merged", "", NOW, None, NOW + 9, members, 1, 25600),))

    async def list_tasks(
        self, grid: Grid, job_id: str, limit: int = 1000, cursor: str = ""
    ) -> Page[TaskRecord]:
        return Page(tuple(t for t in self.tasks.values() if t.job_id == job_id))

    async def page_versions(
        self, grid: Grid, job_id: str, limit: int, cursor: str = ""
    ) -> Page[VersionRecord]:
        refs = self.weights.get(job_id, [])
        return Page(
            tuple(
                VersionRecord(n, "ab" * 32, ref, None, n, 10 * n, 5.5 - n, NOW)
                for n, ref in enumerate(refs)
            )
        )

    async def read(self, grid: Grid, wanted: Wanted, after: str, limit: int) -> Events:
        mine = [
            e
            for e in self.events
            if int(e.cursor) > int(after or 0)
            and wanted.job_id in (None, e.job_id)
            and wanted.node_id in (None, e.node_id)
            and (not wanted.kinds or e.kind in wanted.kinds)
        ][:limit]
        return Events(tuple(mine), mine[-1].cursor if mine else after)

    async def beyond(self, grid: Grid, cursor: str, timeout_s: float) -> bool:
        end = grid.clock() + timeout_s
        while not grid.tail.closing.is_set() and grid.clock() < end:
            if any(int(e.cursor) > int(cursor or 0) for e in self.events):
                return True
            await asyncio.sleep(0.02)
        return False

    async def why_job(self, grid: Grid, job_id: str) -> JobWhy:
        job = self.jobs[job_id]
        reason = Reason("decision", "It waits for the operator's decision.", "Accept it.")
        if job.state != JobState.SUBMITTED:
            text = "Round 1 waits: 0 of 2 submissions are in."
            reason = Reason("grace", text, until=NOW + 20, nodes=("node_aaaabbbbcccc",))
        return JobWhy(job.id, job.name, job.state, NOW, True, (reason,))

    async def resolve_node(self, grid: Grid, ref: str, account_id: str | None = None) -> str:
        found = [n.id for n in self.nodes if ref in (n.id, n.name)]
        if not found:
            raise NotFound("node.unknown", f"No node has the id or name {ref!r}.")
        return found[0]

    async def why_node(self, grid: Grid, node_id: str) -> NodeWhy:
        (node,) = [n for n in self.nodes if n.id == node_id]
        held = Held(0, "cpu", 4096, "task_x", "job_x", "train", 2, NOW - 75)
        reason = Reason("device", "Job big does not fit its free devices: it needs 9 MB.")
        return NodeWhy(
            node.id,
            node.name,
            node.liveness,
            node.standing,
            node.intent,
            NOW - 5,
            NOW,
            True,
            (held, Held(1, "cpu", 0)),
            (reason,),
        )

    async def list_logs(
        self, grid: Grid, job_id: str, after: str = "", limit: int = 200
    ) -> tuple[LogRecord, ...]:
        return tuple(x for x in self.logs if int(x.cursor) > int(after or 0))[:limit]

    async def weights_blob(
        self, grid: Grid, job_id: str, version: int | None, account: str = ""
    ) -> tuple[int, BlobRef]:
        refs = self.weights.get(job_id, [])
        number = len(refs) - 1 if version is None else version
        if not 0 <= number < len(refs):
            raise NotFound("job.no_weights", f"There is no version {version}.")
        return number, refs[number]

    async def whoami(self, grid: Grid, caller: Principal) -> Identity:
        scopes = tuple(sorted(caller.scopes))
        return Identity(caller.account_id, caller.name, caller.operator, caller.key_id, scopes, ())

    async def plan_with(self, grid: Grid, spec: JobSpec, nodes: int | None = None) -> Outlook:
        overhead, here = overhead_of(spec, None), len(self.nodes)
        return Outlook(forecast(spec, [], overhead), propose(spec, [], overhead), here, 0, None)

    async def page_nodes(
        self, grid: Grid, limit: int, cursor: str = "", account_id: str | None = None
    ) -> Page[NodeRecord]:
        return Page(tuple(self.nodes))

    def _node(self, node_id: str, **changes: str) -> None:
        self.nodes = [
            dataclasses.replace(n, **changes) if n.id == node_id else n  # type: ignore[arg-type]
            for n in self.nodes
        ]

    async def order(self, grid: Grid, node_id: str, verb: str, by: str) -> None:
        self._node(node_id, ordered=ORDERS[verb].value)

    async def set_standing(self, grid: Grid, node_id: str, verb: str, why: str, by: str) -> None:
        self._node(node_id, standing=VERBS[verb].value, standing_reason=why)

    async def node_state(self, grid: Grid, node_id: str) -> NodeState:
        (n,) = [n for n in self.nodes if n.id == node_id]
        return NodeState(n.id, n.liveness, n.standing, n.intent, n.ordered, n.standing_reason)

    async def knock(self, grid: Grid) -> None:
        if self.away:
            raise Unavailable("grid.database", "The database is away.")

    async def summary(self, grid: Grid, organizations: frozenset[str] | None = None) -> GridSummary:
        return GridSummary(
            "grid_test",
            "trusted",
            "distribai 0.1.0",
            "sqlite",
            not self.problems,
            self.problems,
            NOW,
            len(self.nodes),
            0,
            0,
            0,
            {"submitted": len(self.jobs)},
            0,
            0,
        )

    def count(
        self,
        grid: Grid,
        job_id: str,
        node_id: str,
        kind: str,
        up: int,
        down: int,
        sha256: str = "",
    ) -> None:
        assert sha256
        self.counted.append((job_id, node_id, up, down))


def job_record(job_id: str, spec: JobSpec, **changes: Any) -> JobRecord:
    """A job as it is after its submission."""
    record = JobRecord(
        id=job_id,
        name=spec.name,
        state="submitted",
        reason="",
        spec=spec,
        version=0,
        rounds_total=spec.round_count,
        created_at=NOW,
        created_by="operator",
        decided_at=None,
        started_at=None,
        ended_at=None,
        now=NOW,
        parameters=400_000,
        tokens=0,
        nodes_working=0,
        round=None,
        held_out=(),
        bytes=ByteTotals(),
        dataset={},
        plan={},
    )
    return dataclasses.replace(record, **changes)


def running(job: JobRecord, version: int = 2) -> JobRecord:
    """The job in the middle of a round."""
    progress = RoundProgress(
        number=version,
        take=0,
        state="open",
        opened_at=NOW,
        deadline_at=None,
        slots=3,
        submitted=1,
        accepted=1,
        step=25.0,
        steps=50,
        mean_loss=3.25,
        tokens_per_s=12_345.0,
        eta_s=200.0,
    )
    return dataclasses.replace(
        job,
        state="running",
        version=version,
        nodes_working=3,
        round=progress,
        held_out=(HeldOut(0, 5.5), HeldOut(1, 4.5), HeldOut(2, None)),
        bytes=ByteTotals(1_200_000, 3_400_000, 0, 500),
    )


def job_summary(job: JobRecord) -> JobSummary:
    """The job as one line of a list."""
    return JobSummary(
        job.id,
        job.name,
        job.state,
        job.reason,
        "P2",
        job.version,
        job.rounds_total,
        job.nodes_working,
        job.created_at,
        job.created_by,
        None,
        None,
        None,
    )


def task_record(task_id: str, job_id: str, state: str, text: str) -> TaskRecord:
    """A generate task."""
    return TaskRecord(
        id=task_id,
        job_id=job_id,
        round=0,
        take=0,
        phase="generate",
        state=state,
        node_id="node_a",
        device=0,
        attempt=1,
        samples=(SampleRange(0, 8),),
        steps=0,
        step=0,
        loss=None,
        tokens_per_s=0.0,
        tokens=0,
        reason="out of memory" if state == "failed" else "",
        text=text,
        metrics={},
        causes=(),
        created_at=NOW,
        leased_at=None,
        ended_at=None,
    )


def node_record(name: str) -> NodeRecord:
    """An idle node."""
    device = DeviceRecord(0, "cpu", "two cores", 4096, 2)
    return NodeRecord(
        f"node_{name}",
        name,
        "online",
        "trusted",
        "contribute",
        "0.1.0",
        (device,),
        NOW,
        NOW,
        (),
        1000,
        2000,
    )


def log_record(cursor: int, message: str) -> LogRecord:
    """One line."""
    return LogRecord(str(cursor), NOW, "info", message, "job", "", "node_a", {"k": "v"})


def make_grid(root: Path) -> Grid:
    """A grid with real blobs and no database."""
    return Grid(
        db=None,  # type: ignore[arg-type]
        blobs=BlobStore.open(root / "blobs", root / "staging", max_bytes=1 << 26),
        settings=OrchestratorSettings(state_dir=root),
        clock=time.monotonic,
        entropy=os.urandom,
        grid_id="grid_test",
    )
