"""Followers: reading a stream, and taking it up where it broke."""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterator
from itertools import islice

import httpx
import pytest
from hypothesis import given
from hypothesis import strategies as st

from distribai.client import AsyncClient, Client
from distribai.client.following import MAX_EVENT, PATIENCE_S, Follower, Reader
from distribai.errors import (
    DistribAIError,
    NotFound,
    ProtocolMismatch,
    Unauthenticated,
    Unavailable,
)
from distribai.orchestrator.http.events import _end, _message
from distribai.orchestrator.records import EventRecord
from tests.http.stand_in import NOW, OPERATOR, Orchestrator


def event(number: int, kind: str = "job.queued") -> bytes:
    data = {"text": "a\nb\r\u2028ä"}
    return _message(EventRecord(str(number), NOW, kind, "job_1", "", "", data)).encode()


@given(st.lists(st.integers(0, 40), max_size=20))
def test_events_are_read_however_the_network_cuts_them(cuts: list[int]) -> None:
    stream = b"retry: 1000\n\n: hello\r\n\r\n" + event(1) + b"id: 7\n\n" + event(8, "task.leased")
    reader, found, rest = Reader(), [], stream
    for cut in cuts:
        found += list(reader.feed(rest[:cut]))
        rest = rest[cut:]
    found += list(reader.feed(rest))
    assert [kind for kind, _ in found] == ["job.queued", "task.leased"]
    assert reader.last_id == "8"


def test_a_line_without_an_end_is_refused() -> None:
    with pytest.raises(ProtocolMismatch):
        list(Reader().feed(b"x" * (MAX_EVENT + 1)))


class Server:
    """Answers each request with the next of ``answers``: bytes of a stream, which then breaks, or a
    whole answer."""

    def __init__(self, *answers: list[bytes] | httpx.Response | Exception) -> None:
        self.answers = list(answers)
        self.asked: list[httpx.Request] = []

    def __call__(self, request: httpx.Request) -> httpx.Response:
        self.asked.append(request)
        found = self.answers.pop(0)
        if isinstance(found, Exception):
            raise found
        if isinstance(found, httpx.Response):
            return found
        headers = {"content-type": "text/event-stream; charset=utf-8"}
        return httpx.Response(200, headers=headers, stream=_Stream(found))

    @property
    def seen(self) -> list[str | None]:
        return [request.headers.get("last-event-id") for request in self.asked]


class _Stream(httpx.SyncByteStream, httpx.AsyncByteStream):
    def __init__(self, chunks: list[bytes]) -> None:
        self._chunks = chunks

    def __iter__(self) -> Iterator[bytes]:
        yield from self._chunks
        raise httpx.ReadError("broken")

    async def __aiter__(self) -> AsyncIterator[bytes]:
        for chunk in self._chunks:
            yield chunk
        raise httpx.ReadError("broken")


def broken_in_three_ways() -> Server:
    return Server(
        [event(1), event(2)[:20]],
        httpx.ConnectError("refused"),
        [event(2) + b"id: 5\n\n"],
        [_end("events.slow", "Nothing was read.")],
        [event(6), event(7)],
    )


def test_a_follower_loses_nothing_and_sees_nothing_twice() -> None:
    server, trouble, pauses = broken_in_three_ways(), list[DistribAIError | None](), list[float]()
    client = Client("http://grid", OPERATOR, transport=httpx.MockTransport(server))
    following = client.follow(on_trouble=trouble.append, sleep=pauses.append)
    assert [e.cursor for e in islice(following, 4)] == ["1", "2", "6", "7"]
    following.close()  # type: ignore[attr-defined]
    assert server.seen == [None, "1", "1", "5", "5"]
    codes = [None if t is None else t.code for t in trouble]
    assert codes == ["grid.unreachable", None, "grid.unreachable", None, "events.slow", None]
    assert all(0 < p <= 5 for p in pauses)


async def test_the_awaited_follower_does_the_same() -> None:
    server, found = broken_in_three_ways(), list[str]()

    async def sleep(seconds: float) -> None:
        return

    async with AsyncClient("http://grid", transport=httpx.MockTransport(server)) as client:
        following = client.follow(kinds=["job.*"], after="latest", sleep=sleep)
        async for one in following:
            found.append(one.cursor)
            if len(found) == 4:
                break
        await following.aclose()  # type: ignore[attr-defined]
    assert found == ["1", "2", "6", "7"]
    assert server.asked[0].url.query == b"kind=job.%2A&after=latest"
    assert server.asked[1].url.query == b"kind=job.%2A"


def test_what_another_try_cannot_mend_is_raised_at_once() -> None:
    body = {"status": 404, "code": "job.unknown", "detail": "d"}
    server = Server(httpx.Response(404, json=body))
    client = Client("http://grid", transport=httpx.MockTransport(server))
    with pytest.raises(NotFound):
        next(client.follow(job="nobody"))
    older = Server(httpx.Response(200, json={"items": []}))
    client = Client("http://grid", transport=httpx.MockTransport(older))
    with pytest.raises(ProtocolMismatch):
        next(client.follow())


def test_a_stream_that_one_may_not_read_any_more_is_not_tried_again() -> None:
    ended = Server([_end("auth.invalid", "The token is unknown, expired or revoked.")])
    client = Client("http://grid", transport=httpx.MockTransport(ended))
    with pytest.raises(Unauthenticated):
        next(client.follow())
    assert len(ended.asked) == 1


def test_patience_ends() -> None:
    follower, away = Follower.of("", "", (), ""), Unavailable("grid.unreachable", "away")
    assert 0 < follower.failed(away, 0.0) < 1
    assert follower.failed(away, PATIENCE_S) <= 5
    with pytest.raises(Unavailable):
        follower.failed(away, PATIENCE_S + 1)


def test_events_come_over_a_real_connection(client: Client, rooms: Orchestrator) -> None:
    rooms.events.append(EventRecord("1", NOW, "job.queued", "job_1", "", ""))
    following = client.follow()
    assert next(following).cursor == "1"
    rooms.events.append(EventRecord("2", NOW, "job.running", "job_1", "", ""))
    assert next(following).kind == "job.running"
    following.close()  # type: ignore[attr-defined]
