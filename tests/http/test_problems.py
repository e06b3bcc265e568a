"""The one shape of every failure, and what happens around every request."""

from __future__ import annotations

from collections.abc import AsyncIterator

import httpx
import pytest

from distribai.errors import Unavailable
from distribai.orchestrator.context import Grid
from distribai.orchestrator.fleet import queries
from distribai.orchestrator.http.bodies import MAX_BODY
from tests.http.stand_in import Orchestrator

MEMBERS = {"type", "title", "status", "detail", "code", "hint", "field", "request_id"}


async def test_paths_and_methods_that_do_not_exist_are_problems(
    operator: httpx.AsyncClient,
) -> None:
    path = await operator.get("/api/v1/nothing")
    assert (path.status_code, path.json()["code"]) == (404, "http.path")
    assert path.headers["content-type"] == "application/problem+json"
    assert set(path.json()) == MEMBERS
    method = await operator.delete("/api/v1/jobs")
    assert (method.status_code, method.json()["code"]) == (405, "http.method")
    assert method.headers["allow"]


async def test_a_body_that_is_no_json_is_a_problem(operator: httpx.AsyncClient) -> None:
    broken = await operator.post("/api/v1/jobs", content=b'{"spec": ')
    assert (broken.status_code, broken.json()["code"]) == (422, "usage.invalid")


@pytest.mark.parametrize(
    ("body", "advice"),
    [
        ({"steps": -1}, "Give steps another value"),
        ({"stepz": 1}, "Leave stepz out"),
        (["steps"], "Send a JSON object"),
    ],
)
async def test_what_cannot_be_read_says_what_to_do_about_it(
    operator: httpx.AsyncClient, body: object, advice: str
) -> None:
    refused = await operator.put("/api/v1/organizations/lab/quota", json=body)
    assert (refused.status_code, refused.json()["code"]) == (422, "usage.invalid")
    assert refused.json()["hint"].startswith(advice)


async def test_a_body_that_is_too_large_is_refused_while_it_is_read(
    operator: httpx.AsyncClient,
) -> None:
    sent = 0

    async def endless() -> AsyncIterator[bytes]:
        nonlocal sent
        while True:
            sent += 1
            yield b" " * (1 << 20)

    large = await operator.post(
        "/api/v1/jobs", content=endless(), headers={"Content-Type": "application/json"}
    )
    assert (large.status_code, large.json()["code"]) == (413, "http.too_large")
    assert sent == MAX_BODY // (1 << 20) + 1


async def test_every_answer_names_its_request(operator: httpx.AsyncClient) -> None:
    given = await operator.get("/api/v1/nothing", headers={"X-Request-ID": "mine-1"})
    assert given.headers["x-request-id"] == given.json()["request_id"] == "mine-1"
    odd = await operator.get("/api/v1/nothing", headers={"X-Request-ID": "a b\tc"})
    assert odd.json()["request_id"].startswith("req_")
    first, second = [(await operator.get("/healthz")).headers["x-request-id"] for _ in "ab"]
    assert first != second


async def test_a_defect_tells_nothing_of_its_inside(
    operator: httpx.AsyncClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def broken(grid: Grid, organizations: object) -> None:
        raise RuntimeError("a secret")

    monkeypatch.setattr(queries, "summary", broken)
    fault = await operator.get("/api/v1/health")
    assert (fault.status_code, fault.json()["code"]) == (500, "internal.fault")
    assert "secret" not in fault.text
    assert fault.json()["request_id"]


async def test_what_may_pass_invites_to_try_again(
    operator: httpx.AsyncClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def away(grid: Grid, organizations: object) -> None:
        raise Unavailable("blob.store", "The disk is full.", "Free some space.")

    monkeypatch.setattr(queries, "summary", away)
    answer = await operator.get("/api/v1/health")
    assert (answer.status_code, answer.headers["retry-after"]) == (503, "1")
    assert answer.json()["hint"] == "Free some space."


async def test_the_description_is_public_and_complete(
    stranger: httpx.AsyncClient, rooms: Orchestrator
) -> None:
    described = (await stranger.get("/api/v1/openapi.json")).json()
    assert described["info"]["title"] == "DistribAI"
    for path, methods in described["paths"].items():
        for method, operation in methods.items():
            assert operation["summary"], f"{method} {path} has no summary"
