"""Uploads in parts, staged on local disk until they are whole and their hash is right.

An upload is two files: ``<id>.json`` says what it claims to be, ``<id>.part`` holds what came so
far, so its length is the offset at which to go on, also after a restart. Bytes are counted and
hashed as they are read, whatever a Content-Length says.

What came is written after :data:`WRITE_S` at the latest: a killed process loses no more than a
line brings in so long. Neither file is flushed to disk before the upload is whole: after a power
cut what is missing or torn shows by the hash, and the upload begins again.
"""

from __future__ import annotations

import asyncio
import hashlib
import json
import math
import os
import threading
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from dataclasses import dataclass, field
from pathlib import Path

from distribai import points
from distribai.core.ids import RANDOM_BYTES, make_id
from distribai.core.spec import BlobRef
from distribai.errors import Conflict, Integrity, NotFound, Unavailable

WRITE_CHUNK = 1 << 20
"""Bytes gathered before one trip to a thread that hashes and writes them."""

WRITE_S = 1.0
"""Seconds between two such trips after which the next bytes to come are not gathered any longer: a
fast line fills :data:`WRITE_CHUNK` sooner, and a delta that takes less goes in one trip."""

IDLE_S = 86400.0
"""Seconds after which an upload to which nothing was added is given up."""


@dataclass(frozen=True, slots=True)
class Upload:
    """Where an upload stands. ``complete``: it has been promoted to a blob and its id is gone."""

    id: str
    offset: int
    complete: bool = False


@dataclass(slots=True)
class _Staged:
    """An upload that this process has open. ``owner`` counts the requests that took it over: the
    latest one wins, so that a connection which is dead without saying so blocks nobody.
    ``reopened``: its first bytes were staged by an earlier process."""

    ref: BlobRef
    part: Path
    offset: int
    digest: hashlib._Hash
    lock: asyncio.Lock = field(default_factory=asyncio.Lock)
    writing: threading.Lock = field(default_factory=threading.Lock)
    sender: str = ""
    owner: int = 0
    reopened: bool = False


class Uploads:
    """The uploads of one process.

    Args:
        directory: where they are staged; made when missing.
        promote: takes over a finished file whose hash is known to be right.
        max_bytes: the largest upload to begin.
        entropy: randomness for ids.
        now: seconds since 1970 on the clock that stamps this machine's files.
        clock: monotonic seconds.
    """

    def __init__(
        self,
        directory: Path,
        *,
        promote: Callable[[Path, BlobRef], Awaitable[None]],
        max_bytes: int,
        entropy: Callable[[int], bytes] = os.urandom,
        now: Callable[[], float] = time.time,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._directory = directory
        directory.mkdir(parents=True, exist_ok=True)
        self._promote = promote
        self._max_bytes = max_bytes
        self._entropy = entropy
        self._now = now
        self._clock = clock
        self._open: dict[str, _Staged] = {}

    def begin(self, ref: BlobRef, sender: str = "") -> Upload:
        """Make room for the blob ``ref``, and drop uploads that were left alone for a day. Only
        whoever gives the same ``sender`` finds it again (:meth:`claim`).

        Raises:
            Integrity: it is larger than this store takes.
            Unavailable: the disk refuses.
        """
        if ref.size > self._max_bytes:
            raise Integrity(
                "blob.size",
                f"A blob of {ref.size} bytes is larger than this grid takes "
                f"({self._max_bytes} bytes).",
                "Split the data over several files, or ask the operator for a higher limit.",
            )
        self.drop_idle_now()
        upload_id = make_id("up", self._entropy(RANDOM_BYTES))
        part = self._directory / f"{upload_id}.part"
        try:
            part.touch(exist_ok=False)
            note = json.dumps({"sha256": ref.sha256, "size": ref.size, "sender": sender})
            points.reach("upload.note.before")
            (self._directory / f"{upload_id}.json").write_text(note, encoding="utf-8")
            points.reach("upload.note.after")
        except OSError as problem:
            raise _disk(problem) from problem
        self._open[upload_id] = _Staged(ref, part, 0, hashlib.sha256(), sender=sender)
        return Upload(upload_id, 0)

    @property
    def begun(self) -> int:
        """How many uploads this process has begun or taken up, and not finished or dropped."""
        return len(self._open)

    def claim(self, upload_id: str, sender: str | None = None) -> BlobRef:
        """What the upload claims to be. ``sender``: it must be this one's; None asks for nobody's.

        Raises:
            NotFound: no such upload, or another's.
        """
        staged = self._find(upload_id)
        if sender not in (None, staged.sender):
            raise _unknown(upload_id)
        return staged.ref

    def offset(self, upload_id: str) -> Upload:
        """Where to go on.

        Raises:
            NotFound: no such upload: it is complete, was dropped, or never began.
        """
        return Upload(upload_id, self._find(upload_id).offset)

    async def append(self, upload_id: str, offset: int, stream: AsyncIterator[bytes]) -> Upload:
        """Add the bytes of ``stream`` at ``offset``; promote the upload when it is whole.

        When ``stream`` raises (the connection is lost), what came before is kept and the exception
        goes on to the caller. When it just ends early, the answer says where to go on. A later
        append to the same upload takes it over from this one.

        Raises:
            NotFound: no such upload.
            Conflict: ``blob.offset``: the upload stands elsewhere, or another request took it over.
            Integrity: ``blob.size`` as soon as there is a byte too many, ``blob.hash`` when the
                whole has another hash. Either way the upload is dropped.
            NotFound: it has another hash, and an earlier process staged its beginning: a power cut
                may have torn that. It is dropped, and the sender begins again.
            Unavailable: the disk or the blob store refuses; the upload stays.
        """
        staged = self._find(upload_id)
        async with staged.lock:
            if offset != staged.offset:
                raise _offset_conflict(upload_id, offset, staged.offset)
            staged.owner += 1
            mine = staged.owner
        buffer, due = bytearray(), self._clock() + WRITE_S
        try:
            async for chunk in stream:
                buffer += chunk
                if len(buffer) >= WRITE_CHUNK or (buffer and self._clock() >= due):
                    data, buffer = bytes(buffer), bytearray()
                    await self._add(upload_id, staged, mine, offset, data)
                    offset += len(data)
                    due = self._clock() + WRITE_S
        finally:
            # Also when the connection broke: what arrived need not be sent again.
            if buffer:
                await self._add(upload_id, staged, mine, offset, bytes(buffer))
        return await self._finish(upload_id, staged, mine)

    def drop(self, upload_id: str) -> None:
        """Forget an upload and its bytes; unknown ids are no error."""
        self._open.pop(upload_id, None)
        if not _is_id(upload_id):
            return
        for suffix in (".json", ".part"):  # in this order nothing is left that is not found idle
            (self._directory / f"{upload_id}{suffix}").unlink(missing_ok=True)

    def drop_idle_now(self) -> int:
        """Drop uploads that were left alone for :data:`IDLE_S`. Returns how many."""
        return self.drop_idle(self._now() - IDLE_S)

    def drop_idle(self, before: float) -> int:
        """Drop uploads to which nothing was added since ``before`` (Unix seconds, this machine's
        clock, like the files' times it is compared with). Returns how many."""
        found = [*self._directory.glob("*.part")]
        # A process that died between promoting the bytes and forgetting the note has left the note.
        found += [n for n in self._directory.glob("*.json") if not n.with_suffix(".part").exists()]
        idle = [p.stem for p in found if _last_touched(p) < before]
        for upload_id in idle:
            self.drop(upload_id)
        return len(idle)

    def _find(self, upload_id: str) -> _Staged:
        staged = self._open.get(upload_id)
        if staged is None:
            staged = self._reopen(upload_id)
            self._open[upload_id] = staged
        return staged

    def _reopen(self, upload_id: str) -> _Staged:
        """An upload of an earlier process: its staged bytes are hashed again."""
        if not _is_id(upload_id):
            raise _unknown(upload_id)
        part = self._directory / f"{upload_id}.part"
        try:
            note = json.loads((self._directory / f"{upload_id}.json").read_text(encoding="utf-8"))
            digest, offset = hashlib.sha256(), 0
            with part.open("rb") as file:
                while chunk := file.read(WRITE_CHUNK):
                    digest.update(chunk)
                    offset += len(chunk)
        except (FileNotFoundError, ValueError) as problem:
            raise _unknown(upload_id) from problem
        ref = BlobRef(note["sha256"], note["size"])
        sender = str(note.get("sender", ""))
        return _Staged(ref, part, offset, digest, sender=sender, reopened=True)

    async def _add(
        self, upload_id: str, staged: _Staged, mine: int, position: int, data: bytes
    ) -> None:
        async with staged.lock:
            self._check_owner(upload_id, staged, mine)
            if position + len(data) > staged.ref.size:
                self.drop(upload_id)
                raise Integrity(
                    "blob.size",
                    f"The upload brings more than its declared {staged.ref.size} bytes.",
                    "Hash and upload the file again; it may have changed meanwhile.",
                )
            await asyncio.to_thread(_write, upload_id, staged, position, data)

    async def _finish(self, upload_id: str, staged: _Staged, mine: int) -> Upload:
        async with staged.lock:
            self._check_owner(upload_id, staged, mine)
            if staged.offset < staged.ref.size:
                return Upload(upload_id, staged.offset)
            found = staged.digest.hexdigest()
            if found != staged.ref.sha256:
                self.drop(upload_id)
                if staged.reopened:
                    raise NotFound(
                        "blob.unknown",
                        f"What was staged of the upload {upload_id} was damaged meanwhile.",
                        "Begin again with the blob's hash.",
                    )
                raise Integrity(
                    "blob.hash",
                    f"The uploaded bytes have the SHA-256 {found}, declared was "
                    f"{staged.ref.sha256}.",
                    "Hash and upload the file again; it may have changed meanwhile.",
                )
            await self._promote(staged.part, staged.ref)
            points.reach("upload.promoted.after")
            self.drop(upload_id)
            return Upload(upload_id, staged.ref.size, complete=True)

    def _check_owner(self, upload_id: str, staged: _Staged, mine: int) -> None:
        if staged.owner != mine or self._open.get(upload_id) is not staged:
            raise Conflict(
                "blob.offset",
                f"Another request has taken over the upload {upload_id}.",
                "Ask for the upload's offset (HEAD) and go on from there.",
            )


def _write(upload_id: str, staged: _Staged, position: int, data: bytes) -> None:
    """Runs in a thread, which outlives a cancelled request: hence its own lock and check."""
    with staged.writing:
        if staged.offset != position:
            raise _offset_conflict(upload_id, position, staged.offset)
        try:
            with staged.part.open("rb+") as file:
                # A write that failed half-way (disk full) may have left bytes not counted.
                file.truncate(position)
                file.seek(position)
                points.reach("upload.part.before")
                file.write(data)
            points.reach("upload.part.after")
        except OSError as problem:
            raise _disk(problem) from problem
        staged.digest.update(data)
        staged.offset = position + len(data)


def _last_touched(path: Path) -> float:
    """When something was added to a staged file (Unix seconds); for ever later, when it has been
    finished meanwhile by another thread or process."""
    try:
        return path.stat().st_mtime
    except FileNotFoundError:
        return math.inf


def _is_id(upload_id: str) -> bool:
    return upload_id.startswith("up_") and upload_id[3:].isalnum() and upload_id.isascii()


def _unknown(upload_id: str) -> NotFound:
    return NotFound(
        "blob.unknown",
        f"There is no upload {upload_id[:40]!r}.",
        "It is complete, was dropped, or never began; begin again with the blob's hash.",
    )


def _offset_conflict(upload_id: str, offset: int, actual: int) -> Conflict:
    return Conflict(
        "blob.offset",
        f"The upload {upload_id} stands at byte {actual}, not at {offset}.",
        "Ask for the upload's offset (HEAD) and go on from there.",
    )


def _disk(problem: OSError) -> Unavailable:
    return Unavailable(
        "blob.store",
        f"The upload cannot be staged: {problem.strerror or problem}.",
        "The orchestrator's disk may be full; free some space and go on.",
    )
