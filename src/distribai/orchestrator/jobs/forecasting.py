"""Forecasts of jobs on the machines that are here, and what became of them.

Nothing is decided with these: they are for people who choose a recipe. What machines reached in
training is their own report.
"""

from __future__ import annotations

import asyncio
import itertools
import statistics
from collections import defaultdict
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from distribai.core.forecast import Forecast, fastest, forecast, overhead_of
from distribai.core.known import Known, Overhead
from distribai.core.needs import lacks
from distribai.core.phases import Measured, RoundTimes, TaskTimes, measure
from distribai.core.plain import to_plain
from distribai.core.plan import needs_of, parameter_count, task_memory_mb
from distribai.core.proposal import Proposal, propose
from distribai.core.spec import JobSpec
from distribai.core.states import Liveness, RoundState
from distribai.core.steps import Reached, step_work
from distribai.orchestrator.context import Grid
from distribai.orchestrator.jobs.preparation import dataset_key
from distribai.orchestrator.rounds.opening import devices_of
from distribai.orchestrator.rounds.tasks import spec_of
from distribai.store.engine import AnyRow, Tx
from distribai.store.statements import fleet, jobs, submissions, work

ROUNDS = 100
"""The latest rounds of a job that its phases are told of."""

OF_A_DEVICE = 5
"""Latest rounds of a job that a device's speed is the median of."""

LIKE = 2.0
"""Jobs up to so many times larger or smaller have about the same overhead."""


@dataclass(frozen=True, slots=True)
class Outlook:
    """What a spec would be like here, and better settings. ``here`` devices could take part now,
    ``resting`` nodes are online and take no tasks: paused, leaving, or quarantined; the data is
    ``data_bytes``, None while it is not prepared."""

    forecast: Forecast
    proposal: Proposal
    here: int
    resting: int
    data_bytes: int | None


async def plan_with(grid: Grid, spec: JobSpec, nodes: int | None = None) -> Outlook:
    """What a valid spec would be like here, and better settings; on exactly ``nodes`` devices if
    given."""
    async with grid.db.read() as tx:
        known = await machines_for(tx, spec)
        data = await jobs.dataset(tx, dataset_key(spec))
        able = {row.id for row in await fleet.able_nodes(tx)}
        online = [n for n in await fleet.all_nodes(tx) if n.liveness == Liveness.ONLINE]
        overhead = await _overhead(tx, spec)
    need = task_memory_mb(spec)
    here = sum(not m.memory_mb or m.memory_mb >= need for m in known)
    machines = fastest(spec, known)
    if nodes is not None:
        spec = replace(spec, workers_min=nodes, workers_max=nodes)
    figures = {} if data is None else data.figures
    held_out, size = figures.get("held_out_sequences"), figures.get("bytes")
    found = forecast(spec, machines, overhead, held_out, size)
    better = await asyncio.to_thread(propose, spec, machines, overhead, held_out, size)
    return Outlook(found, better, here, sum(n.id not in able for n in online), size)


async def forecast_for(tx: Tx, spec: JobSpec, figures: Mapping[str, Any]) -> Forecast:
    """The forecast of a job whose data set is prepared, with its ``figures``."""
    held_out, size = int(figures["held_out_sequences"]), int(figures["bytes"])
    machines = fastest(spec, await machines_for(tx, spec))
    return forecast(spec, machines, await _overhead(tx, spec), held_out, size)


async def renew(tx: Tx, job: AnyRow) -> None:
    """Forecast a job whose row is locked anew, with the machines that are here now."""
    data = await jobs.dataset(tx, job.dataset_key)
    assert data is not None, "jobs.dataset_key refers to it"
    found = await forecast_for(tx, spec_of(job), data.figures)
    await jobs.change(tx, job.id, plan={**job.plan, "forecast": to_plain(found)})


async def machines_for(tx: Tx, spec: JobSpec) -> list[Known]:
    """What is known of the devices that may work for a job now, however small or slow."""
    reached = await _reached(tx)
    needs, found = needs_of(spec), []
    for node in await fleet.able_nodes(tx):
        machine = node.machine or {}
        devices = devices_of(node)
        for device in devices:
            if spec.resources.device not in ("any", device.type) or lacks(needs, device.has):
                continue
            found.append(
                Known(
                    node_id=node.id,
                    device=device.index,
                    type=device.type,
                    reached=tuple(reached.get((node.id, device.index), ())),
                    gflops=device.has.gflops,
                    up_mbps=machine.get("link_up_mbps", 0.0) / len(devices),
                    down_mbps=machine.get("link_mbps", 0.0) / len(devices),
                    up_limit_mbps=machine.get("limit_up_mbps", 0.0) / len(devices),
                    down_limit_mbps=machine.get("limit_down_mbps", 0.0) / len(devices),
                    memory_mb=device.memory_mb,
                    month_left=machine["month_left"] if machine.get("month_bytes") else None,
                )
            )
    return found


async def measured(tx: Tx, job_id: str) -> Measured | None:
    """Where the time of a job's latest rounds went."""
    last = await work.latest_round(tx, job_id)
    if last is None:
        return None
    since = last.number - ROUNDS
    opened = [
        r
        for r in await work.rounds_of(tx, job_id, (since, -1))
        if r.state != RoundState.ABANDONED.value
    ]
    times = [
        RoundTimes(r.number, r.opened_at, after.opened_at if after else r.closed_at, len(r.members))
        for r, after in itertools.zip_longest(opened, opened[1:])
        if r.state == RoundState.MERGED.value
    ]
    tasks = [
        TaskTimes(
            t.round,
            t.outcome["metrics"].get("seconds", 0.0),
            t.outcome["metrics"].get("download_seconds", 0.0),
            t.outcome["metrics"].get("upload_seconds", 0.0),
        )
        for t in await submissions.accepted_since(tx, job_id, since)
    ]
    return measure(times, tasks)


async def _overhead(tx: Tx, spec: JobSpec) -> Overhead:
    """Of the youngest job of about the same size that has some rounds on record."""
    parameters = parameter_count(spec)
    for job in await jobs.latest_with_rounds(tx):
        if not 1 / LIKE <= job.parameters / parameters <= LIKE:
            continue
        found = await measured(tx, job.id)
        if found is not None and found.overhead_s is not None:
            return overhead_of(spec, found.overhead_s)
    return overhead_of(spec, None)


async def _reached(tx: Tx) -> Mapping[tuple[str, int], list[Reached]]:
    """What steps took devices in the latest jobs, by (node, device), the youngest job first: the
    median of the latest tasks of each."""
    found: defaultdict[tuple[str, int], list[Reached]] = defaultdict(list)
    for job in await jobs.latest_with_rounds(tx):
        spec = spec_of(job)
        work_of, tokens_of = step_work(spec), spec.batch * spec.seq_len
        steps: defaultdict[tuple[str, int], list[float]] = defaultdict(list)
        for task in await submissions.accepted_since(tx, job.id, job.version - OF_A_DEVICE):
            tokens, seconds = task.outcome["tokens"], task.outcome["metrics"].get("seconds", 0.0)
            if tokens > 0 and seconds > 0:
                steps[task.node_id, task.device].append(seconds * tokens_of / tokens)
        for key, of_device in steps.items():
            found[key].append(Reached(work_of, statistics.median(of_device)))
    return found
