"""One job as ``distribai job show`` and ``watch`` want it: progress, bytes, a forecast."""

from __future__ import annotations

from collections.abc import Sequence

from distribai.core.forecast import Forecast
from distribai.core.plain import from_plain
from distribai.core.spec import JobSpec
from distribai.core.states import JobState, TaskState
from distribai.orchestrator import traffic
from distribai.orchestrator.context import Grid
from distribai.orchestrator.jobs.forecasting import measured
from distribai.orchestrator.jobs.rows import get_job
from distribai.orchestrator.records import ByteTotals, HeldOut, JobRecord, RoundProgress
from distribai.orchestrator.rounds.decisions import ARRIVED, EXPECTED
from distribai.orchestrator.rounds.opening import able_devices, training_devices, waits_for
from distribai.orchestrator.rounds.tasks import spec_of
from distribai.store.engine import AnyRow, Tx
from distribai.store.statements import jobs, records, work


async def show_job(grid: Grid, job_id: str) -> JobRecord:
    """Everything about one job, from one snapshot of the database.

    Raises:
        NotFound: ``job.unknown``.
    """
    async with grid.db.read() as tx:
        job = await get_job(tx, job_id)
        spec = spec_of(job)
        row = await work.latest_round(tx, job_id)
        progress = await _progress(grid, tx, job, spec, row) if row is not None else None
        data = await jobs.dataset(tx, job.dataset_key)
        assert data is not None, "jobs.dataset_key refers to it"
        versions = await jobs.all_versions(tx, job_id)
        working = await work.working_nodes(tx)
        return JobRecord(
            id=job.id,
            name=job.name,
            state=job.state,
            reason=job.reason,
            spec=spec,
            version=job.version,
            rounds_total=job.rounds_total,
            created_at=job.created_at,
            created_by=job.created_by,
            decided_at=job.decided_at,
            started_at=job.started_at,
            ended_at=job.ended_at,
            now=tx.now,
            parameters=job.parameters,
            tokens=job.tokens,
            nodes_working=working.get(job_id, 0),
            round=progress,
            held_out=tuple(HeldOut(v.version, v.held_out_loss) for v in versions),
            bytes=await _bytes(grid, tx, job_id),
            dataset=data.figures,
            plan={name: value for name, value in job.plan.items() if name != "forecast"},
            waiting_for=await _waiting(tx, job, row),
            weight=job.weight,
            retry_of=job.retry_of,
            organization_id=job.organization_id,
            forecast=_forecast(job),
            measured=await measured(tx, job_id),
        )


def _forecast(job: AnyRow) -> Forecast | None:
    """What was stored with the job; older ones have none."""
    stored = job.plan.get("forecast")
    return None if stored is None else from_plain(Forecast, stored)


async def _waiting(tx: Tx, job: AnyRow, row: AnyRow | None) -> str:
    """Why nothing happens, computed now from the scheduler's own functions."""
    state = JobState(job.state)
    if state is JobState.SUBMITTED:
        return "the operator's decision"
    if state is JobState.PAUSED:
        return "somebody to resume it"
    if state not in (JobState.QUEUED, JobState.RUNNING):
        return ""
    if row is not None and row.state in ("open", "closing"):
        return ""
    if job.version >= job.rounds_total:
        return "the last version's held-out loss"
    return waits_for(job, await able_devices(tx), await training_devices(tx))


async def _progress(grid: Grid, tx: Tx, job: AnyRow, spec: JobSpec, row: AnyRow) -> RoundProgress:
    tasks = await work.tasks_of_round(tx, job.id, row.number, row.take, outcomes=True)
    expected = [t for t in tasks if t.state in EXPECTED]
    leased = [t for t in tasks if t.state == TaskState.LEASED]
    live = [grid.fleet.progress_of(t.id, t.node_id, t.attempt) for t in leased]
    steps: list[float] = [float(t.steps) for t in tasks if t.state in ARRIVED]
    losses: list[float] = []
    speed = 0.0
    for task, now in zip(leased, live, strict=True):
        stored = task.progress or {}
        steps.append(float(now.step if now else stored.get("step", 0)))
        loss = now.loss if now else stored.get("loss")
        if loss is not None and loss == loss:
            losses.append(loss)
        speed += now.tokens_per_s if now else stored.get("tokens_per_s", 0.0)
    if not losses:
        losses = [
            t.outcome["metrics"]["loss_last"]
            for t in tasks
            if t.outcome and "loss_last" in t.outcome["metrics"]
        ]
    step = sum(steps) / len(expected) if expected else 0.0
    return RoundProgress(
        number=row.number,
        take=row.take,
        state=row.state,
        opened_at=row.opened_at,
        deadline_at=row.deadline_at,
        slots=len(expected),
        submitted=sum(t.state in ARRIVED for t in tasks),
        accepted=sum(t.state == TaskState.ACCEPTED for t in tasks),
        step=step,
        steps=row.steps,
        mean_loss=sum(losses) / len(losses) if losses else None,
        tokens_per_s=speed,
        eta_s=_eta(tx.now, job, row, step, await _round_seconds(tx, job.id)),
    )


async def _round_seconds(tx: Tx, job_id: str) -> float | None:
    """How long the last rounds took, from opening to opening, in the middle."""
    opened = [r.opened_at for r in await work.rounds_of(tx, job_id) if r.state != "abandoned"]
    gaps: list[float] = sorted(b - a for a, b in zip(opened[-6:], opened[-5:], strict=False))
    return gaps[len(gaps) // 2] if gaps else None


def _eta(
    now: float, job: AnyRow, row: AnyRow, step: float, round_seconds: float | None
) -> float | None:
    """Seconds until the last round is merged, at the pace so far; None while there is no pace."""
    if job.state != JobState.RUNNING:
        return None
    done = min(1.0, step / row.steps) if row.steps else 0.0
    if row.state == "merged":
        done = 1.0
    if round_seconds is None:
        if done <= 0:
            return None
        round_seconds = (now - row.opened_at) / done
    rounds_left: float = job.rounds_total - row.number - done
    return max(0.0, round_seconds * rounds_left)


async def _bytes(grid: Grid, tx: Tx, job_id: str) -> ByteTotals:
    """Bytes of a job; what this process has counted and not yet written is in it."""
    sums = {kind: list(pair) for kind, pair in (await records.traffic_of(tx, job_id)).items()}
    # A copy: more is counted while the database answers.
    for (job, _, kind, sha256), (up, down) in list(grid.counted.items()):
        known = await records.blob(tx, sha256) if sha256 else None
        if (job or (known.job_id if known else "")) == job_id:
            total = sums.setdefault(known.kind if known else kind, [0, 0])
            total[0] += up
            total[1] += down
    weights = [pair for kind, pair in sums.items() if kind in traffic.WEIGHTS]
    others = [pair for kind, pair in sums.items() if kind not in traffic.WEIGHTS]
    return ByteTotals(_sum(weights, 0), _sum(weights, 1), _sum(others, 0), _sum(others, 1))


def _sum(pairs: Sequence[Sequence[int]], place: int) -> int:
    return sum(pair[place] for pair in pairs)
