"""What the answers of the blob interface mean: whether to try again, where to go on, what is
refused for good."""

from __future__ import annotations

import re

import httpx

from distribai import errors
from distribai.errors import DistribAIError, Integrity, NotFound, Unavailable

PASSING = frozenset({401, 408, 425, 429, 500, 502, 503, 504})
"""Statuses that may be another one a little later."""

REFUSALS: dict[int, tuple[type[DistribAIError], str]] = {
    400: (Integrity, "blob.size"),
    403: (errors.NotAllowed, "auth.forbidden"),
    404: (NotFound, "blob.unknown"),
    413: (Integrity, "blob.size"),
    422: (Integrity, "blob.hash"),
}
"""Class and code of a final refusal that names no code of its own."""

MAX_RETRY_AFTER_S = 60.0
"""The longest pause that an answer may ask for."""


class Passing(Exception):
    """Something went wrong that trying again may cure, not before ``after`` seconds."""

    def __init__(self, what: str, after: float = 0.0) -> None:
        super().__init__(what)
        self.after = after


def retry_after(answer: httpx.Response) -> float:
    """Seconds that the answer asks to wait, at most :data:`MAX_RETRY_AFTER_S`."""
    text = answer.headers.get("Retry-After", "") if answer.status_code == 429 else ""
    return min(float(text), MAX_RETRY_AFTER_S) if text.isdecimal() else 0.0


def range_start(answer: httpx.Response) -> int:
    """The first byte of a partial answer.

    Raises:
        Passing: it does not say.
    """
    found = re.match(r"bytes (\d+)-", answer.headers.get("Content-Range", ""))
    if found is None:
        raise Passing("a partial answer does not say where it starts")
    return int(found[1])


def offset(answer: httpx.Response) -> int:
    """Where an upload stands.

    Raises:
        Passing: the answer does not say.
    """
    text = answer.headers.get("Upload-Offset", "")
    if not text.isdecimal():
        raise Passing("the answer does not say where the upload stands")
    return int(text)


def upload_of(answer: httpx.Response) -> tuple[str, int]:
    """Id and offset of an upload that was begun.

    Raises:
        Passing: the answer names none.
    """
    try:
        plain = answer.json()
        return str(plain["upload_id"]), int(plain["offset"])
    except (ValueError, KeyError, TypeError) as problem:
        raise Passing("the answer names no upload") from problem


def error_of(answer: httpx.Response) -> DistribAIError:
    """The error of a final refusal, from its problem+json where there is one."""
    try:
        plain = answer.json()
    except ValueError:
        plain = {}
    plain = plain if isinstance(plain, dict) else {}
    kind, code = REFUSALS.get(answer.status_code, (Unavailable, "grid.unreachable"))
    said = str(plain.get("code", ""))
    message = str(plain.get("detail") or plain.get("title") or "")
    return kind(
        said if said in errors.CODES else code,
        message or f"The grid answered {answer.status_code} to {answer.request.method}.",
        str(plain.get("hint", "")),
    )
