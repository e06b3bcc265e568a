"""Requests that no client of ours sends: each gets a problem with a stable code, none a defect."""

from __future__ import annotations

import json
import os
from collections.abc import AsyncIterator
from typing import Any

import httpx
import pytest

from distribai.core.plain import to_plain
from distribai.orchestrator.people import keys
from tests.http.interface import caller
from tests.orchestrator.harness import World


@pytest.fixture
async def operator(any_world: World) -> AsyncIterator[httpx.AsyncClient]:
    token = await keys.ensure_operator_key(any_world.grid.db, any_world.root, os.urandom)
    json_bodies = {"Content-Type": "application/json"}
    async with caller(any_world.grid, token, **json_bodies) as client:
        yield client


def put(document: dict[str, Any], path: str, value: Any) -> dict[str, Any]:
    changed = json.loads(json.dumps(document))
    *parents, last = path.split(".")
    inner = changed
    for name in parents:
        inner = inner[name]
    inner[last] = value
    return changed


SPOILED: list[tuple[str, Any]] = [
    ("name", "a\0b"),
    ("name", "a\nb"),
    ("name", "\x1b[2J"),
    ("name", "\ud800"),
    ("name", "x" * 10_000),
    ("name", "   "),
    ("steps", 0),
    ("steps", -1),
    ("steps", 10**400),
    ("steps", 1.5),
    ("batch", 10**30),
    ("seq_len", 0),
    ("seq_len", 1 << 20),
    ("seed", -1),
    ("max_attempts", 10**30),
    ("workers_min", 0),
    ("rounds.quorum", 0),
    ("rounds.quorum", float("nan")),
    ("rounds.grace_max", float("inf")),
    ("rounds.inner_steps", 0),
    ("outer.ramp", 10**400),
    ("outer.eta", float("inf")),
    ("outer.eta", 1e300),
    ("schedule.warmup", 10**400),
    ("optimizer.lr", float("nan")),
    ("optimizer.lr", -1.0),
    ("resources.memory_mb", 10**40),
    ("data.field", "\0"),
    ("data.source", "\0"),
    ("data.files", [{"sha256": "../../../etc/passwd", "size": 1}]),
    ("data.files", [{"sha256": "0" * 64, "size": -1}]),
    ("data.tokenizer", {"sha256": "\0" * 64, "size": 10**40}),
    ("model.family", "\0"),
    ("model.profile", "\ud800"),
    ("model.config", {"dim": 10**9, "layers": 10**6, "heads": 1, "ffn_dim": 10**9}),
    ("model.config", {"dim": 10**400, "layers": 1, "heads": 1, "ffn_dim": 8}),
    ("model.config", {"dim": 2, "layers": 10**6, "heads": 1, "ffn_dim": 1}),
    ("model.config", {"dim": 8, "layers": 1, "heads": 2, "ffn_dim": 8, "window": 10**400}),
    ("model.config", {"dim": 8, "layers": 1, "heads": 2, "ffn_dim": 8, "vocab_size": 10**30}),
    (
        "model.config",
        {"dim": 8, "layers": 1, "heads": 2, "ffn_dim": 8, "rope_theta": float("inf")},
    ),
    ("model.init", {"sha256": "0" * 64, "size": 10**40}),
    ("paradigm", "x" * 1_000_000),
    ("priority", ["P1"]),
]


async def test_a_spoiled_spec_makes_nothing(any_world: World, operator: httpx.AsyncClient) -> None:
    spec = to_plain(await any_world.spec())
    found = {}
    for path, value in SPOILED:
        body = json.dumps({"spec": put(spec, path, value)})
        for where in ("/api/v1/jobs/plan", "/api/v1/jobs"):
            answer = await operator.post(where, content=body)
            key = (where.rsplit("/", 1)[-1], path, repr(value)[:40])
            code = answer.json().get("code", "")
            allowed = where.endswith("plan") and answer.status_code == 200
            if not allowed and not 400 <= answer.status_code < 500:
                found[key] = (answer.status_code, code)
            assert len(answer.content) < 10_000, key
    assert found == {}
    assert (await operator.get("/api/v1/jobs")).json()["items"] == []


async def test_odd_bodies_are_problems(operator: httpx.AsyncClient) -> None:
    deep = '{"spec": ' + '{"a":' * 100_000 + "1" + "}" * 100_000 + "}"
    less_deep = '{"spec": {"name": ' + "[" * 900 + "]" * 900 + "}}"
    digits = '{"spec": {"name": "a", "steps": ' + "9" * 5000 + "}}"
    for body in (deep, less_deep, digits, "[]", "null", '"x"', "", "\0", '{"spec": null}'):
        answer = await operator.post("/api/v1/jobs", content=body)
        assert 400 <= answer.status_code < 500, (body[:40], answer.text[:300])
        assert answer.json()["code"]
    for kind in ("text/plain", "application/x-www-form-urlencoded", "multipart/form-data"):
        answer = await operator.post(
            "/api/v1/jobs", content='{"spec": {}}', headers={"Content-Type": kind}
        )
        assert 400 <= answer.status_code < 500, kind


async def test_numbers_beyond_every_column_are_refused(
    any_world: World, operator: httpx.AsyncClient
) -> None:
    job = await any_world.job()
    big = 10**30
    for path in (
        f"/api/v1/jobs/{job}/weights?version={big}",
        f"/api/v1/jobs/{job}/tasks?cursor={big}",
        f"/api/v1/jobs/{job}/logs?after={big}",
        f"/api/v1/jobs/{job}/events?after=1.1.{2**63}",
        f"/api/v1/jobs/{job}/events?after=1.1.{10**18}9",
        "/api/v1/jobs?cursor=nan~x",
        "/api/v1/jobs?cursor=inf~%00",
        "/api/v1/jobs/%00",
        "/api/v1/jobs/%00/tasks",
        "/api/v1/jobs/..%2f..%2fetc",
        "/api/v1/blobs/%00",
        "/api/v1/blobs/..%2f..%2fgrid.sqlite3",
        "/api/v1/blobs/uploads/..%2f..%2fgrid",
    ):
        answer = await operator.get(path)
        assert answer.status_code < 500, (path, answer.text[:300])
    for body in ({"version": big}, {"prompt": "\ud800"}, {"temperature": 1e999}, {"seed": -1}):
        answer = await operator.post(
            f"/api/v1/jobs/{job}/generate", content=json.dumps({**body, "timeout": 0.001})
        )
        assert 400 <= answer.status_code < 500, (body, answer.text[:300])
    answer = await operator.post(
        f"/api/v1/jobs/{job}/cancel", content=json.dumps({"why": "a\0\x1b[2J\ud800"})
    )
    assert answer.status_code < 500, answer.text
    answer = await operator.post(f"/api/v1/jobs/{job}/cancel", content='{"why": "a\\u0000b"}')
    assert answer.status_code < 500, answer.text


async def test_a_range_of_absurd_digits_is_no_defect(
    any_world: World, operator: httpx.AsyncClient
) -> None:
    ref = await any_world.grid.blobs.put_bytes(b"0123456789")
    for asked in ("bytes=" + "9" * 5000 + "-", "bytes=0-" + "9" * 5000, "bytes=-" + "9" * 5000):
        answer = await operator.get(f"/api/v1/blobs/{ref.sha256}", headers={"Range": asked})
        assert answer.status_code in (200, 206, 416), asked[:20]
    answer = await operator.post(
        "/api/v1/blobs", content=json.dumps({"sha256": "0" * 64, "size": 10**40})
    )
    assert answer.json()["code"] == "blob.size"
    answer = await operator.patch(
        "/api/v1/blobs/uploads/up_x", headers={"Upload-Offset": "9" * 4000}, content=b""
    )
    assert 400 <= answer.status_code < 500
