"""Following events: the reading of a stream and the patience with one that breaks, without a
socket. Both kinds of client drive a :class:`Follower`."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import httpx
from pydantic import ValidationError

from distribai.api import answers
from distribai.client import calls
from distribai.errors import (
    CODES,
    DistribAIError,
    NotAllowed,
    NotFound,
    ProtocolMismatch,
    Unauthenticated,
    Unavailable,
)

SILENCE_S = 45.0
"""A stream that says nothing for so long is broken: the server speaks every 15 s."""

PATIENCE_S = 120.0
"""How long a follower bears with a grid that does not answer: it may be restarting."""

MAX_EVENT = 1 << 20
"""Bytes of one event."""

LONGEST_PAUSE_S = 5.0


@dataclass
class Reader:
    """Server-sent events out of bytes, as the HTML standard has them (section 9.2.6): fields until
    an empty line; comments and unknown fields mean nothing. An id counts from the empty line on:
    of an event that is cut off half-way nothing was seen."""

    last_id: str = ""
    _id: str = ""
    _rest: bytes = b""
    _kind: str = ""
    _data: list[str] = field(default_factory=list)

    def feed(self, chunk: bytes) -> Iterator[tuple[str, str]]:
        """(kind, data) of each event that is whole now.

        Raises:
            ProtocolMismatch: a line without an end.
        """
        *lines, self._rest = (self._rest + chunk).split(b"\n")
        if len(self._rest) > MAX_EVENT:
            raise ProtocolMismatch(
                "protocol.version", f"An event has more than {MAX_EVENT} bytes: is this a grid?"
            )
        for line in lines:
            text = line.removesuffix(b"\r").decode("utf-8", "replace")
            name, _, value = text.partition(":")
            value = value.removeprefix(" ")
            if not text:
                self.last_id = self._id or self.last_id
                if self._data:
                    yield self._kind or "message", "\n".join(self._data)
                self._kind, self._data, self._id = "", [], ""
            elif name == "id" and "\0" not in value:
                self._id = value
            elif name == "event":
                self._kind = value
            elif name == "data":
                self._data.append(value)


@dataclass
class Follower:
    """One follower's state: the cursor it stands at, and since when nobody answers it.

    Args:
        path: the feed's address.
        params: the feed's filter.
        cursor: behind which to begin: ``latest`` for now.
        patience_s: seconds without an answer after which it gives up.
    """

    path: str
    params: dict[str, Any]
    cursor: str
    patience_s: float = PATIENCE_S
    _silent_since: float | None = None
    _failures: int = 0
    _reader: Reader = field(default_factory=Reader)

    @classmethod
    def of(cls, job: str, node: str, kinds: Sequence[str], after: str) -> Follower:
        """A follower of the grid's events, a job's, or a node's."""
        path, params = calls.feed(job, node, kinds)
        return cls(path, params, after)

    def request(self) -> dict[str, Any]:
        """The next request: httpx's arguments."""
        headers = {"Accept": "text/event-stream"}
        params = dict(self.params)
        if self.cursor == "latest":
            params["after"] = self.cursor
        elif self.cursor:
            headers["Last-Event-ID"] = self.cursor
        return {
            "method": "GET",
            "url": self.path,
            "params": params,
            "headers": headers,
            "timeout": httpx.Timeout(SILENCE_S, connect=5.0),
        }

    def opened(self, response: httpx.Response) -> None:
        """A stream has begun.

        Raises:
            ProtocolMismatch: it is none; the orchestrator is older than this client.
        """
        kind = response.headers.get("content-type", "")
        if not kind.startswith("text/event-stream"):
            raise ProtocolMismatch(
                "protocol.version",
                f"{response.request.url} does not stream events.",
                "The orchestrator is older than this client: `distribai version`, "
                "`distribai health`.",
            )
        self._reader = Reader(last_id="" if self.cursor == "latest" else self.cursor)

    def events(self, chunk: bytes) -> Iterator[answers.EventRecord]:
        """The events in what has come.

        Raises:
            Unavailable: the stream was ended by the other side, with its reason.
            Unauthenticated, NotAllowed, NotFound: it was ended because the caller may not read it
                any more.
            ProtocolMismatch: an event in a form that this client does not understand.
        """
        self._silent_since, self._failures = None, 0
        try:
            for kind, data in self._reader.feed(chunk):
                if kind == "end":
                    said = answers.Problem.model_validate_json(_with_status(data))
                    code = said.code if said.code in CODES else "grid.unreachable"
                    raise _FINAL.get(code, Unavailable)(code, said.detail)
                event = answers.EventRecord.model_validate_json(data)
                self.cursor = event.cursor
                yield event
        except ValidationError as problem:
            raise ProtocolMismatch(
                "protocol.version",
                "An event came in a form that this client does not understand.",
                "Client and orchestrator differ in version: `distribai version`.",
            ) from problem
        # Also past what the filter left out, so that it is not looked through again.
        self.cursor = self._reader.last_id or self.cursor

    def failed(self, problem: DistribAIError, now: float) -> float:
        """The stream broke, or could not be opened; the seconds to wait before the next try.

        Raises:
            DistribAIError: what another try cannot mend, or nobody has answered for
                ``patience_s``.
        """
        if not isinstance(problem, Unavailable):
            raise problem
        if self._silent_since is None:
            self._silent_since = now
        elif now - self._silent_since > self.patience_s:
            raise problem
        self._failures += 1
        return min(LONGEST_PAUSE_S, 0.25 * 2.0 ** min(self._failures, 10))


_FINAL: dict[str, type[DistribAIError]] = {
    "auth.invalid": Unauthenticated,
    "auth.forbidden": NotAllowed,
    "job.unknown": NotFound,
    "node.unknown": NotFound,
}
"""Ends after which another try finds the same."""


def _with_status(data: str) -> str:
    """An ``end`` event's data are a problem without the status that only an answer has."""
    return data.replace("{", '{"status":503,', 1)
