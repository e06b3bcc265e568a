"""Every route and every RPC against every role: what a role may call at all."""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterable, Iterator
from pathlib import Path

import httpx
import pytest
from fastapi import APIRouter, FastAPI, WebSocket
from fastapi.routing import APIRoute
from starlette.routing import BaseRoute

from distribai.core.people import Role, Scope
from distribai.core.scan import modules
from distribai.errors import Unauthenticated
from distribai.orchestrator.context import Grid
from distribai.orchestrator.fleet import standing
from distribai.orchestrator.grpc import serve
from distribai.orchestrator.http.app import create_app
from distribai.orchestrator.people import commands, credentials
from distribai.wire.v1 import distribai_pb2 as pb
from tests.http.stand_in import NODE, Orchestrator
from tests.http.town import Town, town_on
from tests.orchestrator.harness import breathe
from tests.store.databases import new_sqlite

V1 = "/api/v1"
O, M, V, C, A, N = "operator", "member", "viewer", "contributor", "account", "node"  # noqa: E741
"""The callers: four roles, an account without any, and a node's session."""

ANYBODY = frozenset({"stranger", "forger", O, M, V, C, A, N})
ACCOUNTS = frozenset({O, M, V, C, A})
SEE = frozenset({O, M, V})
WORK = frozenset({O, M})
DECIDE = frozenset({O})

R, S, K, D, F = Scope.READ, Scope.SUBMIT, Scope.KEYS, Scope.OPERATE, Scope.METRICS

ROUTES: dict[tuple[str, str], tuple[frozenset[str], Scope | None]] = {
    ("GET", "/healthz"): (ANYBODY, None),
    ("GET", "/readyz"): (ANYBODY, None),
    ("GET", f"{V1}/openapi.json"): (ANYBODY, None),
    ("GET", f"{V1}/ca"): (ANYBODY, None),
    ("GET", f"{V1}/certificates/challenge"): (ANYBODY, None),
    ("POST", f"{V1}/certificates"): (ANYBODY, None),
    ("POST", f"{V1}/login"): (ANYBODY, None),
    ("GET", "/metrics"): (DECIDE, F),
    ("GET", f"{V1}/health"): (ACCOUNTS, R),
    ("GET", f"{V1}/me"): (ACCOUNTS, R),
    ("POST", f"{V1}/blobs"): (WORK | {N}, S),
    ("HEAD", f"{V1}/blobs/uploads/{{upload_id}}"): (WORK | {N}, S),
    ("PATCH", f"{V1}/blobs/uploads/{{upload_id}}"): (WORK | {N}, S),
    ("GET", f"{V1}/blobs/{{sha256}}"): (SEE | {N}, R),
    ("HEAD", f"{V1}/blobs/{{sha256}}"): (SEE | {N}, R),
    ("POST", f"{V1}/blobs/{{sha256}}/fetched"): (SEE | {N}, R),
    ("GET", f"{V1}/nodes"): (ACCOUNTS, R),
    ("GET", f"{V1}/nodes/{{ref}}/why"): (ACCOUNTS, R),
    ("GET", f"{V1}/nodes/{{ref}}/events"): (ACCOUNTS, R),
    ("POST", f"{V1}/nodes/{{ref}}/pause"): (DECIDE, D),
    ("POST", f"{V1}/nodes/{{ref}}/resume"): (DECIDE, D),
    ("POST", f"{V1}/nodes/{{ref}}/drain"): (DECIDE, D),
    ("POST", f"{V1}/nodes/{{ref}}/quarantine"): (DECIDE, D),
    ("POST", f"{V1}/nodes/{{ref}}/trust"): (DECIDE, D),
    ("POST", f"{V1}/nodes/{{ref}}/ban"): (DECIDE, D),
    ("POST", f"{V1}/nodes/{{ref}}/pardon"): (DECIDE, D),
    ("GET", f"{V1}/events"): (DECIDE, R),
    ("GET", f"{V1}/webhooks"): (DECIDE, R),
    ("POST", f"{V1}/webhooks"): (DECIDE, D),
    ("GET", f"{V1}/webhooks/{{webhook_id}}"): (DECIDE, R),
    ("DELETE", f"{V1}/webhooks/{{webhook_id}}"): (DECIDE, D),
    ("POST", f"{V1}/webhooks/{{webhook_id}}/test"): (DECIDE, D),
    ("POST", f"{V1}/webhooks/{{webhook_id}}/enable"): (DECIDE, D),
    ("GET", f"{V1}/webhooks/{{webhook_id}}/deliveries"): (DECIDE, R),
    ("GET", f"{V1}/jobs"): (SEE, R),
    ("POST", f"{V1}/jobs"): (WORK, S),
    ("POST", f"{V1}/jobs/plan"): (WORK, R),
    ("GET", f"{V1}/jobs/{{ref}}"): (SEE, R),
    ("POST", f"{V1}/jobs/{{ref}}/accept"): (DECIDE, D),
    ("POST", f"{V1}/jobs/{{ref}}/decline"): (DECIDE, D),
    ("POST", f"{V1}/jobs/{{ref}}/cancel"): (WORK, S),
    ("POST", f"{V1}/jobs/{{ref}}/pause"): (WORK, S),
    ("POST", f"{V1}/jobs/{{ref}}/resume"): (WORK, S),
    ("POST", f"{V1}/jobs/{{ref}}/retry"): (WORK, S),
    ("POST", f"{V1}/jobs/{{ref}}/weight"): (DECIDE, D),
    ("GET", f"{V1}/jobs/{{ref}}/rounds"): (SEE, R),
    ("GET", f"{V1}/jobs/{{ref}}/tasks"): (SEE, R),
    ("GET", f"{V1}/jobs/{{ref}}/versions"): (SEE, R),
    ("GET", f"{V1}/jobs/{{ref}}/events"): (SEE, R),
    ("GET", f"{V1}/jobs/{{ref}}/why"): (SEE, R),
    ("GET", f"{V1}/jobs/{{ref}}/logs"): (SEE, R),
    ("GET", f"{V1}/jobs/{{ref}}/weights"): (SEE, R),
    ("POST", f"{V1}/jobs/{{ref}}/generate"): (WORK, S),
    ("GET", f"{V1}/accounts"): (DECIDE, R),
    ("POST", f"{V1}/accounts"): (DECIDE, D),
    ("GET", f"{V1}/accounts/{{account}}"): (ACCOUNTS, R),
    ("POST", f"{V1}/accounts/{{account}}/login"): (DECIDE, D),
    ("POST", f"{V1}/accounts/{{account}}/close"): (DECIDE, D),
    ("GET", f"{V1}/organizations"): (ACCOUNTS, R),
    ("POST", f"{V1}/organizations"): (DECIDE, D),
    ("GET", f"{V1}/organizations/{{organization}}"): (ACCOUNTS, R),
    ("PUT", f"{V1}/organizations/{{organization}}/members/{{account}}"): (DECIDE, D),
    ("DELETE", f"{V1}/organizations/{{organization}}/members/{{account}}"): (DECIDE, D),
    ("PUT", f"{V1}/organizations/{{organization}}/policy"): (DECIDE, D),
    ("PUT", f"{V1}/organizations/{{organization}}/quota"): (DECIDE, D),
    ("GET", f"{V1}/keys"): (ACCOUNTS, R),
    ("POST", f"{V1}/keys"): (ACCOUNTS, K),
    ("DELETE", f"{V1}/keys/{{key_id}}"): (ACCOUNTS, K),
    ("GET", f"{V1}/invites"): (DECIDE, R),
    ("POST", f"{V1}/invites"): (DECIDE, D),
    ("DELETE", f"{V1}/invites/{{invite_id}}"): (DECIDE, D),
    ("GET", f"{V1}/audit"): (DECIDE, R),
}

EVERYONE = {route for route, (allowed, _) in ROUTES.items() if allowed == ANYBODY}

RPCS = {("NodeService", "Session"): "a node, by its key's signature over the challenge"}
"""Every RPC, and who may call it."""

MESSAGES = {
    "register": "anybody, as the first message of a stream; never again",
    "heartbeat": "a registered node",
    "task_accept": "a registered node",
    "task_progress": "a registered node",
    "task_result": "a registered node, signed with its key",
    "log": "a registered node",
}
"""Every message that a node may send, and who may send it. About whose tasks:
``tests/orchestrator/test_impostor.py``."""


@pytest.fixture
async def town(tmp_path: Path) -> AsyncIterator[Town]:
    made = await town_on(tmp_path, await new_sqlite(tmp_path))
    yield made
    await made.world.close()


def routes(app: FastAPI) -> set[tuple[str, str]]:
    """Every route that is described."""
    paths = app.openapi()["paths"]
    return {(method.upper(), path) for path, methods in paths.items() for method in methods}


def hidden(served: Iterable[BaseRoute]) -> Iterator[str]:
    """What is served and not described: mounts, websockets, routes that want to be left out."""
    for route in served:
        inner = getattr(route, "original_router", None)  # a router, as FastAPI keeps it
        if inner is not None:
            yield from hidden(inner.routes)
        elif not isinstance(route, APIRoute) or not route.include_in_schema:
            yield str(getattr(route, "path", route))


def test_the_matrix_names_every_route(grid: Grid) -> None:
    app = create_app(grid)
    assert routes(app) == ROUTES.keys()
    assert list(hidden(app.routes)) == []


def test_a_route_that_nobody_entered_is_noticed_however_it_came(grid: Grid) -> None:
    app = create_app(grid)
    router = APIRouter()

    @app.get("/new")
    async def new() -> None: ...

    @router.get("/hidden", include_in_schema=False)
    async def left_out() -> None: ...

    @router.websocket("/talk")
    async def talk(socket: WebSocket) -> None: ...

    app.include_router(router)
    app.mount("/files", FastAPI())
    assert routes(app) - ROUTES.keys() == {("GET", "/new")}
    assert set(hidden(app.routes)) == {"/hidden", "/talk", "/files"}


async def status(client: httpx.AsyncClient, route: tuple[str, str]) -> int:
    method, path = route
    filled = path.replace("{", "").replace("}", "")
    return (await client.request(method, filled)).status_code


async def test_each_role_may_call_what_the_matrix_says_and_nothing_else(town: Town) -> None:
    node = await town.node_of("carl")
    tokens_of = {
        O: town.keys["operator"],
        M: town.keys["ann"],
        V: town.keys["vera"],
        C: town.keys["carl"],
        A: town.keys["nils"],
        N: node.token,
        "stranger": "",
        "forger": "dak_forged",
    }
    wrong = {}
    for role, token in tokens_of.items():
        async with town.http_as(token) as client:
            for route, (allowed, _) in ROUTES.items():
                found = await status(client, route)
                refused = 401 if role in ("stranger", "forger") else 403
                if (found == refused) is (role in allowed) or found in {401, 403, 500} - {refused}:
                    wrong[role, route] = found
    assert wrong == {}


async def test_a_key_is_good_for_its_scopes_alone(town: Town) -> None:
    wrong = {}
    for scope in Scope:
        async with town.http_as(await town.narrow("operator", scope)) as client:
            for route, (_, wanted) in ROUTES.items():
                found = await status(client, route)
                if (found == 403) is (wanted in (scope, None)):
                    wrong[scope, route] = found
    assert wrong == {}


async def test_refusals_say_why_and_what_to_try(town: Town) -> None:
    async with town.http() as stranger:
        missing = await stranger.get("/api/v1/jobs")
        basic = await stranger.get("/api/v1/jobs", headers={"Authorization": "Basic b3A6b3A="})
    assert missing.headers["www-authenticate"].startswith("Bearer")
    assert missing.json()["code"] == basic.json()["code"] == "auth.missing"
    assert "DISTRIBAI_TOKEN" in missing.json()["hint"]
    async with town.http("vera") as viewer:
        refused = (await viewer.post("/api/v1/jobs", json={"spec": {}})).json()
    assert refused["code"] == "auth.forbidden"
    assert "member" in refused["hint"]
    async with town.http_as(await town.narrow("ann", Scope.READ)) as reader:
        refused = (await reader.post("/api/v1/jobs", json={"spec": {}})).json()
    assert "scope submit" in refused["detail"]


async def test_a_route_that_forgets_about_access_is_the_operators_alone(
    grid: Grid, rooms: Orchestrator, town: Town
) -> None:
    app = create_app(town.world.grid)

    @app.get("/forgotten")
    async def forgotten() -> dict[str, str]:
        return {}

    transport = httpx.ASGITransport(app)
    async with httpx.AsyncClient(transport=transport, base_url="http://grid") as client:
        assert (await client.get("/forgotten")).status_code == 401
        headers = {"Authorization": f"Bearer {NODE}"}
        assert (await client.get("/forgotten", headers=headers)).status_code == 403


# ------------------------------------------------------------------ the nodes' stream


def test_the_matrix_names_every_rpc() -> None:
    contracts = [m for m in modules("distribai.wire.v1") if hasattr(m, "DESCRIPTOR")]
    assert pb in contracts
    services = [s for m in contracts for s in m.DESCRIPTOR.services_by_name.values()]
    assert {(s.name, m.name) for s in services for m in s.methods} == RPCS.keys()


def test_the_matrix_names_every_message_of_a_node() -> None:
    assert {f.name for f in pb.NodeMessage.DESCRIPTOR.oneofs[0].fields} == MESSAGES.keys()


@pytest.mark.parametrize("kind", MESSAGES)
async def test_a_node_that_is_set_apart_says_nothing_more(town: Town, kind: str) -> None:
    node = await town.node_of("carl")
    session = town.world.grid.fleet.of(node.id)
    assert session is not None
    await standing.set_standing(town.world.grid, node.id, "quarantine", "it lies", "operator")
    await breathe()
    assert node.end is not None
    assert node.end.code == "node.quarantined"
    assert session.stream is None or session.stream.closed
    message = pb.NodeMessage()
    getattr(message, kind).SetInParent()
    before = (dict(session.in_hand), dict(session.progress), list(town.world.grid.fleet.logs))
    node.queue.put_nowait(message)
    await breathe()
    after = (dict(session.in_hand), dict(session.progress), list(town.world.grid.fleet.logs))
    assert after == before
    assert town.world.grid.fleet.of(node.id) is None


async def test_no_message_is_taken_from_a_stream_that_has_not_proved_its_key(town: Town) -> None:
    for kind in [f.name for f in pb.NodeMessage.DESCRIPTOR.oneofs[0].fields]:

        async def incoming(kind: str = kind) -> AsyncIterator[pb.NodeMessage]:
            message = pb.NodeMessage()
            getattr(message, kind).SetInParent()
            yield message

        told = [m.WhichOneof("body") async for m in serve(town.world.grid, incoming())]
        assert told == ["challenge", "session_end"], kind
    async with town.http("operator") as operator:
        assert (await operator.get("/api/v1/nodes")).json()["items"] == []


async def test_a_node_s_invite_says_whose_it_is_and_how_far_it_is_trusted(town: Town) -> None:
    node = await town.node_of("carl")
    own = await town.world.node("home")
    async with town.http("operator") as operator:
        nodes = {n["id"]: n for n in (await operator.get("/api/v1/nodes")).json()["items"]}
    assert nodes[node.id]["account_id"] == town.ids["carl"]
    assert nodes[node.id]["standing"] == "probation"
    assert nodes[own.id]["account_id"] == town.ids["operator"]
    assert nodes[own.id]["standing"] == "trusted"


async def test_what_a_key_may_is_asked_at_every_request(town: Town) -> None:
    async with town.http("ann") as client:
        assert (await client.get("/api/v1/jobs")).status_code == 200
        await commands.set_role(town.world.grid, "lab", "ann", Role.CONTRIBUTOR)
        assert (await client.get("/api/v1/jobs")).status_code == 403
        key = await town.principal("ann")
        await credentials.revoke_key(town.world.grid, key, key.key_id)
        assert (await client.get("/api/v1/me")).status_code == 401
    with pytest.raises(Unauthenticated):
        await town.principal("ann")
