"""The two clients: the same calls, once blocking, once awaited."""

from __future__ import annotations

import ssl
import uuid
from collections.abc import Callable, Iterator
from pathlib import Path
from types import TracebackType
from typing import Any, Self, TypeVar

import httpx
from pydantic import ValidationError

from distribai import __version__, tls
from distribai.api import answers
from distribai.api import why as why_answers
from distribai.client import calls, problems
from distribai.client.calls import Call
from distribai.client.transfer import Transfer
from distribai.core.spec import BlobRef, JobSpec
from distribai.errors import ProtocolMismatch, UsageError

T = TypeVar("T")

TIMEOUT_S = 30.0
"""What an answer may take, beyond what the server was asked to wait."""

CONNECT_S = 5.0
"""What a connection may take."""

LONG_POLL_S = 20.0
"""How long one request of a follower waits; below what proxies cut off."""


class Client:
    """A blocking client. Close it, or use it as a context manager.

    Args:
        url: address of the orchestrator's HTTP interface.
        token: the operator's token.
        ca: the grid's CA certificate in PEM, for an https address that it vouches for; empty: the
            authorities that the system trusts.
        transport: how bytes travel; the network by default.

    Every method raises the orchestrator's own errors (``distribai.errors``), and ``Unavailable``
    with ``grid.unreachable`` when nobody answers.
    """

    def __init__(
        self,
        url: str,
        token: str = "",
        *,
        ca: str = "",
        transport: httpx.BaseTransport | None = None,
    ) -> None:
        self.url = url
        self._http = httpx.Client(**_options(url, token, ca), transport=transport)
        self.blobs = Transfer(self._http, url)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.close()

    def close(self) -> None:
        """Let go of the connections."""
        self._http.close()

    def send(self, call: Call[T]) -> T:
        """Make one request."""
        try:
            response = self._http.request(**_request(call))
        except httpx.HTTPError as problem:
            raise problems.unreachable(self.url, problem) from problem
        return _read(call, response)

    def health(self) -> answers.GridSummary:
        """The grid's health."""
        return self.send(calls.health())

    def nodes(self) -> list[answers.NodeRecord]:
        """All nodes that ever joined."""
        return self.send(calls.nodes()).items

    def node_why(self, ref: str) -> why_answers.NodeWhy:
        """What a node (id, unique prefix or name) holds, and why it gets no more."""
        return self.send(calls.node_why(ref))

    def node_events(
        self, ref: str, after: str = "", wait: float = 0.0
    ) -> list[answers.EventRecord]:
        """Some state changes of a node behind ``after``; empty when there was none within
        ``wait``."""
        return self.send(calls.node_events(ref, after, wait)).items

    def plan(self, spec: JobSpec) -> answers.PlanAnswer:
        """What the job would take; nothing is created."""
        return self.send(calls.plan(spec))

    def create_job(self, spec: JobSpec, idempotency_key: str = "") -> answers.JobId:
        """Submit a job. A repeat with the same key and spec answers with the same job."""
        return self.send(calls.create_job(spec, idempotency_key or uuid.uuid4().hex))

    def jobs(self, state: str | None = None) -> Iterator[answers.JobSummary]:
        """All jobs, newest first, page by page."""
        return self._pages(lambda cursor: calls.jobs(state, cursor=cursor))

    def job(self, ref: str) -> answers.JobRecord:
        """One job by id, unique prefix or name."""
        return self.send(calls.job(ref))

    def why(self, ref: str) -> why_answers.JobWhy:
        """Why a job is where it is."""
        return self.send(calls.why(ref))

    def accept(self, ref: str) -> answers.JobId:
        """Accept a submitted job."""
        return self.send(calls.accept(ref))

    def decline(self, ref: str, why: str) -> answers.JobId:
        """Decline a submitted job."""
        return self.send(calls.decline(ref, why))

    def cancel(self, ref: str, why: str = "") -> answers.JobId:
        """Cancel an open job."""
        return self.send(calls.cancel(ref, why))

    def pause(self, ref: str) -> answers.JobId:
        """Pause a running job."""
        return self.send(calls.pause(ref))

    def resume(self, ref: str) -> answers.JobId:
        """Resume a paused job."""
        return self.send(calls.resume(ref))

    def rounds(self, ref: str) -> list[answers.RoundRecord]:
        """All rounds."""
        return self.send(calls.rounds(ref)).items

    def tasks(self, ref: str) -> Iterator[answers.TaskRecord]:
        """All tasks, oldest first, page by page."""
        return self._pages(lambda cursor: calls.tasks(ref, cursor=cursor))

    def versions(self, ref: str) -> list[answers.VersionRecord]:
        """All versions."""
        return self.send(calls.versions(ref)).items

    def events(self, ref: str, after: str = "", wait: float = 0.0) -> list[answers.EventRecord]:
        """Some state changes behind ``after``; empty when there was none within ``wait``."""
        return self.send(calls.events(ref, after, wait)).items

    def logs(self, ref: str, after: str = "", wait: float = 0.0) -> list[answers.LogRecord]:
        """Some log lines behind ``after``; empty when there was none within ``wait``."""
        return self.send(calls.logs(ref, after, wait)).items

    def generate(self, ref: str, prompt: str, **how: Any) -> answers.Generation:
        """A sample from a version; ``how`` as in :func:`distribai.client.calls.generate`."""
        return self.send(calls.generate(ref, prompt, **how))

    def upload(self, path: Path, progress: Callable[[int, int], None] | None = None) -> BlobRef:
        """Upload a file by its hash, unless the grid has it already; see ``Transfer.upload``."""
        return self.blobs.upload(path, progress)

    def download_weights(
        self,
        ref: str,
        version: int | None,
        out: Path,
        progress: Callable[[int, int], None] | None = None,
    ) -> tuple[int, BlobRef]:
        """Fetch a version's safetensors to ``out``, whole and checked or not at all; which
        version it is, and the file's hash and size."""
        params = {} if version is None else {"version": version}
        headers, blob = self.blobs.download(calls.job_path(ref, "/weights"), out, params, progress)
        return int(headers["X-DistribAI-Version"]), blob

    def _pages(self, call: Callable[[str], Call[answers.Page[T]]]) -> Iterator[T]:
        cursor = ""
        while True:
            page = self.send(call(cursor))
            yield from page.items
            cursor = page.next_cursor
            if not cursor:
                return


class AsyncClient:
    """The awaited client: ``await client.send(calls.job("my-model"))``. As :class:`Client`."""

    def __init__(
        self,
        url: str,
        token: str = "",
        *,
        ca: str = "",
        transport: httpx.AsyncBaseTransport | None = None,
    ) -> None:
        self.url = url
        self._http = httpx.AsyncClient(**_options(url, token, ca), transport=transport)

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        await self.aclose()

    async def aclose(self) -> None:
        """Let go of the connections."""
        await self._http.aclose()

    async def send(self, call: Call[T]) -> T:
        """Make one request."""
        try:
            response = await self._http.request(**_request(call))
        except httpx.HTTPError as problem:
            raise problems.unreachable(self.url, problem) from problem
        return _read(call, response)


def _options(url: str, token: str, ca: str) -> dict[str, Any]:
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
            "Copy it again from where `orchestrator start` printed it.",
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


def _request(call: Call[Any]) -> dict[str, Any]:
    return {
        "method": call.method,
        "url": call.path,
        "params": dict(call.params),
        "json": call.body,
        "headers": dict(call.headers),
        "timeout": httpx.Timeout(TIMEOUT_S + call.patience, connect=CONNECT_S),
    }


def _read(call: Call[T], response: httpx.Response) -> T:
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
