"""Errors as ``application/problem+json`` (RFC 9457), one shape for every failure.

Beside the standard members a problem has ``code`` (stable, see ``distribai errors``), ``hint``,
``field`` (dotted path of the offending field, empty when there is none), ``request_id``, and for
requests with several wrong fields ``errors``: a list of ``{field, message}``.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

import structlog
from fastapi import FastAPI
from fastapi.exceptions import RequestValidationError
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import JSONResponse, Response

from distribai.core.text import MAX_REASON, clean
from distribai.errors import CODES, DistribAIError, TooMany, Unauthenticated

MEDIA_TYPE = "application/problem+json"

MAX_FIELD = 200
"""Characters of a field's path."""

MAX_ERRORS = 20
"""Wrong fields that one answer lists."""

_HTTP_CODES = {404: "http.path", 405: "http.method", 413: "http.too_large"}
_HINTS = {"http.too_large": "Send less at once. Large data goes up as a blob: POST /api/v1/blobs."}

log = structlog.get_logger("distribai.http")


class WhileRead(HTTPException):
    """An error of ours that is found while a body is read, where FastAPI lets pass nothing else."""

    def __init__(self, error: DistribAIError) -> None:
        super().__init__(error.http_status, error.message)
        self.error = error


def problem(
    request: Request,
    status: int,
    code: str,
    detail: str,
    hint: str = "",
    field: str = "",
    *,
    errors: Sequence[Mapping[str, str]] = (),
    headers: Mapping[str, str] | None = None,
) -> JSONResponse:
    """The answer for one failure; what it quotes of the request is cut."""
    detail, field = clean(detail, MAX_REASON), clean(field, MAX_FIELD, lines=False)
    body: dict[str, object] = {
        "type": f"urn:distribai:error:{code}",
        "title": CODES[code],
        "status": status,
        "detail": detail,
        "code": code,
        "hint": hint,
        "field": field,
        "request_id": request.scope.get("request_id", ""),
    }
    if errors:
        body["errors"] = list(errors)
    return JSONResponse(body, status, headers=dict(headers or {}), media_type=MEDIA_TYPE)


def answer(request: Request, error: DistribAIError) -> JSONResponse:
    """The answer for an error of ours."""
    headers: dict[str, str] = {}
    if isinstance(error, Unauthenticated):
        headers["WWW-Authenticate"] = 'Bearer realm="distribai"'
    elif isinstance(error, TooMany):
        headers["Retry-After"] = str(max(1, math.ceil(error.retry_after)))
    elif error.http_status == 503:
        headers["Retry-After"] = "1"
    return problem(
        request,
        error.http_status,
        error.code,
        error.message,
        error.hint,
        error.field,
        headers=headers,
    )


async def _on_error(request: Request, error: Exception) -> Response:
    assert isinstance(error, DistribAIError)
    if error.http_status >= 500:
        log.warning("request failed", code=error.code, detail=error.message, path=request.url.path)
    return answer(request, error)


async def _on_invalid(request: Request, error: Exception) -> Response:
    assert isinstance(error, RequestValidationError)
    errors = [
        {"field": _dotted(entry["loc"]), "message": clean(str(entry["msg"]), MAX_REASON)}
        for entry in error.errors()[:MAX_ERRORS]
    ]
    first = errors[0]
    where = f"{first['field']}: " if first["field"] else ""
    return problem(
        request,
        422,
        "usage.invalid",
        f"{where}{first['message']}.",
        _advice(str(error.errors()[0]["type"]), first["field"]),
        first["field"],
        errors=errors,
    )


def _advice(kind: str, field: str) -> str:
    """What to do about the first fault that was found in a request."""
    if kind == "json_invalid" or not field:
        return "Send a JSON object; what each request takes is at /api/v1/openapi.json."
    if kind == "missing":
        return f"Give {field} as well."
    if kind == "extra_forbidden":
        return f"Leave {field} out, or look how it is spelt: nothing here takes it."
    return f"Give {field} another value; the message says which are possible."


async def _on_http(request: Request, error: Exception) -> Response:
    assert isinstance(error, HTTPException)
    if isinstance(error, WhileRead):
        return await _on_error(request, error.error)
    code = _HTTP_CODES.get(error.status_code, "usage.invalid")
    details = {
        "http.path": f"{request.url.path} is no path of this interface.",
        "http.method": f"{request.url.path} does not take {request.method}.",
    }
    return problem(
        request,
        error.status_code,
        code,
        details.get(code, str(error.detail)),
        _HINTS.get(code, "What there is, is described at /api/v1/openapi.json."),
        headers=error.headers,
    )


async def _on_defect(request: Request, error: Exception) -> Response:
    # Starlette raises it again afterwards, so that the server logs the traceback.
    log.error("defect", path=request.url.path, error=type(error).__name__)
    return problem(
        request,
        500,
        "internal.fault",
        "The orchestrator failed on this request; its log has the traceback.",
        "Please report it, with the request id and the log.",
        # This answer is made outside of the envelope, which adds it to all others.
        headers={"X-Request-ID": request.scope.get("request_id", "")},
    )


def install(app: FastAPI) -> None:
    """Let every failure of ``app`` be answered in this shape."""
    app.add_exception_handler(DistribAIError, _on_error)
    app.add_exception_handler(RequestValidationError, _on_invalid)
    app.add_exception_handler(HTTPException, _on_http)
    app.add_exception_handler(Exception, _on_defect)


def _dotted(location: Sequence[str | int]) -> str:
    """``("body", "spec", "batch")`` -> ``spec.batch``; the part of the request is left out."""
    return clean(".".join(str(part) for part in location[1:]), MAX_FIELD, lines=False)
