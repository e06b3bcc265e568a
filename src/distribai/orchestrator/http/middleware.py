"""What happens around every request: an id, one line of log, a limit on how often."""

from __future__ import annotations

import base64
import re
from collections.abc import Callable

import structlog
from starlette.datastructures import Headers, MutableHeaders
from starlette.requests import Request
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from distribai.errors import TooMany
from distribai.orchestrator import events
from distribai.orchestrator.http import problems
from distribai.orchestrator.http.ranges import CutOff
from distribai.orchestrator.limits import Limits

PREFIX = "/api/v1"
"""Below it lies everything but probes and figures."""

_REQUEST_ID = re.compile(r"[A-Za-z0-9._-]{1,64}")

log = structlog.get_logger("distribai.http")


class Envelope:
    """Plain ASGI middleware: streams in both directions pass through untouched.

    Args:
        clock: monotonic seconds, for the log.
        entropy: randomness for request ids.
        observe: is told (method, route's template, status, seconds) of every request; the template
            is empty when no route was meant, the status 0 when nothing was answered.
    """

    def __init__(
        self,
        app: ASGIApp,
        *,
        clock: Callable[[], float],
        entropy: Callable[[int], bytes],
        observe: Callable[[str, str, int, float], None],
    ) -> None:
        self._app = app
        self._clock = clock
        self._entropy = entropy
        self._observe = observe

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        given = Headers(scope=scope).get("x-request-id", "")
        request_id = given if _REQUEST_ID.fullmatch(given) else self._new_id()
        scope["request_id"] = request_id
        # It stays bound when this returns: a defect is answered and logged further out. The server
        # runs each request in a task of its own, so it goes no further than that.
        structlog.contextvars.bind_contextvars(request_id=request_id)
        began, status = self._clock(), 0

        async def send_with_id(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
                MutableHeaders(scope=message)["X-Request-ID"] = request_id
            await send(message)

        try:
            with events.request():
                await self._app(scope, receive, send_with_id)
        except CutOff as problem:
            log.warning("answer cut off", path=scope["path"], problem=str(problem))
        except Exception:
            status = status or 500  # answered further out
            raise
        finally:
            took = self._clock() - began
            self._observe(scope["method"], _template(scope), status, took)
            log.debug(
                "request",
                method=scope["method"],
                path=scope["path"],
                status=status,
                seconds=round(took, 3),
            )

    def _new_id(self) -> str:
        return "req_" + base64.b32encode(self._entropy(10)).decode().lower()


class Doorman:
    """Turns away who asks too often, before anything is read or looked up.

    Args:
        limits: the limits of the grid that is served.
    """

    def __init__(self, app: ASGIApp, *, limits: Callable[[], Limits]) -> None:
        self._app = app
        self._limits = limits

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        token = bearer(Headers(scope=scope).get("authorization", ""))
        limits = self._limits()
        try:
            limits.arrive((scope.get("client") or ("",))[0], token)
        except TooMany as problem:
            # The connection stays, as for a body that is too large (`bodies`).
            await problems.answer(Request(scope), problem)(scope, receive, send)
            return

        async def send_and_note(message: Message) -> None:
            if message["type"] == "http.response.start" and message["status"] == 401:
                limits.refused(token)
            await send(message)

        await self._app(scope, receive, send_and_note)


def bearer(authorization: str) -> str:
    """The token of an Authorization header; empty when it has none."""
    kind, _, token = authorization.partition(" ")
    return token.strip() if kind.lower() == "bearer" else ""


def _template(scope: Scope) -> str:
    """The route that was meant, with its parameters' names instead of their values; empty when
    there was none."""
    path: str = getattr(scope.get("route"), "path", "")
    # A route does not know the prefix under which its router was included.
    included = path and scope["path"].startswith(PREFIX) and not path.startswith(PREFIX)
    return f"{PREFIX}{path}" if included else path
