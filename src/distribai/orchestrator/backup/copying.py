"""Blobs from one store into another, hashed on the way."""

from __future__ import annotations

import asyncio
import hashlib
from collections.abc import AsyncIterator, Mapping
from dataclasses import dataclass, field

from distribai.core.spec import BlobRef
from distribai.errors import DistribAIError, Integrity, NotFound, Unavailable
from distribai.orchestrator.backup.format import Progress, Told
from distribai.store.blobs import BlobStore

AT_ONCE = 8
"""Blobs on their way at a time: hides the latency of an object store; each holds a few MB."""

NO_LIMIT = 1 << 62
"""Bytes of the largest blob that a backup takes: whatever the grid took."""


@dataclass(slots=True)
class Copied:
    """What came of it. ``lost``: by SHA-256, why a blob could not be had from its source."""

    blobs: int = 0
    bytes: int = 0
    present: int = 0
    lost: dict[str, str] = field(default_factory=dict)


class TargetRefuses(Exception):
    """The store that is written to cannot go on; ``problem`` says why."""

    def __init__(self, problem: Unavailable) -> None:
        super().__init__(problem.message)
        self.problem = problem


async def copy_blobs(
    source: BlobStore, target: BlobStore, wanted: Mapping[str, int], told: Told
) -> Copied:
    """Bring the blobs ``wanted`` (size in bytes by SHA-256) to ``target``; those that it has
    already are left alone. Each appears there whole and with the right hash, or not at all.

    Raises:
        TargetRefuses: ``target`` cannot take them.
        Unavailable: ``source`` cannot give them now.
    """
    copied, total, done = Copied(), sum(wanted.values()), 0
    refs = [BlobRef(sha256, size) for sha256, size in wanted.items()]
    for at in range(0, len(refs), AT_ONCE):
        batch = refs[at : at + AT_ONCE]
        # All of a batch come to rest before the first error goes on.
        results = await asyncio.gather(
            *(_copy(source, target, ref, copied) for ref in batch), return_exceptions=True
        )
        for result in results:
            if result is not None:
                raise result
        done += sum(ref.size for ref in batch)
        told(Progress("blobs", done, total))
    return copied


async def _copy(source: BlobStore, target: BlobStore, ref: BlobRef, copied: Copied) -> None:
    try:
        if await target.size(ref.sha256) == ref.size:
            copied.present += 1
            return
    except NotFound:
        pass
    except Unavailable as problem:
        raise TargetRefuses(problem) from problem
    reading = _Reading(source, ref)
    try:
        upload = target.uploads.begin(ref)
        try:
            ended = await target.uploads.append(upload.id, 0, reading.chunks())
        finally:
            target.uploads.drop(upload.id)
    except NotFound:
        copied.lost[ref.sha256] = "it is not there"
        return
    except Integrity as problem:
        what = "hash" if problem.code == "blob.hash" else "size"
        copied.lost[ref.sha256] = f"its bytes have another {what}"
        return
    except Unavailable as problem:
        if problem is reading.problem:
            raise
        raise TargetRefuses(problem) from problem
    if not ended.complete:
        copied.lost[ref.sha256] = f"it has {ended.offset} of its {ref.size} bytes"
        return
    copied.blobs += 1
    copied.bytes += ref.size


async def find_damaged(store: BlobStore, wanted: Mapping[str, int], told: Told) -> dict[str, str]:
    """Read ``wanted`` (size in bytes by SHA-256) back, and tell by SHA-256 what is wrong with those
    that are not what they are named.

    Raises:
        Unavailable: the store cannot give them now.
    """
    wrong: dict[str, str] = {}
    done, total = 0, sum(wanted.values())
    names = list(wanted)
    for at in range(0, len(names), AT_ONCE):
        batch = names[at : at + AT_ONCE]
        for sha256, found in zip(
            batch, await asyncio.gather(*(_hash(store, sha256) for sha256 in batch)), strict=True
        ):
            if found is None:
                wrong[sha256] = "it is not there"
            elif found != BlobRef(sha256, wanted[sha256]):
                wrong[sha256] = f"its {found.size} bytes have the SHA-256 {found.sha256[:12]}"
            done += wanted[sha256]
        told(Progress("checked", done, total))
    return wrong


async def _hash(store: BlobStore, sha256: str) -> BlobRef | None:
    digest, size = hashlib.sha256(), 0
    try:
        async for chunk in store.read(sha256):
            await asyncio.to_thread(digest.update, chunk)
            size += len(chunk)
    except NotFound:
        return None
    return BlobRef(digest.hexdigest(), size)


class _Reading:
    """The bytes of a blob; remembers whether it was the source that failed."""

    def __init__(self, source: BlobStore, ref: BlobRef) -> None:
        self._source, self._ref = source, ref
        self.problem: DistribAIError | None = None

    async def chunks(self) -> AsyncIterator[bytes]:
        """Everything, in order."""
        try:
            async for chunk in self._source.read(self._ref.sha256):
                yield chunk
        except DistribAIError as problem:
            self.problem = problem
            raise
