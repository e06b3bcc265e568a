"""Jobs: plan, create, decide, look at. ``{ref}`` is an id, a unique prefix of one, or a name."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import replace
from functools import partial
from typing import Annotated, Any, TypeVar

from fastapi import APIRouter, Query, Response
from pydantic import BaseModel, ConfigDict, Field
from starlette.requests import Request

from distribai.api import answers
from distribai.core.people import Scope
from distribai.core.plain import from_plain, to_plain
from distribai.core.plan import parameter_count
from distribai.core.plan import plan as plan_of
from distribai.core.spec import JobSpec
from distribai.core.states import JobState
from distribai.core.turns import LEAST_WEIGHT, MOST_WEIGHT
from distribai.core.validation import validate_spec
from distribai.errors import InvalidSpec
from distribai.orchestrator.context import Grid
from distribai.orchestrator.http.parameters import (
    After,
    Cursor,
    IdempotencyKey,
    Limit,
    Wait,
)
from distribai.orchestrator.http.security import (
    Access,
    AskAgain,
    Caller,
    GridOf,
    OwnJob,
    SeenJob,
    allow,
    seen_job,
)
from distribai.orchestrator.jobs import commands, forecasting, queries
from distribai.orchestrator.jobs import retry as retrying
from distribai.orchestrator.people import admission, sight

R = TypeVar("R")

POLL_S = 0.5
"""A waiting request looks so often. Looking costs one indexed read of the log."""

router = APIRouter(prefix="/jobs", tags=["jobs"])


class SubmitBody(BaseModel):
    """A job's spec (name, model, data, steps and whatever else shall differ from the defaults), and
    for which organization it is: its id or name; empty takes the only one that the caller may
    submit to, or ``home`` for operators."""

    model_config = ConfigDict(extra="forbid")

    spec: dict[str, Any]
    organization: Annotated[str, Field(max_length=64)] = ""


class WhyBody(BaseModel):
    """The reason that people will read."""

    model_config = ConfigDict(extra="forbid")

    why: Annotated[str, Field(max_length=2000)] = ""


class ReasonBody(BaseModel):
    """The reason that people will read; it must be given."""

    model_config = ConfigDict(extra="forbid")

    why: Annotated[str, Field(min_length=1, max_length=2000)]


class WeightBody(BaseModel):
    """What the job weighs beside others of its tier; 1 is usual."""

    model_config = ConfigDict(extra="forbid")

    weight: Annotated[float, Field(ge=LEAST_WEIGHT, le=MOST_WEIGHT, allow_inf_nan=False)]


def read_spec(document: dict[str, Any]) -> JobSpec:
    """The spec in a request.

    Raises:
        InvalidSpec: an unknown, missing or ill-typed field, with its path.
    """
    try:
        return from_plain(JobSpec, document)
    except ValueError as problem:
        path, _, what = str(problem).partition(": ")
        raise InvalidSpec(
            "spec.invalid",
            f"The spec's {path}: {what}.",
            "`distribai submit --recipe FILE --dry-run` checks a recipe and prints its spec.",
            field="spec" if path == JobSpec.__name__ else path,
        ) from problem


@router.post("/plan", summary="What a job would take (creates nothing)")
@allow(Access.MEMBERS)
async def plan(
    body: SubmitBody,
    grid: GridOf,
    caller: Caller,
    nodes: Annotated[
        int | None,
        Query(
            ge=1,
            le=10_000,
            description="Plan for so many; default: those that could take part now, at least "
            "workers_min and at most workers_max.",
        ),
    ] = None,
) -> answers.PlanAnswer:
    """Validates like a submission, and plans: rounds, tasks, parameters, memory, bytes; and how it
    would go on the machines that are here, who of them is too slow, what would go better. What
    the grid's limits or the organization's quotas would never take is refused; a quota that is only
    full for now is named."""
    spec = read_spec(body.spec)
    validate_spec(spec)
    organization = await admission.organization_for(grid, caller, body.organization)
    not_now = await admission.foresee(grid, organization, spec)
    found = await forecasting.plan_with(grid, spec, nodes)
    taking_part = nodes or min(max(found.here, spec.workers_min), spec.workers_max)
    figures = plan_of(spec, parameter_count(spec), taking_part, data_bytes=found.data_bytes)
    better = found.proposal
    better = replace(better, forecast=await sight.forecast_for(grid, caller, better.forecast))
    return answers.PlanAnswer(
        spec=spec,
        plan=to_plain(figures),
        here=found.here,
        resting=found.resting,
        not_now=not_now,
        forecast=await sight.forecast_for(grid, caller, found.forecast),
        proposal=better,
    )


@router.post("", summary="Submit a job", status_code=201)
@allow(Access.MEMBERS, Scope.SUBMIT)
async def create(
    body: SubmitBody,
    grid: GridOf,
    caller: Caller,
    response: Response,
    idempotency_key: IdempotencyKey = None,
) -> answers.JobId:
    """Makes a job that waits for the operator's word, unless its organization's policy accepts it
    at once. The caller must have uploaded its blobs already."""
    spec = read_spec(body.spec)
    organization = await admission.organization_for(grid, caller, body.organization)
    job_id = await commands.create_job(
        grid, spec, idempotency_key, caller.title, organization_id=organization, caller=caller
    )
    response.headers["Location"] = f"/api/v1/jobs/{job_id}"
    return await _state(grid, job_id)


@router.get("", summary="List jobs, newest first", response_model=answers.Page[answers.JobSummary])
@allow(Access.VIEWERS)
async def list_jobs(
    grid: GridOf,
    caller: Caller,
    state: JobState | None = None,
    limit: Limit = 50,
    cursor: Cursor = "",
) -> Any:
    """All jobs that the caller may look at, or those in one state."""
    return to_plain(await queries.list_jobs(grid, state, limit, cursor, caller.sees()))


@router.get("/{ref}", summary="Show a job", response_model=answers.JobRecord)
@allow(Access.VIEWERS)
async def show(job_id: SeenJob, grid: GridOf, caller: Caller) -> Any:
    """Everything about one job."""
    found = await queries.show_job(grid, job_id)
    if found.forecast is not None:
        seen = await sight.forecast_for(grid, caller, found.forecast)
        found = replace(found, forecast=seen)
    return to_plain(found)


@router.post("/{ref}/accept", summary="Accept a submitted job")
@allow(Access.OPERATORS, Scope.OPERATE)
async def accept(job_id: SeenJob, grid: GridOf, caller: Caller) -> answers.JobId:
    """It runs as soon as there are enough nodes."""
    return await _change(grid, job_id, lambda j: commands.accept_job(grid, j, caller.title))


@router.post("/{ref}/decline", summary="Decline a submitted job")
@allow(Access.OPERATORS, Scope.OPERATE)
async def decline(job_id: SeenJob, body: ReasonBody, grid: GridOf, caller: Caller) -> answers.JobId:
    """It ends, with a reason for whoever asked."""
    return await _change(
        grid, job_id, lambda j: commands.decline_job(grid, j, body.why, caller.title)
    )


@router.post("/{ref}/cancel", summary="Cancel an open job")
@allow(Access.MEMBERS, Scope.SUBMIT)
async def cancel(
    job_id: OwnJob, grid: GridOf, caller: Caller, body: WhyBody | None = None
) -> answers.JobId:
    """It ends, and its tasks with it; the versions made so far stay."""
    why = body.why if body else ""
    return await _change(grid, job_id, lambda j: commands.cancel_job(grid, j, why, caller.title))


@router.post("/{ref}/pause", summary="Pause a running job")
@allow(Access.MEMBERS, Scope.SUBMIT)
async def pause(job_id: OwnJob, grid: GridOf, caller: Caller) -> answers.JobId:
    """Nothing new is leased until it is resumed."""
    return await _change(grid, job_id, lambda j: commands.pause_job(grid, j, caller.title))


@router.post("/{ref}/resume", summary="Resume a paused job")
@allow(Access.MEMBERS, Scope.SUBMIT)
async def resume(job_id: OwnJob, grid: GridOf, caller: Caller) -> answers.JobId:
    """It goes on where it stood."""
    return await _change(grid, job_id, lambda j: commands.resume_job(grid, j, caller.title))


@router.post("/{ref}/retry", summary="Try again what failed or was cancelled", status_code=201)
@allow(Access.MEMBERS, Scope.SUBMIT)
async def retry(
    job_id: OwnJob,
    grid: GridOf,
    caller: Caller,
    response: Response,
    idempotency_key: IdempotencyKey = None,
) -> answers.JobId:
    """Makes a new job, of the same organization, that does the steps that are left from the last
    version; it waits for the operator's word like any other."""
    made = await retrying.retry_job(grid, job_id, idempotency_key, caller.title, caller)
    response.headers["Location"] = f"/api/v1/jobs/{made}"
    return await _state(grid, made)


@router.post("/{ref}/weight", summary="Let a job weigh more or less")
@allow(Access.OPERATORS, Scope.OPERATE)
async def weight(job_id: SeenJob, body: WeightBody, grid: GridOf, caller: Caller) -> answers.JobId:
    """Within its tier and organization the heavier job goes first, and its organization's share
    grows with it."""
    return await _change(
        grid, job_id, lambda j: commands.set_weight(grid, j, body.weight, caller.title)
    )


@router.get(
    "/{ref}/rounds", summary="List rounds", response_model=answers.Page[answers.RoundRecord]
)
@allow(Access.VIEWERS)
async def rounds(job_id: SeenJob, grid: GridOf, limit: Limit = 1000, cursor: Cursor = "") -> Any:
    """Rounds, oldest first."""
    return to_plain(await queries.page_rounds(grid, job_id, limit, cursor))


@router.get("/{ref}/tasks", summary="List tasks", response_model=answers.Page[answers.TaskRecord])
@allow(Access.VIEWERS)
async def tasks(job_id: SeenJob, grid: GridOf, limit: Limit = 200, cursor: Cursor = "") -> Any:
    """Tasks, oldest first."""
    return to_plain(await queries.list_tasks(grid, job_id, limit, cursor))


@router.get(
    "/{ref}/versions",
    summary="List versions of the weights",
    response_model=answers.Page[answers.VersionRecord],
)
@allow(Access.VIEWERS)
async def versions(job_id: SeenJob, grid: GridOf, limit: Limit = 1000, cursor: Cursor = "") -> Any:
    """Versions, from 0."""
    return to_plain(await queries.page_versions(grid, job_id, limit, cursor))


@router.get(
    "/{ref}/logs", summary="Follow log lines", response_model=answers.Listing[answers.LogRecord]
)
@allow(Access.VIEWERS)
async def logs(
    job_id: SeenJob,
    request: Request,
    grid: GridOf,
    after: After = "",
    limit: Limit = 200,
    wait: Wait = 0.0,
    *,
    ask_again: AskAgain,
) -> Any:
    """Log lines, oldest first; with ``wait`` the answer is held until there is one."""

    async def may_read() -> None:
        await seen_job(job_id, grid, await ask_again())

    ask = partial(queries.list_logs, grid, job_id, after, limit)
    found = await poll(request, grid, wait, ask, may_read)
    return {"items": to_plain(found)}


async def _state(grid: Grid, job_id: str) -> answers.JobId:
    return answers.JobId(id=job_id, state=(await queries.show_job(grid, job_id)).state)


async def _change(
    grid: Grid, job_id: str, command: Callable[[str], Awaitable[None]]
) -> answers.JobId:
    await command(job_id)
    return await _state(grid, job_id)


async def poll(
    request: Request,
    grid: Grid,
    wait: float,
    ask: Callable[[], Awaitable[Sequence[R]]],
    may_read: Callable[[], Awaitable[object]],
) -> Sequence[R]:
    """Ask until there is an answer, ``wait`` seconds have passed or nobody listens any more. After
    a wait ``may_read`` raises when the caller may read it no more."""
    end, waited = grid.clock() + wait, False
    while True:
        found = await ask()
        left = end - grid.clock()
        if found or left <= 0 or await request.is_disconnected():
            if waited:
                await may_read()
            return found
        waited = True
        await asyncio.sleep(min(POLL_S, left))
