"""The two clients: the same calls, once blocking, once awaited."""

from __future__ import annotations

import asyncio
import time
import uuid
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any, Self, TypeVar

import httpx

from distribai.api import answers
from distribai.api import why as why_answers
from distribai.client import calls, http, problems
from distribai.client.calls import Call
from distribai.client.following import Follower
from distribai.client.people import People
from distribai.client.transfer import Transfer
from distribai.core.spec import BlobRef, JobSpec
from distribai.errors import DistribAIError

T = TypeVar("T")


class Client:
    """A blocking client. Close it, or use it as a context manager. ``people`` has the calls about
    accounts, organizations, keys, invites and the audit feed.

    Args:
        url: address of the orchestrator's HTTP interface.
        token: a key of an account.
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
        self._http = httpx.Client(**http.options(url, token, ca), transport=transport)
        self.blobs = Transfer(self._http, url)
        self.people = People(self.send)

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
            response = self._http.request(**http.request(call))
        except httpx.HTTPError as problem:
            raise problems.unreachable(self.url, problem) from problem
        return http.read(call, response)

    def health(self) -> answers.GridSummary:
        """The grid's health."""
        return self.send(calls.health())

    def nodes(self) -> list[answers.NodeRecord]:
        """All nodes that ever joined, by id."""
        return list(http.pages(self.send, lambda cursor: calls.nodes(cursor=cursor)))

    def node_why(self, ref: str) -> why_answers.NodeWhy:
        """What a node (id, unique prefix or name) holds, and why it gets no more."""
        return self.send(calls.node_why(ref))

    def plan(self, spec: JobSpec, organization: str = "") -> answers.PlanAnswer:
        """What the job would take; nothing is created."""
        return self.send(calls.plan(spec, organization))

    def create_job(
        self, spec: JobSpec, idempotency_key: str = "", organization: str = ""
    ) -> answers.JobId:
        """Submit a job. A repeat with the same key and spec answers with the same job."""
        key = idempotency_key or uuid.uuid4().hex
        return self.send(calls.create_job(spec, key, organization))

    def jobs(self, state: str | None = None) -> Iterator[answers.JobSummary]:
        """All jobs, newest first, page by page."""
        return http.pages(self.send, lambda cursor: calls.jobs(state, cursor=cursor))

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

    def retry(self, ref: str, idempotency_key: str = "") -> answers.JobId:
        """A new job from the last version of one that failed or was cancelled."""
        return self.send(calls.retry(ref, idempotency_key or uuid.uuid4().hex))

    def weigh(self, ref: str, weight: float) -> answers.JobId:
        """Let a job weigh more or less than others of its tier; 1 is usual."""
        return self.send(calls.weigh(ref, weight))

    def order_node(self, ref: str, verb: str) -> answers.NodeState:
        """Tell a node to ``pause``, ``resume`` or ``drain``."""
        return self.send(calls.order_node(ref, verb))

    def stand_node(self, ref: str, verb: str, why: str) -> answers.NodeState:
        """Change a node's standing: ``quarantine``, ``trust``, ``ban`` or ``pardon``."""
        return self.send(calls.stand_node(ref, verb, why))

    def rounds(self, ref: str) -> list[answers.RoundRecord]:
        """All rounds."""
        return list(http.pages(self.send, lambda cursor: calls.rounds(ref, cursor=cursor)))

    def tasks(self, ref: str) -> Iterator[answers.TaskRecord]:
        """All tasks, oldest first, page by page."""
        return http.pages(self.send, lambda cursor: calls.tasks(ref, cursor=cursor))

    def versions(self, ref: str) -> list[answers.VersionRecord]:
        """All versions."""
        return list(http.pages(self.send, lambda cursor: calls.versions(ref, cursor=cursor)))

    def events(self, ref: str, after: str = "") -> list[answers.EventRecord]:
        """Some events of a job behind ``after``, at most 200; of the grid or a node, and with other
        filters: ``send(calls.events(...))``."""
        return self.send(calls.events(after, job=ref)).items

    def follow(
        self,
        *,
        job: str = "",
        node: str = "",
        kinds: Sequence[str] = (),
        after: str = "",
        on_trouble: Callable[[DistribAIError | None], None] = lambda _: None,
        sleep: Callable[[float], None] = time.sleep,
        clock: Callable[[], float] = time.monotonic,
    ) -> Iterator[answers.EventRecord]:
        """Every event of the grid, of a job, or of a node and its tasks, from behind ``after`` on
        (``latest``: from now on), without end.

        A stream that breaks is taken up where it broke: no event is lost, none comes twice.
        ``on_trouble`` is told what broke, and None when events flow again.

        Raises:
            Unavailable: the grid has not answered for two minutes.
            DistribAIError: it refuses.
        """
        follower = Follower.of(job, node, kinds, after)
        trouble = False
        while True:
            try:
                with self._http.stream(**follower.request()) as response:
                    if not response.is_success:
                        response.read()
                        raise problems.error_of(response)
                    follower.opened(response)
                    for chunk in response.iter_raw():
                        if trouble:
                            on_trouble(None)
                        trouble = False
                        yield from follower.events(chunk)
                problem: DistribAIError = problems.cut_off(self.url)
            except httpx.HTTPError as broken:
                problem = problems.unreachable(self.url, broken)
            except DistribAIError as refused:
                problem = refused
            pause = follower.failed(problem, clock())
            if not trouble:
                on_trouble(problem)
            trouble = True
            sleep(pause)

    def logs(self, ref: str, after: str = "", wait: float = 0.0) -> list[answers.LogRecord]:
        """Some log lines behind ``after``; empty when there was none within ``wait``."""
        return self.send(calls.logs(ref, after, wait)).items

    def generate(self, ref: str, prompt: str, **how: Any) -> answers.Generation:
        """A sample from a version; ``how`` as in :func:`distribai.client.calls.generate`."""
        return self.send(calls.generate(ref, prompt, **how))

    def create_webhook(
        self, url: str, kinds: Sequence[str] = (), idempotency_key: str = ""
    ) -> answers.WebhookMade:
        """Let events (all, or those of ``kinds``) be posted to an address from now on. The answer
        has the secret that signs them."""
        key = idempotency_key or uuid.uuid4().hex
        return self.send(calls.create_webhook(url, kinds, key))

    def webhooks(self) -> Iterator[answers.WebhookRecord]:
        """All webhooks, page by page."""
        return http.pages(self.send, lambda cursor: calls.webhooks(cursor=cursor))

    def webhook(self, webhook_id: str) -> answers.WebhookRecord:
        """One webhook."""
        return self.send(calls.webhook(webhook_id))

    def delete_webhook(self, webhook_id: str) -> None:
        """Delete a webhook with its log."""
        self.send(calls.delete_webhook(webhook_id))

    def test_webhook(self, webhook_id: str) -> answers.DeliveryRecord:
        """Send one test now, and tell what the receiver answered."""
        return self.send(calls.test_webhook(webhook_id))

    def enable_webhook(self, webhook_id: str) -> answers.WebhookRecord:
        """Deliver again, from now on."""
        return self.send(calls.enable_webhook(webhook_id))

    def deliveries(self, webhook_id: str) -> Iterator[answers.DeliveryRecord]:
        """The log of a webhook's deliveries, newest first, page by page."""
        return http.pages(self.send, lambda cursor: calls.deliveries(webhook_id, cursor=cursor))

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


class AsyncClient:
    """The awaited client: ``await client.send(calls.job("my-model"))``, and likewise with
    :mod:`distribai.client.people`. As :class:`Client`."""

    def __init__(
        self,
        url: str,
        token: str = "",
        *,
        ca: str = "",
        transport: httpx.AsyncBaseTransport | None = None,
    ) -> None:
        self.url = url
        self._http = httpx.AsyncClient(**http.options(url, token, ca), transport=transport)

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
            response = await self._http.request(**http.request(call))
        except httpx.HTTPError as problem:
            raise problems.unreachable(self.url, problem) from problem
        return http.read(call, response)

    async def pages(self, call: Callable[[str], Call[answers.Page[T]]]) -> AsyncIterator[T]:
        """Every entry of a list, page by page: ``pages(lambda c: calls.jobs(cursor=c))``."""
        cursor = ""
        while True:
            page = await self.send(call(cursor))
            for item in page.items:
                yield item
            cursor = page.next_cursor
            if not cursor:
                return

    async def follow(
        self,
        *,
        job: str = "",
        node: str = "",
        kinds: Sequence[str] = (),
        after: str = "",
        on_trouble: Callable[[DistribAIError | None], None] = lambda _: None,
        sleep: Callable[[float], Awaitable[None]] = asyncio.sleep,
        clock: Callable[[], float] = time.monotonic,
    ) -> AsyncIterator[answers.EventRecord]:
        """As :meth:`Client.follow`. Close the iterator, or let its task be cancelled, to stop."""
        follower = Follower.of(job, node, kinds, after)
        trouble = False
        while True:
            try:
                async with self._http.stream(**follower.request()) as response:
                    if not response.is_success:
                        await response.aread()
                        raise problems.error_of(response)
                    follower.opened(response)
                    async for chunk in response.aiter_raw():
                        if trouble:
                            on_trouble(None)
                        trouble = False
                        for event in follower.events(chunk):
                            yield event
                problem: DistribAIError = problems.cut_off(self.url)
            except httpx.HTTPError as broken:
                problem = problems.unreachable(self.url, broken)
            except DistribAIError as refused:
                problem = refused
            pause = follower.failed(problem, clock())
            if not trouble:
                on_trouble(problem)
            trouble = True
            await sleep(pause)
