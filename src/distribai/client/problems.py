"""From an answer's problem document back to the exception that it was."""

from __future__ import annotations

import httpx
from pydantic import ValidationError

from distribai.api.answers import Problem
from distribai.errors import (
    CODES,
    Ambiguous,
    Conflict,
    DistribAIError,
    Integrity,
    InternalFault,
    InvalidData,
    InvalidSpec,
    NotAllowed,
    NotFound,
    ProtocolMismatch,
    TooMany,
    Unauthenticated,
    Unavailable,
    UsageError,
)

_BY_STATUS: dict[int, tuple[type[DistribAIError], str]] = {
    400: (UsageError, "usage.invalid"),
    401: (Unauthenticated, "auth.invalid"),
    403: (NotAllowed, "auth.forbidden"),
    404: (NotFound, "http.path"),
    405: (UsageError, "http.method"),
    409: (Conflict, "job.state"),
    413: (UsageError, "http.too_large"),
    422: (InvalidSpec, "usage.invalid"),
    426: (ProtocolMismatch, "protocol.version"),
    429: (TooMany, "limit.rate"),
    503: (Unavailable, "grid.unreachable"),
}
"""Class of each status, and the code to use for one that this version does not know."""

_BY_CODE: dict[str, type[DistribAIError]] = {
    "job.ambiguous": Ambiguous,
    "blob.": Integrity,
    "tensor.": Integrity,
    "data.": InvalidData,
}
"""Where one status stands for several classes: by code, or by its beginning (with the dot)."""


def error_of(response: httpx.Response) -> DistribAIError:
    """The exception for a failed answer whose body has been read."""
    try:
        problem = Problem.model_validate_json(response.content)
    except ValidationError:
        # Not ours: a proxy's page, or another server altogether.
        return _foreign(response)
    status = response.status_code
    kind, fallback = _BY_STATUS.get(status, (InternalFault, "internal.fault"))
    if status in (409, 422):
        kind = _BY_CODE.get(problem.code, _BY_CODE.get(problem.code.split(".")[0] + ".", kind))
        if problem.code == "blob.offset":
            kind = Conflict
    code = problem.code if problem.code in CODES else fallback
    message = problem.detail or problem.title
    if code != problem.code and problem.code:
        message += f" ({problem.code})"
    if status >= 500 and problem.request_id:
        message += f" (request {problem.request_id})"
    return kind(code, message, problem.hint, field=problem.field)


def _foreign(response: httpx.Response) -> DistribAIError:
    status = response.status_code
    message = f"{response.request.url} answered {status} and not in the orchestrator's words."
    if status in (502, 503, 504):
        return Unavailable(
            "grid.unreachable", message, "A proxy is there, the orchestrator is not: start it."
        )
    return UsageError(
        "usage.invalid", message, "Does DISTRIBAI_URL name the orchestrator's HTTP address?"
    )


def unreachable(url: str, problem: httpx.HTTPError) -> Unavailable:
    """No answer at all."""
    why = "it does not answer in time" if isinstance(problem, httpx.TimeoutException) else problem
    return Unavailable(
        "grid.unreachable",
        f"The orchestrator at {url} cannot be reached: {why}.",
        "Start one (`distribai orchestrator start`), or name yours: DISTRIBAI_URL or --url.",
    )


def cut_off(url: str) -> Unavailable:
    """A stream ended without a word."""
    return Unavailable("grid.unreachable", f"The orchestrator at {url} has ended the stream.")
