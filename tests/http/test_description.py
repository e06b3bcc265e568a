"""What the description says of every operation."""

from __future__ import annotations

from typing import Any

import pytest

from distribai.orchestrator.context import Grid
from distribai.orchestrator.http.app import create_app
from distribai.orchestrator.http.description import operations
from tests.http.test_access import EVERYONE


@pytest.fixture(scope="module")
def found() -> dict[str, Any]:
    import os
    import time
    from types import SimpleNamespace
    from typing import cast

    nobody = SimpleNamespace(clock=time.monotonic, entropy=os.urandom)
    return create_app(cast(Grid, nobody)).openapi()


def test_every_operation_says_who_may_call_it_and_how_it_fails(found: dict[str, Any]) -> None:
    for path, method, operation in operations(found):
        where = f"{method} {path}"
        public = (method.upper(), path) in EVERYONE
        assert operation["security"] == ([] if public else [{"token": []}]), where
        responses = operation["responses"]
        assert {"500", "503"} <= set(responses), where
        assert public or {"401", "403"} <= set(responses), where
        assert ("404" in responses) or "{" not in path, where
        assert ("413" in responses) is ("requestBody" in operation), where
        for status, said in responses.items():
            if int(status) >= 400 and path != "/readyz" and status != "416":
                assert list(said["content"]) == ["application/problem+json"], f"{where} {status}"
                assert said["description"], where


def test_every_creation_takes_an_idempotency_key(found: dict[str, Any]) -> None:
    creating = [
        (path, operation)
        for path, method, operation in operations(found)
        if method == "post" and ("201" in operation["responses"] or path.endswith("/generate"))
    ]
    assert len(creating) >= 4
    for path, operation in creating:
        named = {p["name"] for p in operation["parameters"]}
        assert "Idempotency-Key" in named, path
        assert "409" in operation["responses"], path


def test_every_body_and_answer_has_an_example(found: dict[str, Any]) -> None:
    schemas = found["components"]["schemas"]
    missing = set()
    for _, _, operation in operations(found):
        bodies = [operation.get("requestBody", {}), *operation["responses"].values()]
        for body in bodies:
            for media in body.get("content", {}).values():
                name = media.get("schema", {}).get("$ref", "").rpartition("/")[2]
                if name and "example" not in schemas[name]:
                    missing.add(name)
    assert not missing, "add them to api/examples.py"


def test_every_list_that_can_grow_has_pages(found: dict[str, Any]) -> None:
    for path, method, operation in operations(found):
        ok = operation["responses"].get("200", {}).get("content", {}).get("application/json", {})
        name = ok.get("schema", {}).get("$ref", "").rpartition("/")[2]
        if method == "get" and name.startswith(("Page_", "Listing_", "Feed")):
            named = {p["name"] for p in operation["parameters"]}
            assert "limit" in named, path
            assert named & {"cursor", "after"}, path
