"""Files up and down: by hash, resumable, whole or not at all."""

from __future__ import annotations

import hashlib
import os
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

import httpx

from distribai.client import problems
from distribai.core.direct import CONNECT_S, FOLLOW_HEADER
from distribai.core.spec import BlobRef
from distribai.errors import (
    Conflict,
    DistribAIError,
    Integrity,
    NotFound,
    Unavailable,
    UsageError,
)

PIECE = 8 << 20
"""Bytes of one request of an upload: what a broken connection costs at most."""

TRIES = 6
"""Consecutive failures before a transfer gives up; with the pauses between, about 15 seconds."""

_STORE_TIMEOUT = httpx.Timeout(30.0, connect=CONNECT_S)

Progress = Callable[[int, int], None]
"""Told (bytes done, bytes in all) after every piece."""


@dataclass(slots=True)
class _Upload:
    """An upload under way; ``lost``: nobody knows what of the last piece arrived."""

    path: Path
    ref: BlobRef
    address: str = ""
    offset: int = 0
    lost: bool = False
    complete: bool = False

    def piece(self) -> bytes:
        """What to send next."""
        with self.path.open("rb") as file:
            file.seek(self.offset)
            data = file.read(min(PIECE, self.ref.size - self.offset))
        if not data and self.offset < self.ref.size:
            raise Integrity(
                "blob.truncated",
                f"{self.path} became shorter while it was uploaded.",
                "Upload it again when nothing writes to it any more.",
            )
        return data


class _Download:
    """A download under way into an open ``file``; ``tag`` and ``headers`` are those of the
    orchestrator's last answer."""

    def __init__(self, file: int, told: Progress) -> None:
        self._file = file
        self._told = told
        self.digest, self.done = hashlib.sha256(), 0
        self.headers, self.tag = httpx.Headers(), ""

    def restart(self) -> None:
        """Forget what came."""
        os.ftruncate(self._file, 0)
        os.lseek(self._file, 0, os.SEEK_SET)
        self.digest, self.done = hashlib.sha256(), 0

    def take(self, response: httpx.Response) -> None:
        """Write the body of an answer, which goes on where this stands."""
        total = self.done + int(response.headers.get("Content-Length", "0"))
        for chunk in response.iter_raw():
            _write_all(self._file, chunk)
            self.digest.update(chunk)
            self.done += len(chunk)
            self._told(self.done, total)


class Transfer:
    """Uploads and downloads over one httpx client.

    Args:
        http: the client, with address and credentials.
        url: what to call the other side in errors.
        sleep: waits between tries, in seconds.
    """

    def __init__(
        self, http: httpx.Client, url: str, sleep: Callable[[float], None] = time.sleep
    ) -> None:
        self._http = http
        self._url = url
        self._sleep = sleep
        self._direct = True  # as long as the object store gives what the orchestrator sends us for

    def upload(self, path: Path, progress: Progress | None = None) -> BlobRef:
        """Upload a file, unless the grid has its bytes already.

        A broken connection is taken up where it broke.

        Raises:
            UsageError: the file cannot be read.
            Integrity: it changed while it was read.
            Unavailable: the orchestrator stays away.
        """
        ref = hash_of(path)
        told = progress or _nobody
        upload = _Upload(path, ref)
        failures = 0
        while not upload.complete:
            try:
                self._upload_piece(upload)
                told(upload.offset, ref.size)
                failures = 0
            except NotFound as problem:
                # The upload's id is gone: dropped, or finished while the answer got lost. A grid
                # that answers again was restarted: its silence before does not count any more.
                failures = self._again(0 if upload.lost else failures, problem)
                upload.address, upload.lost = "", False
            except (Unavailable, Conflict) as problem:
                upload.lost = True
                failures = self._again(failures, problem)
        return ref

    def _upload_piece(self, upload: _Upload) -> None:
        """Begin, find out where to go on, or send the next piece: whatever is next."""
        ref = upload.ref
        if not upload.address:
            asked = {"sha256": ref.sha256, "size": ref.size}
            begun = self._send("POST", "/api/v1/blobs", json=asked).json()
            upload.complete = bool(begun["complete"])
            upload.address = f"/api/v1/blobs/uploads/{begun['upload_id']}"
            upload.offset = ref.size if upload.complete else int(begun["offset"])
            return
        if upload.lost:
            upload.offset = int(self._send("HEAD", upload.address).headers["Upload-Offset"])
            upload.lost = False
            return
        data = upload.piece()
        headers = {"Upload-Offset": str(upload.offset)}
        response = self._send("PATCH", upload.address, content=data, headers=headers)
        upload.offset = int(response.headers["Upload-Offset"])
        upload.complete = response.status_code == 201

    def download(
        self,
        address: str,
        out: Path,
        params: Mapping[str, int] | None = None,
        progress: Progress | None = None,
    ) -> tuple[httpx.Headers, BlobRef]:
        """Fetch ``address`` to ``out`` by way of a file beside it: ``out`` is whole and checked, or
        untouched. A broken connection is taken up where it broke. The answer's headers, and hash
        and size of the file.

        Raises:
            UsageError: ``out`` cannot be written, or is no file (a device or a pipe must not be
                replaced by one).
            Integrity: the bytes are not those of the entity tag.
            Unavailable: the orchestrator stays away.
        """
        if not out.name or (out.exists() and not out.is_file()):
            what = "is a directory" if out.is_dir() else "is not a file"
            raise UsageError(
                "io.file",
                f"{out} cannot be written: it {what}.",
                "Give the path of a file.",
                field="out",
            )
        partial = out.with_name(f".{out.name}.{os.getpid()}.part")
        told = progress or _nobody
        try:
            with partial.open("wb") as file:
                headers, ref = self._download(address, file.fileno(), dict(params or {}), told)
                os.fsync(file.fileno())
            os.replace(partial, out)
        except OSError as problem:
            raise UsageError(
                "io.file",
                f"{out} cannot be written: {problem.strerror or problem}.",
                "Give a path in a directory that exists and that you may write to.",
                field="out",
            ) from problem
        finally:
            partial.unlink(missing_ok=True)
        return headers, ref

    def _download(
        self, address: str, file: int, params: dict[str, int], told: Progress
    ) -> tuple[httpx.Headers, BlobRef]:
        got, failures = _Download(file, told), 0
        while True:
            before = got.done
            try:
                there = self._ask(address, params, got)
                if there is not None:
                    self._fetch(there, got)
            except httpx.HTTPError as problem:
                gone = problems.unreachable(self._url, problem)
                failures = self._again(0 if got.done > before else failures, gone)
                continue
            except Unavailable as problem:
                failures = self._again(failures, problem)
                continue
            found = BlobRef(got.digest.hexdigest(), got.done)
            if found.sha256 == got.tag.strip('"'):
                return got.headers, found
            if there is None:
                raise Integrity(
                    "blob.hash",
                    f"The bytes that came have the SHA-256 {found.sha256}, not {got.tag}.",
                    "Try again; if it stays so, the orchestrator's disk may be failing.",
                )
            self._direct = False  # what speaks for the store is perhaps a hotel's welcome page
            got.restart()

    def _ask(self, address: str, params: dict[str, int], got: _Download) -> httpx.URL | None:
        """Get what is missing from the orchestrator, or where the object store has it."""
        ask = {"Range": f"bytes={got.done}-", "If-Range": got.tag} if got.done else {}
        if self._direct:
            ask[FOLLOW_HEADER] = "1"
        with self._http.stream("GET", address, params=params, headers=ask) as response:
            sent_on = response.next_request
            if not response.is_success and sent_on is None:
                response.read()
                raise problems.error_of(response)
            tag = response.headers["ETag"]
            if got.done and (tag != got.tag or (sent_on is None and response.status_code != 206)):
                got.restart()  # it is another file by now (a new latest version)
            got.headers, got.tag = response.headers, tag
            if sent_on is None:
                got.take(response)
        return None if sent_on is None else sent_on.url

    def _fetch(self, there: httpx.URL, got: _Download) -> None:
        """Get what is missing from the object store, which needs no credentials of ours; if it
        cannot be had there, from the orchestrator from now on."""
        before = got.done
        ask = {"Accept-Encoding": "identity"}
        if before:
            ask["Range"] = f"bytes={before}-"
        try:
            # The grid's CA vouches for the grid alone, so this is another client.
            with (
                httpx.Client(timeout=_STORE_TIMEOUT) as http,
                http.stream("GET", there, headers=ask) as response,
            ):
                if before and response.status_code != 206:
                    got.restart()
                if not response.is_success:
                    raise httpx.RemoteProtocolError(f"it answered {response.status_code}")
                got.take(response)
        except httpx.HTTPError:
            if got.done == before or not got.done:
                self._direct = False
            raise

    def _send(self, method: str, address: str, **what: object) -> httpx.Response:
        try:
            response = self._http.request(method, address, **what)  # type: ignore[arg-type]
        except httpx.HTTPError as problem:
            raise problems.unreachable(self._url, problem) from problem
        if response.is_success:
            return response
        if method == "HEAD" and response.status_code == 404:  # it has no body to read
            raise NotFound("blob.unknown", "The upload is gone.")
        raise problems.error_of(response)

    def _again(self, failures: int, problem: DistribAIError) -> int:
        """Wait before another try, or give up."""
        if failures + 1 >= TRIES:
            raise problem
        self._sleep(min(0.5 * 2**failures, 8.0))
        return failures + 1


def hash_of(path: Path) -> BlobRef:
    """SHA-256 and size of a file.

    Raises:
        UsageError: it cannot be read.
    """
    digest, size = hashlib.sha256(), 0
    try:
        with path.open("rb") as file:
            while chunk := file.read(1 << 20):
                digest.update(chunk)
                size += len(chunk)
    except OSError as problem:
        raise UsageError(
            "io.file",
            f"{path} cannot be read: {problem.strerror or problem}.",
            "Look at its path and at who may read it.",
        ) from problem
    return BlobRef(digest.hexdigest(), size)


def _write_all(file: int, data: bytes) -> None:
    view = memoryview(data)
    while view:
        view = view[os.write(file, view) :]


def _nobody(done: int, total: int) -> None:
    """No progress wanted."""
