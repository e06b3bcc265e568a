"""How much of a request's body is read, and for whom.

FastAPI reads a body before it asks any endpoint's dependencies, so who may not call a route is
turned away here, when the first byte of its body is asked for: nothing is kept for callers whom
nobody knows, but for the small bodies of the public routes.
"""

from __future__ import annotations

from collections.abc import Callable

from starlette.datastructures import Headers
from starlette.exceptions import HTTPException
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from distribai.errors import DistribAIError
from distribai.orchestrator import callers
from distribai.orchestrator.context import Grid
from distribai.orchestrator.http import connections
from distribai.orchestrator.http.middleware import PREFIX, bearer
from distribai.orchestrator.http.problems import WhileRead
from distribai.orchestrator.http.security import Access, access_of, no_token, remember

MAX_BODY = 4 << 20
"""Bytes of a request's body outside the blob uploads. A spec with all its knobs takes some
kilobytes, 10,000 data files a megabyte."""

PUBLIC_BODY = 64 << 10
"""Bytes of a body on the public routes, which anybody may send: logins and requests for
certificates take less than 10 KiB."""

UPLOADS = f"{PREFIX}/blobs/uploads/"
"""Below this path the upload's own declared size is the limit (``store.uploads``), and the endpoint
asks who is calling before it reads."""


class Bodies:
    """Counts bodies while they are read, whatever Content-Length says, and tells a request's
    connection that its caller is known and that bytes are sent.

    Args:
        grid: the grid that is served.
    """

    def __init__(self, app: ASGIApp, *, grid: Callable[[], Grid]) -> None:
        self._app = app
        self._grid = grid

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        connection = connections.of(scope)
        token = bearer(Headers(scope=scope).get("authorization", ""))
        if self._grid().limits.is_proven(token):
            connections.prove(scope)
        if upload := scope["path"].startswith(UPLOADS):
            receive_some = receive
        else:
            receive_some = self._limited(scope, receive, token)
        if connection is None:
            await self._app(scope, receive_some, send)
            return
        connection.patient = upload

        async def send_and_note(message: Message) -> None:
            await send(message)
            connection.progress()

        await self._app(scope, receive_some, send_and_note)

    def _limited(self, scope: Scope, receive: Receive, token: str) -> Receive:
        total, most = 0, -1

        async def limited() -> Message:
            nonlocal total, most
            if most < 0:
                most = await self._most(scope, token)
            message = await receive()
            if message["type"] == "http.request":
                total += len(message.get("body", b""))
                if total > most:
                    # The connection stays: closed with a body half read it would be reset, and the
                    # answer lost. What still comes is thrown away, for HEAD_S at most
                    # (`connections`).
                    raise HTTPException(413, f"The request's body is larger than {most} bytes.")
            return message

        return limited

    async def _most(self, scope: Scope, token: str) -> int:
        """Bytes that the caller may send to the route that is meant.

        Raises:
            WhileRead: the route is for known callers only, and nobody knows this one.
        """
        grid = self._grid()
        access, _ = access_of(scope.get("endpoint"))
        if access is Access.PUBLIC:
            return PUBLIC_BODY
        if not grid.limits.is_proven(token):
            try:
                if not token:
                    raise no_token()
                remember(scope, token, await callers.verify_token(grid, token), grid.clock())
            except DistribAIError as problem:
                raise WhileRead(problem) from problem
            connections.prove(scope)
        return MAX_BODY
