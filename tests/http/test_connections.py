"""A hostile caller's connections, on a real port, with the constants of time made short."""

from __future__ import annotations

import asyncio
import json
import socket
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from hashlib import sha256
from pathlib import Path
from typing import Any

import pytest
import structlog

from distribai.core.people import Principal
from distribai.errors import Unauthenticated
from distribai.orchestrator import callers
from distribai.orchestrator.context import Grid as OrchestratorGrid
from distribai.orchestrator.http import connections, security
from distribai.orchestrator.http.app import create_app
from distribai.orchestrator.http.bodies import PUBLIC_BODY
from distribai.orchestrator.http.ranges import PIECE
from distribai.orchestrator.limits import Limits, too_many
from distribai.sections import LimitSettings
from tests.http.serving import serving
from tests.http.stand_in import NODE, OPERATOR, Orchestrator, make_grid

HEALTH = b"GET /healthz HTTP/1.1\r\nHost: grid\r\n\r\n"
PATIENCE_S = 180


class Caller:
    """One connection, by hand."""

    def __init__(self, port: int, *, deaf: bool = False) -> None:
        self.socket = socket.socket()
        if deaf:
            self.socket.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 2048)
        self.socket.settimeout(PATIENCE_S)
        self.socket.connect(("127.0.0.1", port))
        self._read = b""

    def say(self, data: bytes) -> None:
        self.socket.sendall(data)

    def ask(self, method: str, path: str, size: int, token: str = "", *headers: str) -> None:
        """The head of a request with a body of ``size`` bytes."""
        lines = [f"{method} /api/v1{path} HTTP/1.1", "Host: grid", f"Content-Length: {size}"]
        lines += [f"Authorization: Bearer {token}"] if token else []
        lines += [*headers, "", ""]
        self.say("\r\n".join(lines).encode())

    def reads(self, text: bytes) -> None:
        """Read on until ``text`` has come."""
        while text not in self._read:
            data = self.socket.recv(4096)
            assert data, self._read
            self._read += data
        self._read = self._read.partition(text)[2]

    def answer(self) -> tuple[int, Any]:
        """The status and the document of the next answer."""
        while b"\r\n\r\n" not in self._read:
            self._more()
        head, _, self._read = self._read.partition(b"\r\n\r\n")
        lines = head.decode().lower().split("\r\n")
        sizes = [int(line.split(":")[1]) for line in lines if line.startswith("content-length:")]
        size = sum(sizes)
        while len(self._read) < size:
            self._more()
        body, self._read = self._read[:size], self._read[size:]
        return int(lines[0].split()[1]), json.loads(body or b"null")

    def _more(self) -> None:
        data = self.socket.recv(4096)
        assert data, "the connection was cut"
        self._read += data

    def is_cut(self) -> bool:
        """Wait until nothing more comes; False when something does."""
        try:
            return self.socket.recv(1) == b""
        except ConnectionResetError:
            return True


class Grid:
    """A served grid that holds few connections."""

    def __init__(self, url: str, http: type[connections.Connection]) -> None:
        self._port = int(url.rpartition(":")[2])
        self._stack = ExitStack()
        self.http = http

    def caller(self, *, deaf: bool = False) -> Caller:
        caller = Caller(self._port, deaf=deaf)
        self._stack.callback(caller.socket.close)
        return caller

    def halting(self, size: int = 1000, sent: int = 1) -> Caller:
        """Somebody without credentials who begins a body and says nothing more."""
        caller = self.caller()
        caller.ask("POST", "/login", size)
        eventually(lambda: self.theirs(caller).at_work)
        before = self.theirs(caller).bytes_held()
        caller.say(b" " * sent)
        eventually(lambda: self.theirs(caller).bytes_held() >= before + sent)
        return caller

    def uploading(self, data: bytes) -> Caller:
        """An operator who has sent the first byte of an upload."""
        caller = self.caller()
        wanted = json.dumps({"sha256": sha256(data).hexdigest(), "size": len(data)}).encode()
        caller.ask("POST", "/blobs", len(wanted), OPERATOR, "Content-Type: application/json")
        caller.say(wanted)
        path = f"/blobs/uploads/{caller.answer()[1]['upload_id']}"
        caller.ask("PATCH", path, len(data), OPERATOR, "Upload-Offset: 0")
        caller.say(data[:1])
        eventually(lambda: self.theirs(caller).proven and self.theirs(caller).patient)
        return caller

    def watching(self) -> Caller:
        """An operator who follows the events."""
        caller = self.caller()
        caller.ask("GET", "/events", 0, OPERATOR, "Accept: text/event-stream")
        caller.reads(b"retry:")
        return caller

    def theirs(self, caller: Caller) -> connections.Connection:
        """The server's end of a connection."""
        address = caller.socket.getsockname()
        found: list[connections.Connection] = []

        def there() -> bool:
            found[:] = [c for c in list(self.http.port.connections) if c.client == address]
            return bool(found)

        eventually(there)
        return found[0]

    def close(self) -> None:
        self._stack.close()


def eventually(true: Callable[[], bool]) -> None:
    end = time.monotonic() + PATIENCE_S
    while not true():
        assert time.monotonic() < end, "it never came about"
        time.sleep(0.01)


@contextmanager
def grid_of(most: int, tmp_path: Path) -> Iterator[Grid]:
    http = connections.bounded(most)
    with serving(create_app(make_grid(tmp_path)), http=http) as url:
        made = Grid(url, http)
        try:
            yield made
        finally:
            made.close()


@pytest.fixture
def rooms(monkeypatch: pytest.MonkeyPatch) -> None:
    Orchestrator().install(monkeypatch)
    monkeypatch.setattr(connections, "LOOK_S", 0.02)


@pytest.fixture
def grid(rooms: None, tmp_path: Path) -> Iterator[Grid]:
    with grid_of(100, tmp_path) as made:
        yield made


@pytest.fixture
def small(rooms: None, tmp_path: Path) -> Iterator[Grid]:
    with grid_of(2, tmp_path) as made:
        yield made


def test_who_says_nothing_or_not_all_of_a_head_is_hung_up_on(
    grid: Grid, monkeypatch: pytest.MonkeyPatch
) -> None:
    silent, halting = grid.caller(), grid.caller()
    halting.say(HEALTH[:20])
    monkeypatch.setattr(connections, "HEAD_S", 0.2)
    assert silent.is_cut()
    assert halting.is_cut()


def test_a_second_head_has_its_time_as_well(grid: Grid, monkeypatch: pytest.MonkeyPatch) -> None:
    caller = grid.caller()
    caller.say(HEALTH)
    assert caller.answer()[0] == 200
    monkeypatch.setattr(connections, "HEAD_S", 0.2)
    caller.say(HEALTH[:20])
    assert caller.is_cut()


def test_a_body_that_does_not_come_is_not_waited_for(
    grid: Grid, monkeypatch: pytest.MonkeyPatch
) -> None:
    halting, known = grid.halting(), grid.caller()
    known.ask("POST", "/jobs", 1000, OPERATOR)
    known.say(b"{")
    monkeypatch.setattr(connections, "BODY_S", 0.2)
    assert halting.is_cut()
    assert known.is_cut()


def test_an_upload_takes_its_time(grid: Grid, monkeypatch: pytest.MonkeyPatch) -> None:
    caller = grid.uploading(b"x" * 1000)
    later = grid.halting()
    monkeypatch.setattr(connections, "BODY_S", 0.2)
    assert later.is_cut()
    caller.say(b"x" * 999)
    assert caller.answer()[0] == 201


def test_an_upload_of_which_nothing_comes_is_cut(
    grid: Grid, monkeypatch: pytest.MonkeyPatch
) -> None:
    caller = grid.uploading(b"x" * 1000)
    monkeypatch.setattr(connections, "STALL_S", 0.2)
    assert caller.is_cut()


def test_an_answer_that_is_not_read_is_cut(grid: Grid, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(connections, "STALL_S", 0.2)
    deaf = grid.caller(deaf=True)
    grid.theirs(deaf)
    asked = 40
    deaf.say(HEALTH.replace(b"/healthz", b"/api/v1/openapi.json") * asked)
    eventually(lambda: not grid.http.port.connections)
    answers = 0
    while data := deaf.socket.recv(1 << 20):
        answers += data.count(b"HTTP/1.1 200")
    assert answers < asked


def test_a_download_that_breaks_off_counts_little_more_than_what_was_taken(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    rooms = Orchestrator()
    rooms.install(monkeypatch)
    served, http = make_grid(tmp_path), connections.bounded(100)
    ref = asyncio.run(served.blobs.put_bytes(bytes(16 << 20)))
    with serving(create_app(served), http=http) as url:
        made = Grid(url, http)
        for _ in range(3):
            slow = made.caller(deaf=True)
            slow.ask("GET", f"/blobs/{ref.sha256}", 0, NODE, "X-DistribAI-Job: job_x")
            slow.reads(b"\r\n\r\n")
            before = len(rooms.counted)
            slow.socket.close()
            eventually(lambda before=before: len(rooms.counted) > before)  # type: ignore[misc]
        made.close()
    assert len(rooms.counted) == 3
    for job, node, up, down in rooms.counted:
        assert (job, node, up) == ("job_x", "node_a", 0)
        assert 0 < down <= PIECE + 8 * connections.AHEAD


def test_who_may_not_call_a_route_is_told_before_the_body_is_read(grid: Grid) -> None:
    for token, code in (("", "auth.missing"), ("guessed", "auth.invalid")):
        caller = grid.caller()
        caller.ask("POST", "/jobs", 4_000_000, token, "Content-Type: application/json")
        status, problem = caller.answer()
        assert (status, problem["code"]) == (401, code)
        caller.say(b" " * 4_000_000 + HEALTH)  # the rest is thrown away
        assert caller.answer()[0] == 200


def test_public_routes_take_small_bodies_and_known_callers_send_large_ones(grid: Grid) -> None:
    stranger, known = grid.caller(), grid.caller()
    stranger.ask("POST", "/login", PUBLIC_BODY + 1, "", "Content-Type: application/json")
    stranger.say(b" " * (PUBLIC_BODY + 1))
    status, problem = stranger.answer()
    assert (status, problem["code"]) == (413, "http.too_large")
    stranger.say(HEALTH)
    assert stranger.answer()[0] == 200
    known.ask("POST", "/jobs", 2 * PUBLIC_BODY, OPERATOR, "Content-Type: application/json")
    known.say(b" " * (2 * PUBLIC_BODY - 2) + b"{}")
    assert known.answer()[1]["code"] == "usage.invalid"


def test_who_asks_too_often_is_told_so_whatever_is_left_of_the_body(
    grid: Grid, monkeypatch: pytest.MonkeyPatch
) -> None:
    limits, full = Limits(LimitSettings(), time.monotonic), [True]
    arrive = limits.arrive

    def refuse(self: Limits, address: str, credentials: str) -> None:
        if full:
            raise too_many("key", limits.key.rate, 1.0)
        arrive(address, credentials)

    monkeypatch.setattr(Limits, "arrive", refuse)
    caller = grid.caller()
    caller.ask("POST", "/jobs", 4_000_000, OPERATOR, "Content-Type: application/json")
    caller.say(b" " * 4_000_000)
    status, problem = caller.answer()
    assert (status, problem["code"]) == (429, "limit.rate")
    full.clear()
    caller.say(HEALTH)
    assert caller.answer()[0] == 200


def test_a_token_s_first_request_looks_it_up_once_unless_its_body_takes_long(
    grid: Grid, monkeypatch: pytest.MonkeyPatch
) -> None:
    looked_up, verify = [], callers.verify_token

    async def count(grid: OrchestratorGrid, token: str) -> Principal:
        looked_up.append(token)
        return await verify(grid, token)

    monkeypatch.setattr(callers, "verify_token", count)
    caller = grid.caller()
    caller.ask("POST", "/jobs", 2, OPERATOR, "Content-Type: application/json")
    caller.say(b"{}")
    assert caller.answer()[1]["code"] == "usage.invalid"
    assert looked_up == [OPERATOR]
    caller.ask("GET", "/jobs", 0, OPERATOR)
    assert caller.answer()[0] == 200
    assert looked_up == [OPERATOR] * 2, "each request asks for itself"


def test_a_key_that_is_revoked_while_a_body_comes_slowly_opens_nothing(
    grid: Grid, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(security, "FRESH_S", -1.0)
    looked_up, verify = [], callers.verify_token

    async def once(grid: OrchestratorGrid, token: str) -> Principal:
        looked_up.append(token)
        if len(looked_up) > 1:
            raise Unauthenticated("auth.invalid", "It was revoked.")
        return await verify(grid, token)

    monkeypatch.setattr(callers, "verify_token", once)
    caller = grid.caller()
    caller.ask("POST", "/jobs", 2, OPERATOR, "Content-Type: application/json")
    caller.say(b"{")
    eventually(lambda: bool(looked_up))
    caller.say(b"}")
    assert caller.answer()[0] == 401


def test_strangers_hold_so_many_bytes_together_and_the_longest_halting_goes(
    grid: Grid, monkeypatch: pytest.MonkeyPatch
) -> None:
    first, second = (grid.halting(40_000, 30_000) for _ in "ab")
    monkeypatch.setattr(connections, "UNPROVEN_BYTES", 50_000)
    assert first.is_cut()
    second.say(b" " * 10_000)
    assert second.answer()[0] == 422


def test_beyond_the_limit_who_made_no_progress_for_longest_makes_room(small: Grid) -> None:
    first, second = small.halting(), small.halting()
    held = small.theirs(first).bytes_held()
    first.say(b" ")
    eventually(lambda: small.theirs(first).bytes_held() > held)
    newcomer = small.caller()
    newcomer.say(HEALTH)
    assert newcomer.answer()[0] == 200
    assert second.is_cut()
    first.say(b" " * 998)
    assert first.answer()[0] == 422


def test_strangers_make_room_before_an_event_stream_does(small: Grid) -> None:
    stream = small.watching()
    for _ in range(4):
        last = small.halting()
    newcomer = small.caller()
    assert last.is_cut()
    newcomer.say(HEALTH)
    assert newcomer.answer()[0] == 200
    assert len(small.http.port.connections) == 2
    assert any(c.proven and c.at_work for c in small.http.port.connections)
    del stream


def test_where_all_are_at_work_a_newcomer_comes_in_only_for_one_that_stands_still(
    small: Grid, monkeypatch: pytest.MonkeyPatch
) -> None:
    first, _second = small.watching(), small.watching()
    assert small.caller().is_cut()
    monkeypatch.setattr(connections, "WORK_S", 0.0)
    newcomer = small.caller()
    newcomer.say(HEALTH)
    assert newcomer.answer()[0] == 200
    while first.socket.recv(4096):
        pass


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
