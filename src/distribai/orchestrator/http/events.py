"""State changes: a page of them, or a stream of server-sent events (``Accept: text/event-stream``).

One route for each object, two ways to read it. A stream sends each event as ``id`` (its cursor),
``event`` (its kind) and ``data`` (its record). Whoever connects again with ``Last-Event-ID`` goes
on behind that cursor, on any replica, and loses nothing. Comments come when nothing happens for
:data:`HEARTBEAT_S`. A stream reads a page of the outbox only when the page before was taken: what a
slow reader has not read stays in the database. Whoever takes nothing for :data:`SLOW_S` is ended.
A stream that this side ends says why as its last event, ``end``, whose data are a problem's. Who
may read is asked at the start, and again before every batch and comment: a key that was revoked or
has expired, or a membership that has ended, ends the stream.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Awaitable, Callable
from typing import Annotated, Any

import structlog
from fastapi import APIRouter, Depends, Header, Query
from starlette.requests import Request
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from distribai.api import answers
from distribai.core.plain import to_plain
from distribai.errors import (
    DistribAIError,
    NotAllowed,
    NotFound,
    Unauthenticated,
    Unavailable,
)
from distribai.orchestrator import feed
from distribai.orchestrator.context import Grid
from distribai.orchestrator.feed import Events, Wanted
from distribai.orchestrator.fleet import why as fleet
from distribai.orchestrator.http.parameters import After, Kinds, Limit, Wait
from distribai.orchestrator.http.security import (
    Access,
    AskAgain,
    GridOf,
    SeenJob,
    SeenNode,
    allow,
    seen_job,
    seen_node,
)
from distribai.orchestrator.jobs import queries
from distribai.orchestrator.records import EventRecord

MEDIA_TYPE = "text/event-stream"

HEARTBEAT_S = 15.0
"""A quiet stream says so this often: proxies cut off what is silent for a minute."""

SLOW_S = 30.0
"""Seconds that a reader may take nothing while something waits for it."""

PAGE = 100
"""Events that are read, and handed to the network, at once."""

MAX_STREAMS = 1000
"""Streams of one process."""

RETRY_MS = 1000
"""What a reader is asked to wait before it connects again."""

log = structlog.get_logger("distribai.http")

router = APIRouter(tags=["events"])

LastEventId = Annotated[
    str,
    Header(
        alias="Last-Event-ID",
        max_length=200,
        description="The last event that a stream has seen; goes before `after`.",
    ),
]


class Reading:
    """How a feed is read: from where on, and how much of it at a time."""

    def __init__(
        self,
        kind: Kinds = [],  # noqa: B006  # FastAPI copies it
        after: After = "",
        limit: Limit = 200,
        wait: Wait = 0.0,
        last_event_id: LastEventId = "",
    ) -> None:
        self.kind, self.after = kind, last_event_id or after
        self.limit, self.wait = limit, wait


How = Annotated[Reading, Depends()]
MayRead = Callable[[], Awaitable[None]]
JobFilter = Annotated[str, Query(max_length=200, description="Only events of this job.")]
NodeFilter = Annotated[
    str, Query(max_length=200, description="Only events of this node and of its tasks.")
]
RESPONSES: dict[int | str, dict[str, Any]] = {
    200: {
        "description": "A page, or with `Accept: text/event-stream` a stream without end.",
        "content": {MEDIA_TYPE: {"schema": {"type": "string"}}},
    }
}


@router.get(
    "/events", summary="Follow the grid's events", response_model=answers.Feed, responses=RESPONSES
)
@allow(Access.OPERATORS)
async def events(
    request: Request,
    grid: GridOf,
    how: How,
    ask_again: AskAgain,
    job: JobFilter = "",
    node: NodeFilter = "",
) -> Any:
    """Everything that changed, in the order of commit. `after=latest` begins now."""
    job_id = await queries.resolve_job(grid, job) if job else None
    node_id = await fleet.resolve_node(grid, node) if node else None
    wanted = Wanted.of(how.kind, job_id, node_id)

    async def may_read() -> None:
        await ask_again()

    return await answer(request, grid, wanted, how, may_read)


@router.get(
    "/jobs/{ref}/events",
    summary="Follow a job's events",
    response_model=answers.Feed,
    responses=RESPONSES,
    tags=["jobs"],
)
@allow(Access.VIEWERS)
async def job_events(
    job_id: SeenJob,
    request: Request,
    grid: GridOf,
    how: How,
    ask_again: AskAgain,
) -> Any:
    """Its own changes and those of its rounds and tasks, in the order of commit."""
    wanted = Wanted.of(how.kind, job_id=job_id)

    async def may_read() -> None:
        await seen_job(job_id, grid, await ask_again())

    return await answer(request, grid, wanted, how, may_read)


@router.get(
    "/nodes/{ref}/events",
    summary="Follow a node's events",
    response_model=answers.Feed,
    responses=RESPONSES,
    tags=["nodes"],
)
@allow(Access.ACCOUNTS)
async def node_events(
    node_id: SeenNode,
    request: Request,
    grid: GridOf,
    how: How,
    ask_again: AskAgain,
) -> Any:
    """Its own changes and those of tasks while it held them, in the order of commit."""
    wanted = Wanted.of(how.kind, node_id=node_id)

    async def may_read() -> None:
        await seen_node(node_id, grid, await ask_again())

    return await answer(request, grid, wanted, how, may_read)


async def answer(
    request: Request, grid: Grid, wanted: Wanted, how: Reading, may_read: MayRead
) -> Any:
    """A page, or a stream when the caller accepts one. ``may_read`` raises when the caller may read
    it no more.

    Raises:
        UsageError: ``usage.invalid``: a cursor or a kind that is none.
        Unavailable: ``events.full``: too many streams are open.
    """
    if MEDIA_TYPE not in request.headers.get("accept", ""):
        return to_plain(await _page(request, grid, wanted, how, may_read))
    # Refuses a wrong cursor before it answers.
    first = await feed.read(grid, wanted, how.after, PAGE)
    if grid.tail.readers >= MAX_STREAMS:
        raise Unavailable(
            "events.full",
            f"This process has {MAX_STREAMS} streams of events open.",
            "Try another replica, or ask for pages: `Accept: application/json`.",
        )
    return EventStream(grid, wanted, first, may_read)


async def _page(
    request: Request, grid: Grid, wanted: Wanted, how: Reading, may_read: MayRead
) -> Events:
    end = grid.clock() + how.wait
    found = await feed.read(grid, wanted, how.after, how.limit)
    if found.items:
        return found
    while not found.items and (left := end - grid.clock()) > 0:
        # Now and then a look whether anybody still listens.
        moved = await grid.tail.beyond(grid, found.cursor, min(left, HEARTBEAT_S))
        if grid.tail.closing.is_set() or await request.is_disconnected():
            break
        if moved:
            found = await feed.read(grid, wanted, found.cursor, how.limit)
    if how.wait:
        await may_read()
    return found


class EventStream(Response):
    """An answer without end: ``first`` and whatever comes behind it."""

    media_type = MEDIA_TYPE

    def __init__(self, grid: Grid, wanted: Wanted, first: Events, may_read: MayRead) -> None:
        super().__init__()
        self._grid = grid
        self._wanted = wanted
        self._found = first
        self._may_read = may_read
        del self.headers["content-length"]
        self.headers["Cache-Control"] = "no-store"
        self.headers["X-Accel-Buffering"] = "no"  # nginx would hold events back

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Send until the reader goes, falls asleep, or the process stops."""
        self._grid.tail.readers += 1
        gone = asyncio.create_task(_gone(receive))
        work = asyncio.create_task(self._run(send))
        try:
            await asyncio.wait([gone, work], return_when=asyncio.FIRST_COMPLETED)
            if work.done():
                work.result()
        finally:
            self._grid.tail.readers -= 1
            for task in (gone, work):
                task.cancel()
            await asyncio.gather(gone, work, return_exceptions=True)

    async def _run(self, send: Send) -> None:
        await send(
            {
                "type": "http.response.start",
                "status": self.status_code,
                "headers": self.raw_headers,
            }
        )
        try:
            await self._follow(send)
        except _Slow as slow:
            log.warning("events.slow", seconds=SLOW_S, taken=slow.taken)
            self._grid.metrics.slow_reader()
            if not slow.taken:
                return  # nothing more can be said; the server closes the connection
            last = _end("events.slow", f"Nothing was read for {SLOW_S:g} s.")
        except (Unauthenticated, NotAllowed, NotFound) as problem:
            log.info("events.ended", code=problem.code)
            last = _end(problem.code, problem.message)
        except DistribAIError as problem:
            last = _end(problem.code, problem.message)
        else:
            last = _end("grid.unreachable", "The orchestrator is stopping.")
        await send({"type": "http.response.body", "body": last, "more_body": False})

    async def _follow(self, send: Send) -> None:
        """Send events until the process stops.

        Raises:
            Unavailable: the database went away.
            Unauthenticated, NotAllowed, NotFound: the reader may not read it any more.
            _Slow: the reader takes nothing.
        """
        clock, tail, found = self._grid.clock, self._grid.tail, self._found
        spoke, told = clock(), found.cursor
        text = f"retry: {RETRY_MS}\n{_cursor(told)}\n"
        while not tail.closing.is_set():
            for event in found.items:
                text += _message(event)
                told = event.cursor
            if not text and clock() - spoke >= HEARTBEAT_S:
                # The filter may have passed over a lot: who comes again need not read it again.
                text = f": nothing new\n{_cursor(found.cursor) if found.cursor != told else ''}\n"
                told = found.cursor
            if text:
                await self._may_read()
                await _send(send, text.encode())
                spoke, text = clock(), ""
            if len(found.items) < PAGE:
                left = HEARTBEAT_S - (clock() - spoke)
                await tail.beyond(self._grid, found.cursor, max(0.0, left))
            if not tail.closing.is_set():
                found = await feed.read(self._grid, self._wanted, found.cursor, PAGE)


class _Slow(Exception):
    """A reader took too long; ``taken``: in the end it did take what it was sent."""

    def __init__(self, taken: bool) -> None:
        super().__init__()
        self.taken = taken


async def _send(send: Send, data: bytes) -> None:
    """Hand bytes to the network, which takes them when the reader has taken those before.

    Raises:
        _Slow: it did not for :data:`SLOW_S`.
    """
    message = {"type": "http.response.body", "body": data, "more_body": True}
    sending = asyncio.ensure_future(send(message))
    try:
        done, _ = await asyncio.wait([sending], timeout=SLOW_S)
        if not done:  # as long again for somebody who may still hear why
            done, _ = await asyncio.wait([sending], timeout=SLOW_S)
            raise _Slow(taken=bool(done))
        sending.result()
    finally:
        sending.cancel()


async def _gone(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass


def _cursor(cursor: str) -> str:
    """No event: only where to go on."""
    return f"id: {cursor}\n" if cursor else ""


def _message(event: EventRecord) -> str:
    # ASCII without line feeds: nothing in a record can break the framing.
    data = json.dumps(to_plain(event), separators=(",", ":"))
    return f"id: {event.cursor}\nevent: {event.kind}\ndata: {data}\n\n"


def _end(code: str, detail: str) -> bytes:
    data = json.dumps({"code": code, "detail": detail}, separators=(",", ":"))
    return f"event: end\ndata: {data}\n\n".encode()
