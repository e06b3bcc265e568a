"""Blobs to and from the grid over HTTP, by hash, resumed where they broke off.

::

    GET   /api/v1/blobs/{sha256}            Range: bytes=n-   ->  200 or 206
                                                               ->  307 to the object store
    POST  /api/v1/blobs/{sha256}/fetched    {"bytes"}         ->  204, what came from there
    POST  /api/v1/blobs                     {"sha256", "size"} ->  200 there already
                                                               ->  201 {"upload_id", "offset"}
    HEAD  /api/v1/blobs/uploads/{id}                           ->  Upload-Offset
    PATCH /api/v1/blobs/uploads/{id}        Upload-Offset, raw bytes -> 200/201 when complete

Every request carries the session's bearer token and, for the byte accounts, the job. Whatever may
pass (no connection, a cut body, 5xx, 429, and 401 while the session is being renewed) is tried
again with full jitter; an attempt that moved bytes starts the count anew.
"""

from __future__ import annotations

import asyncio
import contextlib
import math
import random
import ssl
from collections.abc import AsyncGenerator, Awaitable, Callable
from pathlib import Path

import httpx
import structlog

from distribai.core.direct import CONNECT_S, FOLLOW_HEADER
from distribai.core.spec import BlobRef
from distribai.errors import Integrity, Unavailable
from distribai.node.answers import (
    PASSING,
    Passing,
    error_of,
    offset,
    retry_after,
    upload_of,
)
from distribai.node.cache import sha256_of
from distribai.node.clock import Clock, full_jitter
from distribai.node.direct import ObjectStore
from distribai.node.receiving import collect, remove, size_of
from distribai.node.traffic import Traffic, Transfer

log = structlog.get_logger("distribai.node")

_TIMEOUT = httpx.Timeout(60.0, connect=15.0)

TELL_EVERY = 4
"""Failures in a row after which the owner and the grid are told, each time: some ten seconds
without a byte."""

TELL_AFTER_S = 30.0
"""They are told of a single failure, too, that took so many seconds in which no byte of any blob
moved: of an address that takes connections and never answers there is one failure a minute."""


class BlobClient:
    """The node's half of the blob interface.

    Args:
        base_url: of the HTTP interface, without a slash at the end.
        token: gives the present session token.
        traffic: counts and paces what moves; without it nothing is limited or kept.
        attempts: how often in a row a download may fail without moving a byte.
        trust_env: whether proxies of the environment apply; never for a loopback address.
        verify: gives httpx's ``verify`` for the address, asked once, before the first request;
            may raise ``Unavailable`` as long as it cannot tell.
    """

    def __init__(
        self,
        base_url: str,
        token: Callable[[], str],
        clock: Clock,
        rng: random.Random,
        *,
        traffic: Traffic | None = None,
        attempts: int = 20,
        trust_env: bool = True,
        verify: Callable[[], Awaitable[ssl.SSLContext | bool]] | None = None,
    ) -> None:
        self._token = token
        self._clock = clock
        self._rng = rng
        self._attempts = attempts
        self._base_url = base_url
        self._trust_env = trust_env
        self._verify = verify
        self._http_client: httpx.AsyncClient | None = None
        self._store = ObjectStore(clock, trust_env=trust_env)
        self.traffic = traffic or Traffic(None, clock)

    async def close(self) -> None:
        """Close all connections."""
        await self._store.close()
        if self._http_client is not None:
            await self._http_client.aclose()

    async def _http(self) -> httpx.AsyncClient:
        """The client, made when it is first needed: whom to trust may have to be fetched."""
        if self._http_client is None:
            verify = True if self._verify is None else await self._verify()
            if self._http_client is None:  # another request was faster
                self._http_client = httpx.AsyncClient(
                    base_url=self._base_url,
                    timeout=_TIMEOUT,
                    trust_env=self._trust_env,
                    verify=verify,
                )
        return self._http_client

    # -------------------------------------------------------------- download

    async def download(self, blob: BlobRef, path: Path, job_id: str) -> None:
        """Complete ``path``, which may hold the first bytes already, and check its hash.

        A file with a wrong hash is fetched once more from the start: the part that lay there may
        have been the bad one.

        Raises:
            NotFound: ``blob.unknown``, the grid does not have it.
            Integrity: ``blob.hash`` or ``blob.size``; the file is removed.
            Unavailable: ``grid.unreachable``, it failed too often.
            NotAllowed: ``node.month``: the month has too few bytes left.
            OSError: the disk is full.
        """
        for last in (False, True):
            await self._patiently(
                lambda: self._download_once(blob, path, job_id),
                lambda: size_of(path),
                "download",
                attempts=self._attempts,
            )
            await self._say_fetched()
            if await asyncio.to_thread(sha256_of, path) == blob.sha256:
                return
            remove(path)
            self._store.avoid()  # if it was the store that gave other bytes
            if last:
                raise Integrity(
                    "blob.hash",
                    f"The grid sent other bytes than those of blob {blob.sha256[:12]}.",
                    "The task will be given to another node; tell the grid's operator.",
                )

    async def _download_once(self, blob: BlobRef, path: Path, job_id: str) -> None:
        have = size_of(path)
        if have > blob.size:
            remove(path)
            have = -1
        if have == blob.size:
            return
        have = max(0, have)
        self.traffic.check(blob.size - have)
        headers = self._headers(job_id)
        if have:
            headers["Range"] = f"bytes={have}-"
        if self._store.usable:
            headers[FOLLOW_HEADER] = "1"
        address = f"/api/v1/blobs/{blob.sha256}"
        async with (await self._http()).stream("GET", address, headers=headers) as answer:
            sent_on = answer.next_request
            if sent_on is None:
                if answer.status_code not in (200, 206, 416):
                    await self._refuse(answer)
                await collect(answer, blob, path, have, self.traffic)
        if sent_on is not None:
            await self._from_store(sent_on.url, blob, path, job_id, have)
        if size_of(path) < blob.size:
            raise Passing("the body ended early")

    async def _from_store(
        self, url: httpx.URL, blob: BlobRef, path: Path, job_id: str, have: int
    ) -> None:
        """The same from the object store that the grid sent us to. Whatever is wrong with it, the
        grid's replicas have the bytes, too."""
        moved = 0

        def count(size: int) -> None:
            nonlocal moved
            moved += size

        try:
            async with self._store.get(url, have) as answer:
                if answer.status_code not in (200, 206, 416):
                    raise Passing(f"it answered {answer.status_code}")
                await collect(answer, blob, path, have, self.traffic, count)
        except httpx.TransportError as problem:
            if not moved:  # one that gave something is gone on with at the next byte
                self._store.avoid()
            raise Passing(f"the object store: {problem or type(problem).__name__}") from problem
        except (Integrity, Passing) as problem:
            self._store.avoid()
            raise Passing(f"the object store: {problem}") from problem
        finally:
            if moved:
                self._store.owed.append((job_id, blob.sha256, min(moved, blob.size)))

    async def _say_fetched(self) -> None:
        """Tell the grid what came from the object store; if it is away, the next time."""
        http = await self._http()
        while self._store.owed:
            owed = self._store.owed.popleft()
            job_id, sha256, moved = owed
            try:
                answer = await http.post(
                    f"/api/v1/blobs/{sha256}/fetched",
                    json={"bytes": moved},
                    headers=self._headers(job_id),
                    timeout=CONNECT_S,  # the blob is here: nothing should wait for this
                )
            except httpx.TransportError:
                self._store.owed.appendleft(owed)
                return
            if answer.status_code in PASSING:
                self._store.owed.appendleft(owed)
                return

    # -------------------------------------------------------------- upload

    async def upload(
        self,
        path: Path,
        blob: BlobRef,
        job_id: str,
        *,
        upload_id: str = "",
        begun: Callable[[str], Awaitable[None]] | None = None,
    ) -> None:
        """Bring a file to the grid; at once when the grid has it.

        Finished work is not given up because the grid is away: this goes on trying until it is
        cancelled. ``upload_id`` goes on with an upload of the same bytes where the grid has it;
        one that the grid has forgotten begins anew. ``begun`` hears of each new one's id before
        its first byte is sent.

        Raises:
            Integrity: the grid found another hash or size.
            NotAllowed: the grid does not take it from this node; ``node.month``: the month has too
                few bytes left.
            OSError: the file cannot be read.
        """
        state = _Upload(upload_id, begun)
        await self._patiently(
            lambda: self._upload_once(path, blob, job_id, state),
            lambda: state.offset,
            "upload",
            attempts=math.inf,
        )

    async def _upload_once(self, path: Path, blob: BlobRef, job_id: str, state: _Upload) -> None:
        http = await self._http()
        headers = self._headers(job_id)
        if state.id:
            answer = await http.head(f"/api/v1/blobs/uploads/{state.id}", headers=headers)
            if answer.status_code == 404:  # finished meanwhile, or forgotten: ask from the start
                state.id = ""
            elif answer.status_code not in (200, 204):
                await self._refuse(answer)
            else:
                state.offset = offset(answer)
                if state.offset > blob.size:
                    state.id = ""
        if not state.id:
            wanted = {"sha256": blob.sha256, "size": blob.size}
            answer = await http.post("/api/v1/blobs", json=wanted, headers=headers)
            if answer.status_code == 200:
                return
            if answer.status_code != 201:
                await self._refuse(answer)
            state.id, state.offset = upload_of(answer)
            state.inherited = False
            if state.begun is not None:
                await state.begun(state.id)
        headers["Upload-Offset"] = str(state.offset)
        headers["Content-Type"] = "application/offset+octet-stream"
        left = blob.size - state.offset
        headers["Content-Length"] = str(left)
        with self.traffic.sending(left) as moving:
            # To the answer: what the system has taken is not at the other end yet.
            async with contextlib.aclosing(self._send(path, state.offset, moving)) as content:
                answer = await http.patch(
                    f"/api/v1/blobs/uploads/{state.id}", content=content, headers=headers
                )
        if answer.status_code in (409, 404):
            raise Passing("the upload stands at another offset")
        if answer.status_code == 204:
            raise Passing("the upload is not complete")
        if answer.status_code in (400, 413, 422) and state.inherited:
            state.id = ""
            raise Passing("the upload that was begun earlier is of other bytes")
        if answer.status_code not in (200, 201):
            await self._refuse(answer)

    async def _send(self, path: Path, offset: int, moving: Transfer) -> AsyncGenerator[bytes]:
        most = self.traffic.up.chunk
        # Opened here and not in a thread: a file that a thread opens for a cancelled upload is
        # closed by nobody.
        with path.open("rb") as file:
            file.seek(offset)
            while chunk := await asyncio.to_thread(file.read, min(most, moving.due)):
                await moving.go(len(chunk))
                yield chunk

    # -------------------------------------------------------------- both

    def _headers(self, job_id: str) -> dict[str, str]:
        return {
            "Authorization": f"Bearer {self._token()}",
            "X-DistribAI-Job": job_id,
            "Accept-Encoding": "identity",  # bytes are counted and resumed as they travel
        }

    async def _patiently(
        self,
        once: Callable[[], Awaitable[None]],
        moved: Callable[[], int],
        what: str,
        attempts: float,
    ) -> None:
        waits = full_jitter(self._rng)
        failures = 0
        while True:
            before, traffic, began = moved(), self.traffic.total, self._clock.monotonic()
            try:
                await once()
                self.traffic.stuck("")
                return
            except (Passing, Unavailable, httpx.TransportError) as problem:
                failures = 1 if moved() > before else failures + 1
                if failures >= attempts:
                    raise Unavailable(
                        "grid.unreachable",
                        f"The {what} of a blob at {self._base_url} failed {failures} times, "
                        f"at last because: {_in_words(problem)}.",
                        "Check the network, that the orchestrator runs, and that the join link's "
                        "address for http is the right one.",
                    ) from problem
                dumb = self._clock.monotonic() - began >= TELL_AFTER_S
                if failures % TELL_EVERY == 0 or (dumb and self.traffic.total == traffic):
                    why = _in_words(problem)
                    self.traffic.stuck(f"the {what} of a blob at {self._base_url} fails: {why}")
                    log.warning(
                        f"the {what} of a blob does not get on",
                        address=self._base_url,
                        failures=failures,
                        why=why,
                        hint="Is the join link's address for http the right one, and reachable? A "
                        "fresh link takes the place of the one that is kept: node start --join.",
                    )
                if failures == 1:
                    waits = full_jitter(self._rng)
                after = problem.after if isinstance(problem, Passing) else 0.0
            await self._clock.sleep(max(next(waits), after))

    async def _refuse(self, answer: httpx.Response) -> None:
        """Raise what an answer other than the expected one means."""
        await answer.aread()
        if answer.status_code in PASSING:
            raise Passing(f"the grid answered {answer.status_code}", retry_after(answer))
        raise error_of(answer)


def _in_words(problem: Exception) -> str:
    if isinstance(problem, httpx.ReadTimeout):
        return f"it takes connections, but does not answer within {_TIMEOUT.read:.0f} s"
    return str(problem) or type(problem).__name__


class _Upload:
    """Where an upload stands. ``inherited``: an earlier process began it, perhaps with other
    bytes."""

    def __init__(self, upload_id: str, begun: Callable[[str], Awaitable[None]] | None) -> None:
        self.id = upload_id
        self.inherited = bool(upload_id)
        self.begun = begun
        self.offset = 0
