"""How both clients speak HTTP: whom they ask, and what they make of an answer."""

from __future__ import annotations

import ssl
from collections.abc import Callable, Iterator
from typing import Any, TypeVar

import httpx
from pydantic import ValidationError

from distribai import __version__, tls
from distribai.api.answers import Page
from distribai.client import problems
from distribai.client.calls import Call
from distribai.errors import ProtocolMismatch, UsageError

T = TypeVar("T")

TIMEOUT_S = 30.0
"""What an answer may take, beyond what the server was asked to wait."""

CONNECT_S = 5.0
"""What a connection may take."""


def options(url: str, token: str, ca: str) -> dict[str, Any]:
    """Arguments of both httpx clients.

    Raises:
        UsageError: ``url`` is no http(s) address, or one without TLS though a CA is named, or the
            token cannot stand in a header.
        Integrity: ``grid.ca``: ``ca`` is no certificate.
    """
    try:
        parsed = httpx.URL(url)
    except httpx.InvalidURL as problem:
        raise _bad_url(url, str(problem)) from problem
    if parsed.scheme not in ("http", "https") or not parsed.host:
        raise _bad_url(url, "it does not begin with http:// or https:// and a host")
    if ca and parsed.scheme != "https":
        raise _bad_url(url, "a certificate authority is named, and it does not begin with https://")
    if not token.isascii() or not token.isprintable() or " " in token:
        raise UsageError(
            "config.invalid",
            "The token has characters that no token has.",
            "Copy it again from where it was told, or `distribai login` again.",
            field="client.token",
        )
    headers = {"User-Agent": f"distribai/{__version__}", "Accept": "application/json"}
    if token:
        headers["Authorization"] = f"Bearer {token}"
    return {
        "base_url": parsed,
        "headers": headers,
        "timeout": httpx.Timeout(TIMEOUT_S, connect=CONNECT_S),
        # A loopback orchestrator is never behind the proxy that the environment names, and making
        # a TLS context takes longer than a plain request.
        "trust_env": parsed.scheme == "https",
        "verify": _trust(ca) if parsed.scheme == "https" else False,
    }


def _trust(ca: str) -> ssl.SSLContext:
    return tls.pinned_context(ca) if ca else ssl.create_default_context()


def _bad_url(url: str, why: str) -> UsageError:
    return UsageError(
        "config.invalid",
        f"{url!r} is not an orchestrator's address: {why}.",
        "It looks like http://127.0.0.1:8766.",
        field="client.url",
    )


def request(call: Call[Any]) -> dict[str, Any]:
    """Arguments of one request."""
    return {
        "method": call.method,
        "url": call.path,
        "params": dict(call.params),
        "json": call.body,
        "headers": dict(call.headers),
        "timeout": httpx.Timeout(TIMEOUT_S + call.patience, connect=CONNECT_S),
    }


def read(call: Call[T], response: httpx.Response) -> T:
    """What the answer says.

    Raises:
        DistribAIError: the grid refuses, in its own words.
        ProtocolMismatch: ``protocol.version``: the answer has another form.
    """
    if not response.is_success:
        raise problems.error_of(response)
    try:
        return call.read(response.content)
    except ValidationError as problem:
        raise ProtocolMismatch(
            "protocol.version",
            f"{response.request.url} answered in a form that this client does not understand "
            f"({problem.error_count()} fields).",
            "Client and orchestrator differ in version: `distribai version`, `distribai health`.",
        ) from problem


def pages(
    send: Callable[[Call[Page[T]]], Page[T]], call: Callable[[str], Call[Page[T]]]
) -> Iterator[T]:
    """The entries of a list, asked for page by page as they are needed."""
    cursor = ""
    while True:
        page = send(call(cursor))
        yield from page.items
        cursor = page.next_cursor
        if not cursor:
            return
