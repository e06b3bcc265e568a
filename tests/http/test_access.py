"""Every route against every role."""

from __future__ import annotations

import httpx
import pytest

from distribai.orchestrator.context import Grid
from distribai.orchestrator.http.app import create_app
from tests.http.conftest import caller
from tests.http.stand_in import NODE, OPERATOR, Orchestrator

EVERYONE = {
    ("GET", "/healthz"),
    ("GET", "/readyz"),
    ("GET", "/api/v1/openapi.json"),
    ("GET", "/api/v1/ca"),
}
NODES = {
    ("POST", "/api/v1/blobs"),
    ("HEAD", "/api/v1/blobs/uploads/{upload_id}"),
    ("PATCH", "/api/v1/blobs/uploads/{upload_id}"),
    ("GET", "/api/v1/blobs/{sha256}"),
    ("HEAD", "/api/v1/blobs/{sha256}"),
}
OPERATORS = {
    ("GET", "/api/v1/health"),
    ("GET", "/metrics"),
    ("GET", "/api/v1/nodes"),
    ("GET", "/api/v1/nodes/{ref}/why"),
    ("GET", "/api/v1/nodes/{ref}/events"),
    ("GET", "/api/v1/jobs"),
    ("POST", "/api/v1/jobs"),
    ("POST", "/api/v1/jobs/plan"),
    ("GET", "/api/v1/jobs/{ref}"),
    ("POST", "/api/v1/jobs/{ref}/accept"),
    ("POST", "/api/v1/jobs/{ref}/decline"),
    ("POST", "/api/v1/jobs/{ref}/cancel"),
    ("POST", "/api/v1/jobs/{ref}/pause"),
    ("POST", "/api/v1/jobs/{ref}/resume"),
    ("POST", "/api/v1/jobs/{ref}/retry"),
    ("POST", "/api/v1/jobs/{ref}/weight"),
    ("POST", "/api/v1/nodes/{ref}/pause"),
    ("POST", "/api/v1/nodes/{ref}/resume"),
    ("POST", "/api/v1/nodes/{ref}/drain"),
    ("POST", "/api/v1/nodes/{ref}/quarantine"),
    ("POST", "/api/v1/nodes/{ref}/trust"),
    ("POST", "/api/v1/nodes/{ref}/ban"),
    ("POST", "/api/v1/nodes/{ref}/pardon"),
    ("GET", "/api/v1/jobs/{ref}/rounds"),
    ("GET", "/api/v1/jobs/{ref}/tasks"),
    ("GET", "/api/v1/jobs/{ref}/versions"),
    ("GET", "/api/v1/jobs/{ref}/events"),
    ("GET", "/api/v1/jobs/{ref}/why"),
    ("GET", "/api/v1/jobs/{ref}/logs"),
    ("GET", "/api/v1/jobs/{ref}/weights"),
    ("POST", "/api/v1/jobs/{ref}/generate"),
    ("GET", "/api/v1/events"),
    ("GET", "/api/v1/webhooks"),
    ("POST", "/api/v1/webhooks"),
    ("GET", "/api/v1/webhooks/{webhook_id}"),
    ("DELETE", "/api/v1/webhooks/{webhook_id}"),
    ("POST", "/api/v1/webhooks/{webhook_id}/test"),
    ("POST", "/api/v1/webhooks/{webhook_id}/enable"),
    ("GET", "/api/v1/webhooks/{webhook_id}/deliveries"),
}
REFUSED = (401, 403)


def routes(grid: Grid) -> set[tuple[str, str]]:
    paths = create_app(grid).openapi()["paths"]
    return {(method.upper(), path) for path, methods in paths.items() for method in methods}


def test_the_matrix_names_every_route(grid: Grid) -> None:
    assert routes(grid) == EVERYONE | NODES | OPERATORS


async def status(client: httpx.AsyncClient, route: tuple[str, str]) -> int:
    method, path = route
    filled = path.replace("{", "").replace("}", "")
    return (await client.request(method, filled)).status_code


@pytest.mark.parametrize("route", sorted(EVERYONE | NODES | OPERATORS))
async def test_each_role_may_call_what_the_matrix_says(
    grid: Grid, rooms: Orchestrator, route: tuple[str, str]
) -> None:
    async with (
        caller(grid, "") as stranger,
        caller(grid, "forged") as forger,
        caller(grid, NODE) as node,
        caller(grid, OPERATOR) as operator,
    ):
        assert (await status(stranger, route) == 401) is (route not in EVERYONE)
        assert (await status(forger, route) == 401) is (route not in EVERYONE)
        assert (await status(node, route) == 403) is (route in OPERATORS)
        assert await status(operator, route) not in REFUSED


async def test_refusals_say_why_and_what_to_try(
    stranger: httpx.AsyncClient, node: httpx.AsyncClient
) -> None:
    missing = await stranger.get("/api/v1/jobs")
    assert missing.headers["www-authenticate"].startswith("Bearer")
    assert missing.json()["code"] == "auth.missing"
    assert "DISTRIBAI_TOKEN" in missing.json()["hint"]
    assert (await node.get("/api/v1/jobs")).json()["code"] == "auth.forbidden"
    basic = await stranger.get("/api/v1/jobs", headers={"Authorization": "Basic b3A6b3A="})
    assert basic.json()["code"] == "auth.missing"


async def test_a_route_that_forgets_about_access_is_the_operator_s_alone(
    grid: Grid, rooms: Orchestrator
) -> None:
    app = create_app(grid)

    @app.get("/forgotten")
    async def forgotten() -> dict[str, str]:
        return {}

    transport = httpx.ASGITransport(app)
    async with httpx.AsyncClient(transport=transport, base_url="http://grid") as client:
        assert (await client.get("/forgotten")).status_code == 401
        headers = {"Authorization": f"Bearer {NODE}"}
        assert (await client.get("/forgotten", headers=headers)).status_code == 403
