"""Verbs for jobs and nodes over HTTP."""

from __future__ import annotations

import httpx
import pytest

from distribai.orchestrator.context import Grid
from tests.http.stand_in import Orchestrator, node_record, spec


async def test_a_retry_is_a_new_job_and_the_same_one_under_the_same_key(
    operator: httpx.AsyncClient, rooms: Orchestrator, grid: Grid
) -> None:
    job_id = await rooms.create_job(grid, spec(), None, "operator")
    made = await operator.post(f"/api/v1/jobs/{job_id}/retry", headers={"Idempotency-Key": "k"})
    assert made.status_code == 201
    assert made.headers["location"] == f"/api/v1/jobs/{made.json()['id']}"
    again = await operator.post(f"/api/v1/jobs/{job_id}/retry", headers={"Idempotency-Key": "k"})
    assert again.json()["id"] == made.json()["id"]
    shown = await operator.get(f"/api/v1/jobs/{made.json()['id']}")
    assert shown.json()["retry_of"] == job_id


async def test_a_weight_is_bounded(
    operator: httpx.AsyncClient, rooms: Orchestrator, grid: Grid
) -> None:
    job_id = await rooms.create_job(grid, spec(), None, "operator")
    path = f"/api/v1/jobs/{job_id}/weight"
    assert (await operator.post(path, json={"weight": 4})).status_code == 200
    assert rooms.jobs[job_id].weight == 4
    for wrong in (0, -1, 17, "heavy", None):
        assert (await operator.post(path, json={"weight": wrong})).status_code == 422


@pytest.mark.parametrize(("verb", "order"), [("pause", "pause"), ("drain", "drain")])
async def test_the_operator_orders_a_node(
    operator: httpx.AsyncClient, rooms: Orchestrator, verb: str, order: str
) -> None:
    rooms.nodes.append(node_record("a"))
    told = await operator.post(f"/api/v1/nodes/node_a/{verb}")
    assert (told.status_code, told.json()["ordered"]) == (200, order)
    told = await operator.post("/api/v1/nodes/node_a/resume")
    assert told.json()["ordered"] == "contribute"
    assert (await operator.post(f"/api/v1/nodes/node_x/{verb}")).status_code == 404


@pytest.mark.parametrize(
    ("verb", "standing"),
    [
        ("quarantine", "quarantined"),
        ("trust", "trusted"),
        ("ban", "banned"),
        ("pardon", "probation"),
    ],
)
async def test_a_standing_needs_a_reason(
    operator: httpx.AsyncClient, rooms: Orchestrator, verb: str, standing: str
) -> None:
    rooms.nodes.append(node_record("a"))
    path = f"/api/v1/nodes/node_a/{verb}"
    assert (await operator.post(path)).status_code == 422
    assert (await operator.post(path, json={"why": ""})).status_code == 422
    told = await operator.post(path, json={"why": "because"})
    assert (told.json()["standing"], told.json()["standing_reason"]) == (standing, "because")
