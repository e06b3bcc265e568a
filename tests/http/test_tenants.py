"""Two tenants on one grid: neither can read or change what is the other's, by any route.

``bob`` of mill walks every route with the ids and names of lab's things. Wherever an object is
named, the answer is the very one that an id gets which nobody has; no list and no answer has
anything of lab's in it; and afterwards all of lab's things are as they were.
"""

from __future__ import annotations

import json
import os
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import httpx
import pytest
from sqlalchemy import select

from distribai.core.people import Role, Scope
from distribai.core.plain import to_plain
from distribai.core.spec import BlobRef, DataSpec
from distribai.orchestrator.http.app import create_app
from distribai.orchestrator.jobs import commands as jobs
from distribai.orchestrator.people import commands, credentials
from distribai.store.tables import metadata
from tests.http.town import Town, town_on
from tests.store.databases import new_postgres, new_sqlite

V1 = "/api/v1"


@pytest.fixture
async def town(tmp_path: Path) -> AsyncIterator[Town]:
    made = await town_on(tmp_path, await new_sqlite(tmp_path))
    yield made
    await made.world.close()


@pytest.fixture(params=["sqlite", "postgresql"])
async def any_town(request: pytest.FixtureRequest, tmp_path: Path) -> AsyncIterator[Town]:
    if request.param == "sqlite":
        url = await new_sqlite(tmp_path)
    else:
        url = await new_postgres(request.getfixturevalue("postgres"))
    made = await town_on(tmp_path, url)
    yield made
    await made.world.close()


BODIES: dict[tuple[str, str], dict[str, Any]] = {
    ("POST", "/blobs/{sha256}/fetched"): {"bytes": 1},
    ("POST", "/jobs/{ref}/generate"): {"prompt": "x", "timeout": 0.01},
    ("POST", "/jobs/{ref}/decline"): {"why": "no"},
    ("POST", "/certificates"): {
        "public_key": "00" * 32,
        "challenge": "guessed",
        "request": "guessed",
        "signature": "00" * 64,
    },
    ("POST", "/login"): {"login": "dol_guessed"},
    ("POST", "/keys"): {"name": "mine"},
    ("POST", "/accounts"): {"name": "new"},
    ("POST", "/organizations"): {"name": "new"},
    ("PUT", "/organizations/{organization}/members/{account}"): {"role": "member"},
    ("PUT", "/organizations/{organization}/policy"): {"accept": "always"},
    ("PUT", "/organizations/{organization}/quota"): {},
}


async def things_of_lab(town: Town) -> dict[str, list[tuple[str, str]]]:
    """What lab has: for each parameter of a path (an id or a name, one that nobody has)."""
    made = await town.submit("ann", "secret-job")
    assert made.status_code == 201, made.text
    job = made.json()["id"]
    node = await town.node_of("carl")
    await jobs.accept_job(town.world.grid, job, "operator")
    await town.world.settle()
    await node.work()
    await town.world.settle()
    data = os.urandom(4000)
    async with town.http("ann") as ann:
        versions = (await ann.get(f"{V1}/jobs/{job}/versions")).json()["items"]
        weights = versions[0]["weights"]["sha256"]
        uploaded = await town.upload(ann, data)
        claim = {"sha256": "ab" * 32, "size": 10}
        upload = (await ann.post(f"{V1}/blobs", json=claim)).json()["upload_id"]
        key = (await ann.get(f"{V1}/keys")).json()["items"][0]["id"]
    invite = await credentials.create_invite(
        town.world.grid, "carl", trusted=True, uses=None, expires_s=None
    )
    async with town.http("operator") as operator:
        made = await operator.post(f"{V1}/webhooks", json={"url": "https://lab.example/hook"})
        hook = made.json()["id"]
    nobody = "aaaaaaaaaaaaaaaa"
    return {
        "ref": [
            (job, f"job_{nobody}"),
            (job[:10], f"job_{nobody}"[:10]),
            ("secret-job", "public-job"),
            (node.id, "node_" + 2 * nobody),
            ("carls-machine", "daves-machine"),
        ],
        "sha256": [(weights, "cd" * 32), (uploaded, "ef" * 32)],
        "upload_id": [(upload, f"up_{nobody}")],
        "key_id": [(key, f"key_{nobody}")],
        "invite_id": [(invite.invite.id, f"inv_{nobody}")],
        "webhook_id": [(hook, f"hook_{nobody}")],
        "account": [(town.ids["ann"], f"acct_{nobody}"), ("carl", "dave")],
        "organization": [(town.ids["lab"], f"org_{nobody}"), ("lab", "lob")],
    }


async def rows(town: Town) -> dict[str, list[Any]]:
    """Everything that is stored, but when bob's key was used last and what bob made for himself."""
    found: dict[str, list[Any]] = {}
    async with town.world.grid.db.read() as tx:
        for name, table in metadata.tables.items():
            keys = list(table.primary_key.columns)
            all_rows = await tx.all(select(table).order_by(*keys))
            found[name] = [
                tuple(v for k, v in r._mapping.items() if k != "last_used_at")
                for r in all_rows
                if getattr(r, "account_id", "") != town.ids["bob"]
            ]
    return found


async def call(
    client: httpx.AsyncClient, route: tuple[str, str], filled: str
) -> tuple[int, str, httpx.Headers]:
    method, path = route
    headers = {"Upload-Offset": "0"} if method == "PATCH" else {}
    body = BODIES.get((method, path.removeprefix(V1)))
    answer = await client.request(method, filled, json=body, headers=headers)
    return answer.status_code, answer.text, answer.headers


async def test_a_tenant_s_things_are_to_another_as_if_they_did_not_exist(town: Town) -> None:
    things = await things_of_lab(town)
    secrets = [real for pairs in things.values() for real, _ in pairs if len(real) > 6]
    before = await rows(town)
    paths = create_app(town.world.grid).openapi()["paths"]
    routes = [(m.upper(), path) for path, methods in paths.items() for m in methods]
    walked = 0
    async with town.http("bob") as bob:
        for route in routes:
            if route[1].endswith("/openapi.json"):
                continue
            names = [n for n in things if f"{{{n}}}" in route[1]]
            assert bool(names) is ("{" in route[1]), f"{route}: who has such things?"
            if not names:
                status, text, _ = await call(bob, route, route[1])
                assert status < 500, (route, text)
                assert not [s for s in secrets if s in text], route
                continue
            for number in range(max(len(things[n]) for n in names)):
                real, unknown = route[1], route[1]
                pairs = [things[n][number % len(things[n])] for n in names]
                for name, (mine, nobodys) in zip(names, pairs, strict=True):
                    real = real.replace(f"{{{name}}}", mine)
                    unknown = unknown.replace(f"{{{name}}}", nobodys)
                found, other = await call(bob, route, real), await call(bob, route, unknown)
                assert found[0] in (403, 404), (route, real, found)
                assert told(found, pairs) == told(other, pairs), (route, real)
                walked += 1
    assert walked > 80
    after = await rows(town)
    assert {n: after[n] for n in after if after[n] != before[n]} == {}


def told(answer: tuple[int, str, httpx.Headers], pairs: list[tuple[str, str]]) -> object:
    """An answer without what was asked for and without the request's id."""
    status, text, headers = answer
    for real, unknown in pairs:
        for word in (real, unknown, real[:12], unknown[:12]):
            text = text.replace(word, "*")
    body = json.loads(text) if text else {}
    body.pop("request_id", None)
    left = {k: v for k, v in headers.items() if k not in ("x-request-id", "content-length")}
    return status, body, left


async def test_the_same_key_and_name_are_each_tenant_s_own(any_town: Town) -> None:
    town = any_town
    grid = town.world.grid
    spec = to_plain(await town.world.spec(name="twin", data=DataSpec(source="stdlib")))
    body = {"spec": {**spec, "model": {**spec["model"]}}}
    made = {}
    for name in ("ann", "bob"):
        ref = await grid.blobs.put_bytes(f"{name} ".encode() * 500)
        async with town.http(name) as client:
            await town.upload(client, f"{name} ".encode() * 500)
            body["spec"]["data"] = to_plain(DataSpec(source="blobs", files=(ref,)))
            answers = [
                await client.post(f"{V1}/jobs", json=body, headers={"Idempotency-Key": "same"})
                for _ in range(2)
            ]
            assert [a.status_code for a in answers] == [201, 201], answers[0].text
            made[name] = answers[0].json()["id"]
            assert answers[1].json()["id"] == made[name]
            assert (await client.get(f"{V1}/jobs/twin")).json()["id"] == made[name]
            assert [j["id"] for j in (await client.get(f"{V1}/jobs")).json()["items"]] == [
                made[name]
            ]
            assert (await client.get(f"{V1}/health")).json()["jobs"] == {"submitted": 1}
    assert made["ann"] != made["bob"]
    async with town.http("operator") as operator:
        assert (await operator.get(f"{V1}/jobs/twin")).json()["code"] == "job.ambiguous"


async def test_knowing_a_file_s_hash_is_not_having_the_file(any_town: Town) -> None:
    town = any_town
    data = b"a text that is lab's own\n" * 400
    async with town.http("ann") as ann, town.http("bob") as bob:
        ref = BlobRef(await town.upload(ann, data), len(data))
        claim = {"sha256": ref.sha256, "size": ref.size}
        assert (await ann.post(f"{V1}/blobs", json=claim)).json()["complete"] is True
        spec = to_plain(await town.world.spec(data=DataSpec(source="blobs", files=(ref,))))
        stolen = await bob.post(f"{V1}/jobs", json={"spec": spec})
        missing = dict(spec, data=to_plain(DataSpec(source="blobs", files=(BlobRef("0" * 64, 9),))))
        unknown = await bob.post(f"{V1}/jobs", json={"spec": missing})
        assert stolen.status_code == unknown.status_code == 422
        assert stolen.json()["code"] == unknown.json()["code"] == "data.missing"
        begun = await bob.post(f"{V1}/blobs", json=claim)
        assert (begun.status_code, begun.json()["complete"]) == (201, False)
        assert (await bob.get(f"{V1}/blobs/{ref.sha256}")).status_code == 404
        await town.upload(bob, data)
        assert (await bob.get(f"{V1}/blobs/{ref.sha256}")).content == data
        assert (await bob.post(f"{V1}/jobs", json={"spec": spec})).status_code == 201


async def test_a_viewer_looks_and_changes_nothing(town: Town) -> None:
    job = (await town.submit("ann", "watched")).json()["id"]
    async with town.http("vera") as vera:
        assert (await vera.get(f"{V1}/jobs/{job}")).json()["organization_id"] == town.ids["lab"]
        weights = await vera.get(f"{V1}/jobs/{job}/weights")
        assert weights.status_code == 200
        sha256 = weights.headers["etag"].strip('"')
        assert (await vera.get(f"{V1}/blobs/{sha256}")).content == weights.content
        for change in ("cancel", "pause", "resume"):
            assert (await vera.post(f"{V1}/jobs/{job}/{change}")).status_code == 403
    await commands.set_role(town.world.grid, "mill", "vera", Role.MEMBER)
    async with town.http("vera") as vera:
        refused = await vera.post(f"{V1}/jobs/{job}/cancel")
        assert (refused.status_code, refused.json()["code"]) == (403, "auth.forbidden")
        assert (await vera.get(f"{V1}/jobs/{job}")).json()["state"] == "submitted"


async def test_a_contributor_sees_the_own_machine_and_what_it_did_and_no_job_s_name(
    town: Town,
) -> None:
    world, node = town.world, await town.node_of("carl")
    await world.node("of-somebody-else")
    job = (await town.submit("ann", "secret-job")).json()["id"]
    await jobs.accept_job(world.grid, job, "operator")
    other = (await town.submit("ann", "waiting-secret")).json()["id"]
    await world.settle()
    async with town.http("carl") as carl:
        assert [n["id"] for n in (await carl.get(f"{V1}/nodes")).json()["items"]] == [node.id]
        why = await carl.get(f"{V1}/nodes/{node.id}/why")
        assert why.status_code == 200
        assert "secret" not in why.text
        assert other not in why.text
        assert (await carl.get(f"{V1}/nodes/of-somebody-else/why")).status_code == 404
        for _ in range(3):
            for each in world.nodes:
                await each.work()
            await world.settle()
        events = (await carl.get(f"{V1}/nodes/carls-machine/events")).json()["items"]
        assert "task.accepted" in {e["kind"] for e in events}
        page = (await carl.get(f"{V1}/accounts/carl")).json()
        assert page["tasks"] > 0
        assert page["tokens"] == page["nodes"][0]["tokens"] > 0
        assert (await carl.get(f"{V1}/jobs/{job}")).status_code == 403
    async with town.http("ann") as ann:
        assert "of-somebody-else" not in (await ann.get(f"{V1}/jobs/{job}/why")).text


async def test_a_key_makes_no_key_that_may_more_or_lasts_longer(town: Town) -> None:
    narrow = await town.narrow("ann", Scope.READ, Scope.KEYS)
    async with town.http_as(narrow) as client:
        more = await client.post(f"{V1}/keys", json={"name": "x", "scopes": ["submit"]})
        assert (more.status_code, more.json()["code"]) == (403, "key.scope")
        made = (await client.post(f"{V1}/keys", json={"name": "x", "expires_s": 60})).json()
        assert made["key"]["scopes"] == ["keys", "read"]
    async with town.http_as(made["secret"]) as client:
        longer = await client.post(f"{V1}/keys", json={"name": "y", "expires_s": 3600})
        assert longer.json()["code"] == "key.scope"
        same = (await client.post(f"{V1}/keys", json={"name": "y"})).json()
        assert same["key"]["expires_at"] == made["key"]["expires_at"]
        town.world.time.now += 61
        assert (await client.get(f"{V1}/me")).status_code == 401
