"""What ``/api/v1/openapi.json`` says beyond FastAPI's own words: failures, access, examples.

Every failure has one shape (:mod:`problems`), so which statuses an operation may answer with is
derived here, once, from what it takes: a body may be too large, a ``{ref}`` may be unknown or
ambiguous, a cursor may be nobody's. A test calls every operation with much that is wrong and
compares.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from fastapi import FastAPI
from fastapi.routing import APIRoute

from distribai.api.answers import Problem
from distribai.api.examples import EXAMPLES
from distribai.orchestrator.http.problems import MEDIA_TYPE
from distribai.orchestrator.http.security import Access, access_of

PROBLEM_REF = {"$ref": "#/components/schemas/Problem"}

_SAID = {
    400: "A cursor, address or other value that cannot be understood.",
    401: "No credentials, or credentials that nobody issued.",
    403: "These credentials may not do that.",
    404: "Nothing goes by that name.",
    409: "More than one goes by that name, its state forbids it, or the idempotency key was used "
    "for another request.",
    413: "The body is larger than the interface takes.",
    422: "A field is missing, ill-typed or impossible; `errors` lists them.",
    429: "Too often: `Retry-After` says when to ask again.",
    500: "A defect of the orchestrator.",
    503: "The database, the blob store or a node cannot be reached now; `Retry-After`.",
}
"""Every status of a failure, in one sentence."""


class Described(FastAPI):
    """An application that describes its failures."""

    def __init__(self, **options: Any) -> None:
        self._access: dict[str, Access] = {}
        super().__init__(generate_unique_id_function=self._name, **options)

    def _name(self, route: APIRoute) -> str:
        """The operation's id. It is made of names that we choose, not of the path, so that
        generated clients keep their names when a path moves."""
        name = f"{route.tags[0]}_{route.name}" if route.tags else route.name
        self._access[name], _ = access_of(route.endpoint)
        return name

    def openapi(self) -> dict[str, Any]:
        """The description; made once."""
        if self.openapi_schema is None:
            self.openapi_schema = self._complete(super().openapi())
        return self.openapi_schema

    def _complete(self, found: dict[str, Any]) -> dict[str, Any]:
        schemas = found["components"]["schemas"]
        for name in ("HTTPValidationError", "ValidationError"):
            schemas.pop(name, None)
        schemas["Problem"] = Problem.model_json_schema()
        for path, _, operation in operations(found):
            access = self._access[operation["operationId"]]
            if access is Access.PUBLIC:
                operation["security"] = []
            for status in sorted(failures(path, operation, access)):
                operation["responses"][str(status)] = _problem(status)
            for said in operation["responses"].values():
                said["headers"] = {"X-Request-ID": _REQUEST_ID, **said.get("headers", {})}
        for name, schema in schemas.items():
            if (example := _example(name)) is not None:
                schema["example"] = example
        return found


_REQUEST_ID = {
    "description": "Names this request in the orchestrator's logs.",
    "schema": {"type": "string"},
}


def _example(name: str) -> Any:
    """An example of a schema; a page's is a page with that of its entries."""
    kind, _, inner = name.partition("_")
    if kind in ("Page", "Listing") and inner:
        entry = EXAMPLES.get(inner.rstrip("_"))
        return None if entry is None else {"items": [entry]}
    return EXAMPLES.get(name)


def operations(found: dict[str, Any]) -> Iterator[tuple[str, str, dict[str, Any]]]:
    """(path, method, operation) of a description."""
    for path, methods in found["paths"].items():
        for method, operation in methods.items():
            yield path, method, operation


def failures(path: str, operation: dict[str, Any], access: Access) -> set[int]:
    """The statuses that an operation may fail with."""
    found = {429, 500, 503}
    if access is not Access.PUBLIC:
        found |= {401, 403}
    parameters = operation.get("parameters", [])
    if parameters or "requestBody" in operation:
        found |= {400, 422}
    if "{" in path:
        found.add(404)
    if "requestBody" in operation:
        found.add(413)
    named = {p["name"].lower() for p in parameters}
    if "{ref}" in path or "{upload_id}" in path or named & {"idempotency-key", "job", "node"}:
        found |= {404, 409}
    if "people" in operation.get("tags", []):
        # Names of accounts and organizations; also the public login knows wrong credentials.
        found |= {401, 404, 409}
    if path.endswith("/jobs/plan"):
        # Its body names an organization.
        found.add(404)
    if "certificates" in operation.get("tags", []):
        # Public, and what it refuses is told from its body.
        found |= {401, 403, 404}
    return found


def _problem(status: int) -> dict[str, Any]:
    return {"description": _SAID[status], "content": {MEDIA_TYPE: {"schema": PROBLEM_REF}}}
