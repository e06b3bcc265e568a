"""Why nothing starts, a node's events, figures and request ids, as answered over HTTP."""

from __future__ import annotations

from dataclasses import replace

import httpx
import pytest
import structlog
from structlog.testing import capture_logs

from distribai.orchestrator.context import Grid
from distribai.orchestrator.http.app import create_app
from distribai.orchestrator.records import EventRecord
from tests.http.interface import caller
from tests.http.stand_in import NOW, OPERATOR, Orchestrator, node_record, spec


async def made(client: httpx.AsyncClient) -> str:
    from distribai.core.plain import to_plain

    answer = await client.post("/api/v1/jobs", json={"spec": to_plain(spec())})
    job_id: str = answer.json()["id"]
    return job_id


async def test_a_job_is_asked_why(operator: httpx.AsyncClient) -> None:
    job_id = await made(operator)
    answer = await operator.get(f"/api/v1/jobs/{job_id}/why")
    assert answer.status_code == 200
    assert answer.json()["waiting"] is True
    assert answer.json()["reasons"][0]["code"] == "decision"
    assert (await operator.get("/api/v1/jobs/nobody/why")).json()["code"] == "job.unknown"


async def test_a_node_is_asked_why_by_its_name(
    operator: httpx.AsyncClient, rooms: Orchestrator
) -> None:
    rooms.nodes.append(node_record("one"))
    answer = (await operator.get("/api/v1/nodes/one/why")).json()
    assert answer["id"] == "node_one"
    assert answer["devices"][0]["phase"] == "train"
    assert (await operator.get("/api/v1/nodes/two/why")).json()["code"] == "node.unknown"


async def test_a_node_s_events_go_on_behind_a_cursor(
    operator: httpx.AsyncClient, rooms: Orchestrator
) -> None:
    rooms.nodes.append(node_record("one"))
    for number in range(3):
        rooms.events.append(EventRecord(str(number + 1), NOW, "node.online", "", "", "node_one"))
    first = (await operator.get("/api/v1/nodes/one/events?limit=2")).json()["items"]
    assert [e["cursor"] for e in first] == ["1", "2"]
    rest = (await operator.get("/api/v1/nodes/one/events?after=2")).json()["items"]
    assert [e["cursor"] for e in rest] == ["3"]
    assert (await operator.get("/api/v1/nodes/one/events?wait=61")).status_code == 422


async def test_figures_are_the_operator_s_unless_the_setting_opens_them(
    grid: Grid, rooms: Orchestrator, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def page(_: Grid) -> bytes:
        return b"distribai_streams 0\n"

    monkeypatch.setattr(grid.metrics, "page", page)
    async with caller(grid, "") as stranger, caller(grid, OPERATOR) as operator:
        assert (await stranger.get("/metrics")).status_code == 401
        assert (await operator.get("/metrics")).text == "distribai_streams 0\n"
        grid.settings = replace(grid.settings, open_metrics=True)
        answer = await stranger.get("/metrics")
    assert answer.status_code == 200
    assert answer.headers["content-type"].startswith("text/plain; version=0.0.4")


async def test_requests_are_counted_by_their_route_s_template(
    grid: Grid, rooms: Orchestrator
) -> None:
    async with caller(grid, OPERATOR) as operator:
        await operator.get("/api/v1/jobs/one")
        await operator.get("/api/v1/jobs/two")
        await operator.get("/what/somebody/made/up")

    def counted(route: str) -> float | None:
        labels = {"method": "GET", "route": route, "status": "404"}
        return grid.metrics.registry.get_sample_value("distribai_http_requests_total", labels)

    assert counted("/api/v1/jobs/{ref}") == 2
    assert counted("none") == 1


@pytest.mark.parametrize("given", ["abc-1.2_3", "x" * 64])
async def test_a_well_formed_request_id_is_taken_over(
    operator: httpx.AsyncClient, given: str
) -> None:
    answer = await operator.get("/api/v1/jobs/nobody", headers={"X-Request-Id": given})
    assert answer.headers["x-request-id"] == given
    assert answer.json()["request_id"] == given


@pytest.mark.parametrize("given", ["", "x" * 65, "a b", "a\tb", "<script>"])
async def test_any_other_request_id_is_replaced(operator: httpx.AsyncClient, given: str) -> None:
    answer = await operator.get("/healthz", headers={"X-Request-Id": given})
    assert answer.headers["x-request-id"].startswith("req_")


async def test_a_defect_s_answer_and_every_line_about_it_carry_the_request_id(
    grid: Grid, rooms: Orchestrator
) -> None:
    app = create_app(grid)

    @app.get("/defect")
    async def defect() -> None:
        structlog.get_logger("distribai.test").info("inside")
        raise RuntimeError("a defect")

    transport = httpx.ASGITransport(app, raise_app_exceptions=False)
    headers = {"Authorization": f"Bearer {OPERATOR}", "X-Request-Id": "mine"}
    merge = [structlog.contextvars.merge_contextvars]
    with capture_logs(processors=merge) as lines:
        async with httpx.AsyncClient(transport=transport, base_url="http://grid") as client:
            answer = await client.get("/defect", headers=headers)
    assert answer.status_code == 500
    assert answer.headers["x-request-id"] == "mine"
    assert answer.json()["request_id"] == "mine"
    assert {"inside", "defect", "request"} <= {line["event"] for line in lines}
    assert {line["request_id"] for line in lines} == {"mine"}
    labels = {"method": "GET", "route": "/defect", "status": "500"}
    assert grid.metrics.registry.get_sample_value("distribai_http_requests_total", labels) == 1
