from __future__ import annotations

import asyncio
from typing import Any

import h11
import pytest
import structlog
import uvicorn
from uvicorn.protocols.http.h11_impl import H11Protocol
from uvicorn.server import ServerState

from distribai.orchestrator.http import connections

HEAD = b"GET / HTTP/1.1\r\nHost: grid\r\n\r\n"


class Line(asyncio.Transport):
    """A connection of which nothing is left but whether it is open."""

    def __init__(self) -> None:
        super().__init__()
        self.open = True

    def abort(self) -> None:
        self.open = False

    close = abort

    def is_closing(self) -> bool:
        return not self.open

    def write(self, data: Any) -> None:
        pass


class Clock:
    """The part of an event loop that a protocol asks, with a clock moved by hand."""

    def __init__(self) -> None:
        self.timers: list[tuple[float, Any, Timer]] = []

    def call_later(self, seconds: float, what: Any) -> Timer:
        timer = Timer()
        self.timers.append((seconds, what, timer))
        return timer

    def create_task(self, work: Any, **_: Any) -> asyncio.Future[None]:
        work.close()
        return asyncio.get_running_loop().create_future()

    def ring(self) -> None:
        due, self.timers = self.timers, []
        for _, what, timer in due:
            if timer.runs:
                what()


class Timer:
    runs = True

    def cancel(self) -> None:
        self.runs = False


class Port:
    """Connections of one server that holds two."""

    def __init__(self) -> None:
        self.clock, self.state = Clock(), ServerState()
        self.config = uvicorn.Config(lambda *_: None, log_config=None, lifespan="off")
        self.kind = connections.bounded(2)

    def connect(self) -> tuple[Line, H11Protocol]:
        line = Line()
        loop: Any = self.clock
        protocol = self.kind(self.config, self.state, {}, _loop=loop)
        protocol.connection_made(line)
        return line, protocol


async def test_who_says_nothing_or_not_all_of_a_head_is_hung_up_on() -> None:
    port = Port()
    silent, _ = port.connect()
    halting, protocol = port.connect()
    protocol.data_received(HEAD[:20])
    port.clock.ring()
    assert not silent.open
    assert not halting.open


async def test_who_has_asked_is_left_alone_however_long_the_answer_takes() -> None:
    port = Port()
    line, protocol = port.connect()
    protocol.data_received(HEAD[:20])
    protocol.data_received(HEAD[20:])
    port.clock.ring()
    assert line.open


async def test_a_second_head_has_its_time_as_well() -> None:
    port = Port()
    line, protocol = port.connect()
    protocol.data_received(HEAD)
    protocol.conn.send(h11.Response(status_code=204, headers=[]))
    protocol.conn.send(h11.EndOfMessage())
    protocol.cycle.response_complete = True
    protocol.on_response_complete()
    protocol.data_received(HEAD[:10])
    port.clock.ring()
    assert not line.open


async def test_beyond_the_limit_the_longest_silent_one_makes_room() -> None:
    port = Port()
    asking, protocol = port.connect()
    protocol.data_received(HEAD)
    silent, _ = port.connect()
    newcomer, _ = port.connect()
    assert [asking.open, silent.open, newcomer.open] == [True, False, True]


async def test_where_all_are_at_work_the_newcomer_is_hung_up_on() -> None:
    port = Port()
    for _ in range(2):
        _, protocol = port.connect()
        protocol.data_received(HEAD)
    newcomer, _ = port.connect()
    assert not newcomer.open


def test_streams_have_as_many_files_as_http() -> None:
    assert connections.most_connections(4000, None) == 4000
    assert connections.most_connections(4000, 1024) == (1024 - connections.OTHERS) // 2
    assert connections.most_connections(4000, 20_000) == 4000
    assert connections.most_connections(4000, 100) == 1


def test_used_up_descriptors_are_told_of_once_in_a_while() -> None:
    now = [0.0]
    handle = connections.quiet_accepts(lambda: now[0])
    loop: Any = asyncio.new_event_loop()
    with structlog.testing.capture_logs() as told:
        for now[0] in (0.0, 1.0, connections.TOLD_EVERY_S - 0.1, connections.TOLD_EVERY_S):
            handle(loop, {"message": "socket.accept() out of system resource", "exception": "x"})
    loop.close()
    assert [entry["event"] for entry in told] == ["connections.refused"] * 2


def test_other_errors_of_the_loop_are_told_as_ever(caplog: pytest.LogCaptureFixture) -> None:
    loop = asyncio.new_event_loop()
    connections.quiet_accepts(lambda: 0.0)(loop, {"message": "a task was destroyed"})
    loop.close()
    assert "a task was destroyed" in caplog.text
