"""Jobs over HTTP."""

from __future__ import annotations

import asyncio
import dataclasses
from typing import Any

import httpx
import pytest

from distribai.api import answers
from distribai.core.plain import to_plain
from distribai.core.spec import BlobRef
from distribai.orchestrator import records
from distribai.orchestrator.context import Grid
from distribai.orchestrator.http import jobs as jobs_module
from tests.http.stand_in import Orchestrator, log_record, node_record, running, spec

JOBS = "/api/v1/jobs"


async def create(client: httpx.AsyncClient, name: str = "my-model", key: str = "") -> str:
    headers = {"Idempotency-Key": key} if key else {}
    made = await client.post(JOBS, json={"spec": to_plain(spec(name))}, headers=headers)
    assert made.status_code == 201, made.text
    job_id: str = made.json()["id"]
    return job_id


async def test_a_job_is_created_decided_and_shown(operator: httpx.AsyncClient) -> None:
    job_id = await create(operator)
    shown = (await operator.get(f"{JOBS}/my-model")).json()
    assert (shown["id"], shown["state"], shown["created_by"]) == (job_id, "submitted", "operator")
    assert shown["spec"] == to_plain(spec())
    accepted = await operator.post(f"{JOBS}/{job_id}/accept")
    assert accepted.json() == {"id": job_id, "state": "queued"}


async def test_the_same_idempotency_key_is_the_same_job(operator: httpx.AsyncClient) -> None:
    assert await create(operator, key="k") == await create(operator, key="k")
    assert await create(operator, key="other") != await create(operator)


async def test_the_plan_creates_nothing(operator: httpx.AsyncClient, rooms: Orchestrator) -> None:
    rooms.nodes = [node_record("a"), node_record("b"), node_record("c")]
    body = {"spec": to_plain(spec())}
    planned = (await operator.post(f"{JOBS}/plan", json=body)).json()
    assert planned["spec"] == to_plain(spec())
    assert (planned["plan"]["nodes"], planned["plan"]["rounds"]) == (3, 20)
    assert (planned["here"], planned["resting"]) == (3, 0)
    assert len(planned["forecast"]["nodes"]) == spec().workers_min
    assert planned["forecast"]["assumed"][0].startswith("no node is here yet")
    assert set(planned["proposal"]) == {"changes", "reason", "forecast"}
    for_eight = await operator.post(f"{JOBS}/plan", params={"nodes": 8}, json=body)
    assert for_eight.json()["plan"]["nodes"] == 8
    assert not rooms.jobs


@pytest.mark.parametrize(
    ("change", "code", "field"),
    [
        ({"steps": 0}, "spec.steps", "steps"),
        ({"steps": "many"}, "spec.invalid", "steps"),
        ({"stepz": 5}, "spec.invalid", "spec"),
        ({"optimizer": {"name": "adamw", "lr": "fast"}}, "spec.invalid", "optimizer.lr"),
        ({"workers_min": 9, "workers_max": 3}, "spec.workers", "workers_max"),
    ],
)
async def test_a_spec_that_cannot_run_is_refused_with_its_field(
    operator: httpx.AsyncClient, change: dict[str, Any], code: str, field: str
) -> None:
    body = {"spec": {**to_plain(spec()), **change}}
    refused = await operator.post(f"{JOBS}/plan", json=body)
    assert refused.status_code == 422
    assert refused.headers["content-type"] == "application/problem+json"
    assert (refused.json()["code"], refused.json()["field"]) == (code, field)


@pytest.mark.parametrize("body", [{}, {"spec": 5}, {"spec": {}, "more": 1}, [], "text", None])
async def test_another_body_than_a_spec_is_refused_with_paths(
    operator: httpx.AsyncClient, body: object
) -> None:
    refused = await operator.post(JOBS, json=body)
    assert refused.status_code == 422
    assert refused.json()["code"] in ("usage.invalid", "spec.invalid")


async def test_what_the_state_forbids_is_a_conflict(operator: httpx.AsyncClient) -> None:
    job_id = await create(operator)
    declined = await operator.post(f"{JOBS}/{job_id}/decline", json={"why": "too large"})
    assert declined.json()["state"] == "declined"
    again = await operator.post(f"{JOBS}/{job_id}/accept")
    assert (again.status_code, again.json()["code"]) == (409, "state.transition")
    assert (await operator.get(f"{JOBS}/{job_id}")).json()["reason"] == "too large"


async def test_declining_takes_a_reason_and_cancelling_may_have_one(
    operator: httpx.AsyncClient,
) -> None:
    job_id = await create(operator)
    silent = await operator.post(f"{JOBS}/{job_id}/decline", json={"why": ""})
    assert (silent.status_code, silent.json()["field"]) == (422, "why")
    assert (await operator.post(f"{JOBS}/{job_id}/cancel")).json()["state"] == "cancelled"
    other = await create(operator, "other")
    await operator.post(f"{JOBS}/{other}/cancel", json={"why": "enough"})
    assert (await operator.get(f"{JOBS}/{other}")).json()["reason"] == "enough"


async def test_pause_and_resume_change_a_running_job(
    operator: httpx.AsyncClient, rooms: Orchestrator
) -> None:
    job_id = await create(operator)
    rooms.jobs[job_id] = running(rooms.jobs[job_id])
    assert (await operator.post(f"{JOBS}/{job_id}/pause")).json()["state"] == "paused"
    assert (await operator.post(f"{JOBS}/{job_id}/resume")).json()["state"] == "running"


async def test_lists_come_in_pages(operator: httpx.AsyncClient) -> None:
    made = [await create(operator, f"job-{n}") for n in range(5)]
    first = (await operator.get(JOBS, params={"limit": 3})).json()
    rest = await operator.get(JOBS, params={"limit": 3, "cursor": first["next_cursor"]})
    found = [j["id"] for j in [*first["items"], *rest.json()["items"]]]
    assert found == made[::-1]
    assert rest.json()["next_cursor"] == ""
    assert (await operator.get(JOBS, params={"state": "running"})).json()["items"] == []
    assert (await operator.get(JOBS, params={"state": "sleeping"})).json()["field"] == "state"
    assert (await operator.get(JOBS, params={"limit": 0})).json()["field"] == "limit"


async def test_details_are_listed(operator: httpx.AsyncClient, rooms: Orchestrator) -> None:
    job_id = await create(operator)
    rooms.weights[job_id] = [BlobRef("cd" * 32, 5)]
    rooms.logs = [log_record(1, "hello")]
    assert (await operator.get(f"{JOBS}/{job_id}/rounds")).json()["items"][0]["accepted"] == 1
    assert (await operator.get(f"{JOBS}/{job_id}/tasks")).json() == {
        "items": [],
        "next_cursor": "",
    }
    versions = (await operator.get(f"{JOBS}/{job_id}/versions")).json()["items"]
    assert versions[0]["weights"] == {"sha256": "cd" * 32, "size": 5}
    assert (await operator.get(f"{JOBS}/{job_id}/logs")).json()["items"][0]["message"] == "hello"
    rooms.nodes = [node_record("a")]
    assert (await operator.get("/api/v1/nodes")).json()["items"][0]["name"] == "a"


async def test_a_loss_that_is_no_number_is_null(
    operator: httpx.AsyncClient, rooms: Orchestrator
) -> None:
    job_id = await create(operator)
    job = running(rooms.jobs[job_id])
    assert job.round is not None
    diverged = dataclasses.replace(job.round, mean_loss=float("nan"))
    rooms.jobs[job_id] = dataclasses.replace(job, round=diverged)
    assert (await operator.get(f"{JOBS}/{job_id}")).json()["round"]["mean_loss"] is None


async def test_an_unknown_job_is_said_on_every_path(operator: httpx.AsyncClient) -> None:
    for tail in ("", "/rounds", "/tasks", "/versions", "/events", "/logs", "/weights"):
        missing = await operator.get(f"{JOBS}/nothing{tail}")
        assert (missing.status_code, missing.json()["code"]) == (404, "job.unknown")


async def test_events_go_on_behind_a_cursor(operator: httpx.AsyncClient) -> None:
    job_id = await create(operator)
    await operator.post(f"{JOBS}/{job_id}/accept")
    events = (await operator.get(f"{JOBS}/{job_id}/events")).json()["items"]
    assert [e["kind"] for e in events] == ["job.submitted", "job.queued"]
    behind = await operator.get(f"{JOBS}/{job_id}/events", params={"after": events[0]["cursor"]})
    assert [e["kind"] for e in behind.json()["items"]] == ["job.queued"]


async def test_a_waiting_request_is_answered_when_something_happens(
    operator: httpx.AsyncClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(jobs_module, "POLL_S", 0.001)
    job_id = await create(operator)
    waiting = asyncio.create_task(
        operator.get(f"{JOBS}/{job_id}/events", params={"after": "1", "wait": 60})
    )
    await asyncio.sleep(0)
    await operator.post(f"{JOBS}/{job_id}/accept")
    assert [e["kind"] for e in (await waiting).json()["items"]] == ["job.queued"]


async def test_waiting_ends_with_an_empty_answer(operator: httpx.AsyncClient, grid: Grid) -> None:
    times = iter(float(n) for n in range(1000))
    grid.clock = lambda: next(times)
    job_id = await create(operator)
    empty = await operator.get(f"{JOBS}/{job_id}/events", params={"after": "1", "wait": 1})
    assert empty.json() == {"items": [], "cursor": "1"}


async def test_health_tells_what_is_wrong_and_the_probes_only_whether_to_send_anybody_here(
    operator: httpx.AsyncClient, stranger: httpx.AsyncClient, rooms: Orchestrator
) -> None:
    assert (await stranger.get("/healthz")).json() == {"status": "ok"}
    assert (await stranger.get("/readyz")).status_code == 200
    rooms.problems = ("The disk is full.",)
    assert (await operator.get("/api/v1/health")).json()["problems"] == ["The disk is full."]
    assert (await stranger.get("/readyz")).status_code == 200, "the others have it as well"
    rooms.away = True
    not_ready = await stranger.get("/readyz")
    assert (not_ready.status_code, not_ready.json()) == (503, {"status": "not ready"})


@pytest.mark.parametrize(
    ("record", "answer"),
    [
        (getattr(records, name), getattr(answers, name))
        for name in (
            "JobSummary",
            "RoundProgress",
            "HeldOut",
            "ByteTotals",
            "JobRecord",
            "MemberRecord",
            "RoundRecord",
            "CauseRecord",
            "TaskRecord",
            "VersionRecord",
            "EventRecord",
            "LogRecord",
            "DeviceRecord",
            "NodeRecord",
            "GridSummary",
            "Page",
        )
    ],
)
def test_answers_have_the_fields_of_the_records(record: Any, answer: Any) -> None:
    assert [f.name for f in dataclasses.fields(record)] == list(answer.model_fields)
