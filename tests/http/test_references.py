"""What a request may name beside its path: in the query, in headers, in the body. And a machine of
another tenant, which may ask for blobs alone.

The path's parameters are in ``test_tenants.py``.
"""

from __future__ import annotations

import json
import os
from collections.abc import AsyncIterator, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import httpx
import pytest

from distribai.core.plain import to_plain
from distribai.core.spec import BlobRef, DataSpec
from distribai.orchestrator.http.app import create_app
from distribai.store.statements import jobs as statements
from tests.http.test_tenants import V1, rows, things_of_lab, told
from tests.http.town import Town, town_on
from tests.store.databases import new_sqlite

NAMES = {
    "query.account",
    "query.job",
    "query.node",
    "header.X-DistribAI-Job",
    "body.account",
    "body.organization",
    "body.sha256",
    "body.spec",
}
"""What may name another's thing; each is tried below."""

PLACES = {
    "header.Idempotency-Key",  # each caller's own: test_tenants.py
    "header.Last-Event-ID",
    "query.after",
    "query.cursor",
}
"""Where to go on in a list of what the caller may see anyway."""

PLAIN = {
    "header.Upload-Offset",
    "header.X-DistribAI-Follow",
    *(f"query.{n}" for n in ("kind", "limit", "nodes", "state", "version", "wait")),
    *(f"body.{n}" for n in ("name", "login", "size", "why", "weight", "role", "url", "kinds")),
    *(f"body.{n}" for n in ("expires_s", "note", "trusted", "uses", "scopes", "version")),
    *(f"body.{n}" for n in ("max_tokens", "prompt", "seed", "temperature", "timeout")),
    *(f"body.{n}" for n in ("accept", "hours", "max_parameters", "bytes", "open_jobs")),
    *(f"body.{n}" for n in ("steps", "tokens")),
    *(f"body.{n}" for n in ("public_key", "challenge", "request", "signature", "invite")),
}
"""What names nothing."""


@pytest.fixture
async def town(tmp_path: Path) -> AsyncIterator[Town]:
    made = await town_on(tmp_path, await new_sqlite(tmp_path))
    yield made
    await made.world.close()


def parameters(description: dict[str, Any]) -> Iterator[str]:
    """Everything that a request may say, but in its path."""
    schemas = description["components"]["schemas"]
    for methods in description["paths"].values():
        for route in methods.values():
            for given in route.get("parameters", ()):
                if given["in"] != "path":
                    yield f"{given['in']}.{given['name']}"
            for content in route.get("requestBody", {}).get("content", {}).values():
                schema = content["schema"]
                for one in (schema, *schema.get("anyOf", ())):
                    named = one.get("$ref", "").rpartition("/")[2]
                    for field in schemas.get(named, {}).get("properties", ()):
                        yield f"body.{field}"


def test_whatever_a_request_may_name_is_known_here(town: Town) -> None:
    found = set(parameters(create_app(town.world.grid).openapi()))
    assert found == NAMES | PLACES | PLAIN


async def same(client: httpx.AsyncClient, real: Any, unknown: Any, *words: str) -> int:
    """Ask twice; the answers must be the same but for the ``words`` in pairs. The status."""
    answers = []
    for method, path, how in (real, unknown):
        answer = await client.request(method, f"{V1}{path}", **how)
        answers.append((answer.status_code, answer.text, answer.headers))
    pairs = [tuple(words)] if words else []
    assert told(answers[0], pairs) == told(answers[1], pairs), real  # type: ignore[arg-type]
    return answers[0][0]


async def test_another_s_things_are_unknown_wherever_they_are_named(town: Town) -> None:
    things = await things_of_lab(town)
    job, node = things["ref"][0], things["ref"][3]
    before = await rows(town)
    async with town.http("bob") as bob:
        for path in ("/keys", "/audit"):
            for mine, nobodys in things["account"]:
                real, unknown = ({"params": {"account": a}} for a in (mine, nobodys))
                status = await same(bob, ("GET", path, real), ("GET", path, unknown), mine, nobodys)
                assert status in (403, 404)
        for name, (mine, nobodys) in {"job": job, "node": node}.items():
            real, unknown = ({"params": {name: x}} for x in (mine, nobodys))
            asked = ("GET", "/events", real), ("GET", "/events", unknown)
            assert await same(bob, *asked, mine, nobodys) == 403
        real, unknown = ({"json": {"account": a}} for a in ("ann", "nobody"))
        assert await same(bob, ("POST", "/invites", real), ("POST", "/invites", unknown)) == 403
        spec = to_plain(await town.world.spec(data=DataSpec(source="stdlib")))
        for mine, nobodys in things["organization"]:
            real, unknown = ({"json": {"spec": spec, "organization": o}} for o in (mine, nobodys))
            asked = ("POST", "/jobs", real), ("POST", "/jobs", unknown)
            assert await same(bob, *asked, mine, nobodys) == 404
    after = await rows(town)
    assert {n: after[n] for n in after if after[n] != before[n]} == {}


async def test_another_s_blobs_cannot_be_named_in_a_job(town: Town) -> None:
    things = await things_of_lab(town)
    grid = town.world.grid
    async with town.http("bob") as bob:
        own = b"bob's own text\n" * 400
        mine = BlobRef(await town.upload(bob, own), len(own))
        spec = await town.world.spec(data=DataSpec(source="blobs", files=(mine,)))
        for sha256, _ in things["sha256"]:
            theirs = BlobRef(sha256, await grid.blobs.size(sha256))
            nobodys = BlobRef("0" * 64, theirs.size)
            for change in (
                lambda ref: replace(spec, data=DataSpec(source="blobs", files=(ref,))),
                lambda ref: replace(spec, data=replace(spec.data, tokenizer=ref)),
                lambda ref: replace(spec, model=replace(spec.model, init=ref)),
            ):
                for path in ("/jobs", "/jobs/plan"):
                    answers = []
                    for ref in (theirs, nobodys):
                        body = {"spec": to_plain(change(ref))}
                        answer = await bob.post(f"{V1}{path}", json=body)
                        answers.append((answer.status_code, answer.text, answer.headers))
                    if path == "/jobs":
                        assert answers[0][0] == 422
                    pair = [(theirs.sha256, nobodys.sha256)]
                    assert told(answers[0], pair) == told(answers[1], pair)
            begun = await bob.post(f"{V1}/blobs", json={"sha256": sha256, "size": theirs.size})
            assert (begun.status_code, begun.json()["complete"]) == (201, False)


async def test_a_place_in_another_s_list_leads_to_nothing_of_it(town: Town) -> None:
    things = await things_of_lab(town)
    job, _ = things["ref"][0]
    async with town.http("operator") as operator:
        events = (await operator.get(f"{V1}/events")).json()["items"]
    async with town.http("bob") as bob:
        for path in ("/jobs", "/nodes", "/organizations", "/keys"):
            for cursor in (job, events[0]["cursor"], "a"):
                answer = await bob.get(f"{V1}{path}", params={"cursor": cursor})
                assert answer.status_code in (200, 400)
                if answer.status_code == 400:
                    continue  # it says which cursor is none
                assert not [t for pair in things["ref"] for t in pair[:1] if t in answer.text]
        other = (await town.submit("bob", "of-mill")).json()["id"]
        for event in events[:: max(1, len(events) // 5)]:
            headers = {"Last-Event-ID": event["cursor"]}
            page = await bob.get(f"{V1}/jobs/{other}/events", headers=headers)
            assert {e["job_id"] for e in page.json()["items"]} <= {other}


async def blobs_of_lab(town: Town, job: str) -> dict[str, str]:
    """Every blob that the job of lab holds."""
    grid = town.world.grid
    async with grid.db.read() as tx:
        row = await statements.get(tx, job)
        assert row is not None
        data = await statements.dataset(tx, row.dataset_key)
        versions = await statements.latest_versions(tx, job, row.version, 100)
    assert data is not None
    found = {"manifest": data.manifest_sha}
    async with grid.blobs.local(BlobRef(data.manifest_sha, data.manifest_size)) as path:
        shards = json.loads(path.read_text())["shards"]
    found |= {f"shard {i}": s["blob"]["sha256"] for i, s in enumerate(shards)}
    for version in versions:
        found[f"weights {version.version}"] = version.weights_sha
        if version.update_sha:
            found[f"update {version.version}"] = version.update_sha
    return found


async def test_a_machine_of_another_tenant_gets_none_of_a_job_s_blobs(town: Town) -> None:
    things = await things_of_lab(town)
    job, _ = things["ref"][0]
    blobs = await blobs_of_lab(town, job) | {"uploaded": things["sha256"][1][0]}
    assert {"manifest", "shard 0", "weights 0"} <= blobs.keys()
    foreign = await town.node_of("bob")
    upload, nobodys_upload = things["upload_id"][0]
    before = await rows(town)
    async with town.http_as(foreign.token) as node:
        for header in ({}, {"X-DistribAI-Job": job}):
            for name, sha256 in blobs.items():
                for method in ("GET", "HEAD"):
                    real, unknown = (
                        (method, f"/blobs/{sha}", {"headers": header}) for sha in (sha256, "0" * 64)
                    )
                    status = await same(node, real, unknown, sha256, "0" * 64)
                    assert status == 404, (name, method)
            for method in ("HEAD", "PATCH"):
                how = {"headers": {**header, "Upload-Offset": "0"}}
                real = (method, f"/blobs/uploads/{upload}", how)
                unknown = (method, f"/blobs/uploads/{nobodys_upload}", how)
                assert await same(node, real, unknown, upload, nobodys_upload) == 404
        held = {"sha256": blobs["weights 0"], "size": 10}
        claims = [{"json": c} for c in (held, {"sha256": os.urandom(32).hex(), "size": 10})]
        assert await same(node, *(("POST", "/blobs", c) for c in claims)) == 403
    after = await rows(town)
    assert {n: after[n] for n in after if after[n] != before[n]} == {}
