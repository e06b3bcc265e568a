"""What comes out of a job: its weights as safetensors, and samples from them."""

from __future__ import annotations

import re
from typing import Annotated

from fastapi import APIRouter, Query, Response
from pydantic import BaseModel, ConfigDict, Field
from starlette.requests import Request

from distribai.api import answers
from distribai.core.people import Scope
from distribai.core.states import TaskState
from distribai.errors import Conflict, Unavailable
from distribai.orchestrator.http.parameters import IdempotencyKey
from distribai.orchestrator.http.ranges import RANGES, FollowHeader, blob_response
from distribai.orchestrator.http.security import (
    Access,
    AskAgain,
    Caller,
    GridOf,
    OwnJob,
    SeenJob,
    allow,
    own_job,
)
from distribai.orchestrator.idempotency import key_for
from distribai.orchestrator.jobs import generation, queries

MAX_WAIT_S = 600.0
"""The longest that a request for a sample is held."""

MAX_VERSION = 2**31 - 1
"""The largest number that a version can have."""

VersionQuery = Annotated[int | None, Query(ge=0, le=MAX_VERSION)]

router = APIRouter(prefix="/jobs", tags=["weights"])


class GenerateBody(BaseModel):
    """A prompt, and how to go on from it. Temperature 0 always takes the likeliest token."""

    model_config = ConfigDict(extra="forbid")

    prompt: Annotated[str, Field(max_length=100_000)] = ""
    version: Annotated[int | None, Field(ge=0, le=MAX_VERSION)] = None
    max_tokens: Annotated[int, Field(ge=1, le=4096)] = 200
    temperature: Annotated[float, Field(ge=0, le=10)] = 0.8
    seed: Annotated[int, Field(ge=0, lt=2**31)] = 0
    timeout: Annotated[float, Field(gt=0, le=MAX_WAIT_S)] = 120.0


@router.get(
    "/{ref}/weights",
    summary="Fetch weights",
    response_class=Response,
    responses=RANGES,
)
@allow(Access.VIEWERS)
async def fetch_weights(
    job_id: SeenJob,
    request: Request,
    grid: GridOf,
    caller: Caller,
    version: VersionQuery = None,
    follow: FollowHeader = "",
) -> Response:
    """The safetensors of one version (the latest by default). ``ETag`` is the file's SHA-256,
    ``X-DistribAI-Version`` the version; ``Range`` works."""
    record = await queries.show_job(grid, job_id)
    number, blob = await queries.weights_blob(grid, record.id, version, caller.owner)
    safe = re.sub(r"[^A-Za-z0-9._-]+", "-", record.name).strip("-.") or record.id
    return await blob_response(
        request,
        grid.blobs,
        blob,
        headers={
            "Content-Disposition": f'attachment; filename="{safe}-v{number}.safetensors"',
            "X-DistribAI-Version": str(number),
        },
        presigner=grid.presigner if follow else None,
    )


@router.post("/{ref}/generate", summary="Sample from a version")
@allow(Access.MEMBERS, Scope.SUBMIT)
async def generate(
    job_id: OwnJob,
    body: GenerateBody,
    grid: GridOf,
    caller: Caller,
    ask_again: AskAgain,
    idempotency_key: IdempotencyKey = None,
) -> answers.Generation:
    """A task on a node; the answer comes when the node has it, at the latest after ``timeout``.

    With an idempotency key the task stays after that, and the same request again waits for it."""
    asked = body.model_dump(exclude={"timeout"})
    key = key_for(caller.owner, "generate", idempotency_key, {"job": job_id, **asked})
    task_id = await generation.request_generation(
        grid, job_id, body.version, body.prompt, body.max_tokens, body.temperature, body.seed, key
    )
    task = await queries.wait_for_task(grid, task_id, body.timeout)
    if task.state == TaskState.ACCEPTED:
        await own_job(job_id, grid, await ask_again())  # minutes may have passed
        # The task's own version: with a key it may be one of an earlier request.
        return answers.Generation(
            task_id=task_id, version=task.round, prompt=body.prompt, text=task.text
        )
    if task.state in (TaskState.FAILED, TaskState.REJECTED, TaskState.CANCELLED):
        raise Conflict(
            "task.failed",
            f"The sample could not be made: {task.reason or task.state}.",
            f"`distribai job logs {job_id}` may say more.",
        )
    if key is None:
        await generation.withdraw_generation(grid, task_id, "nobody waits for it any more")
    raise Unavailable(
        "task.timeout",
        f"No node has answered within {body.timeout:g} s; the task is {task.state}.",
        "Nodes that train take it between two tasks. See whether there is one: "
        "`distribai nodes list`; or wait longer: `--timeout SECONDS`.",
    )
