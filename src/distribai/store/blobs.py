"""Immutable blobs, named by their SHA-256, in a directory or in an S3 bucket.

A blob lies under ``sha256/<first two digits>/<all digits>``. Two processes may put the same blob at
once: both write the same bytes under the same name, and the later rename wins. In a directory a
blob appears by an atomic rename after fsync of file and directory, so one that exists is whole,
whatever died when; putting it again replaces it, which heals one that the disk has damaged. In S3
it appears when the (multipart) put ends. Uploads in parts: ``store.uploads``.

Readers hash again: :meth:`BlobStore.local` checks before it hands out a path.
:meth:`BlobStore.read` does not, because a range cannot be checked; whoever asked for the whole blob
does.
"""

from __future__ import annotations

import asyncio
import hashlib
import os
import shutil
import uuid
from collections.abc import AsyncIterator, Callable, Iterator, Mapping
from contextlib import asynccontextmanager, contextmanager
from dataclasses import dataclass
from datetime import datetime, timedelta
from pathlib import Path

import obstore
from obstore.exceptions import BaseError
from obstore.store import LocalStore, S3Store

from distribai import durable, points
from distribai.core.spec import BlobRef
from distribai.errors import Integrity, NotFound, Unavailable
from distribai.store.s3 import RETRIES, is_bucket, open_bucket
from distribai.store.uploads import Uploads

READ_CHUNK = 1 << 20
"""Bytes: what reading, hashing and copying hold in memory at a time."""

S3_PART = 16 << 20
"""Bytes of one part of a multipart put; S3 takes at most 10,000 parts, so larger blobs use more."""


@dataclass(frozen=True, slots=True)
class StoredBlob:
    """A blob as its store lists it; ``put_at`` on the store's own clock."""

    ref: BlobRef
    put_at: datetime

    @property
    def age(self) -> timedelta:
        """How long ago it was put, by this machine's clock: whoever asks reckons in hours."""
        return datetime.now(self.put_at.tzinfo) - self.put_at


def no_blob(sha256: str) -> NotFound:
    """The answer to somebody who asks for a blob that is not here, for them."""
    return NotFound(
        "blob.unknown",
        f"There is no blob {sha256[:12]} here.",
        "It was never uploaded to this grid, or has been cleaned away; upload it again.",
    )


def blob_key(sha256: str) -> str:
    """Where a blob lies below the root of its store.

    Raises:
        NotFound: ``sha256`` is not 64 lower-case hexadecimal digits, so nothing can go by it.
    """
    if len(sha256) != 64 or set(sha256) - set("0123456789abcdef"):
        raise NotFound(
            "blob.unknown",
            f"No blob goes by {sha256[:80]!r}.",
            "A blob's name is its SHA-256: 64 lower-case hexadecimal digits.",
        )
    return f"sha256/{sha256[:2]}/{sha256}"


def hash_file(path: Path) -> BlobRef:
    """SHA-256 and size of a file, read in chunks."""
    digest, size = hashlib.sha256(), 0
    with path.open("rb") as file:
        while chunk := file.read(READ_CHUNK):
            digest.update(chunk)
            size += len(chunk)
    return BlobRef(digest.hexdigest(), size)


class BlobStore:
    """Blobs over one obstore store.

    Args:
        store: where blobs are read from (and written to, unless ``root`` is given).
        staging: a local directory for uploads and for copies of remote blobs. For a directory of
            blobs it must be on the same file system, so that promoting is a rename.
        root: the directory behind ``store``, when it is local.
        max_bytes: the largest upload that :attr:`uploads` begins.
        entropy: randomness for upload ids.
    """

    def __init__(
        self,
        store: LocalStore | S3Store,
        staging: Path,
        *,
        root: Path | None,
        max_bytes: int,
        entropy: Callable[[int], bytes] = os.urandom,
    ) -> None:
        self._store = store
        self._root = root
        self._scratch = staging / "scratch"
        shutil.rmtree(self._scratch, ignore_errors=True)
        self._scratch.mkdir(parents=True)
        self.uploads = Uploads(
            staging / "uploads", promote=self._promote_upload, max_bytes=max_bytes, entropy=entropy
        )

    @classmethod
    def open(
        cls,
        target: str | Path,
        staging: Path,
        *,
        max_bytes: int,
        entropy: Callable[[int], bytes] = os.urandom,
        s3: Mapping[str, str] | None = None,
        retries: int = RETRIES,
    ) -> BlobStore:
        """Open a directory, or ``s3://bucket/prefix``.

        S3 takes its credentials, region and endpoint from the usual ``AWS_*`` variables
        (``AWS_ENDPOINT_URL`` for another service than Amazon's); ``s3`` overrides them
        (``store.s3``). A request that fails for a reason that may pass is tried ``retries`` times
        more. Nothing is contacted yet.

        Raises:
            Unavailable: the directory cannot be made, or the S3 settings are impossible.
        """
        if is_bucket(target):
            with store_errors("open"):
                bucket = open_bucket(str(target), s3 or {}, retries=retries)
            return cls(bucket, staging, root=None, max_bytes=max_bytes, entropy=entropy)
        root = Path(target)
        with store_errors("open"):
            root.mkdir(parents=True, exist_ok=True)
        return cls(
            LocalStore(root), staging, root=root.resolve(), max_bytes=max_bytes, entropy=entropy
        )

    async def put_file(self, path: Path, ref: BlobRef) -> None:
        """Take over a local file as the blob ``ref``; the file is gone afterwards.

        Putting a blob that is there already is no error, and makes it new. On failure the file
        stays.

        Raises:
            Integrity: its size or hash is not ``ref``'s.
            Unavailable: the store cannot take it.
        """
        found = await asyncio.to_thread(hash_file, path)
        check_blob(found, ref, str(path.name))
        await self._promote(path, ref, "blob.put")

    async def put_bytes(self, data: bytes) -> BlobRef:
        """Store a small blob (a manifest) and name it."""
        ref = BlobRef(hashlib.sha256(data).hexdigest(), len(data))
        path = self._scratch / uuid.uuid4().hex
        with store_errors("write"):
            await asyncio.to_thread(path.write_bytes, data)
        await self._promote(path, ref, "blob.bytes")
        return ref

    async def size(self, sha256: str) -> int:
        """Size in bytes.

        Raises:
            NotFound: there is no such blob.
        """
        return (await self.stat(sha256)).ref.size

    async def exists(self, sha256: str) -> bool:
        """Whether the blob is there, whole."""
        try:
            await self.size(sha256)
        except NotFound:
            return False
        return True

    async def stat(self, sha256: str) -> StoredBlob:
        """Size, and when it was put last.

        Raises:
            NotFound: there is no such blob.
        """
        key = blob_key(sha256)
        with store_errors("read", sha256):
            found = await obstore.head_async(self._store, key)
        return StoredBlob(BlobRef(sha256, int(found["size"])), found["last_modified"])

    async def stored(self) -> AsyncIterator[StoredBlob]:
        """Every blob that the store holds, in no order.

        Raises:
            Unavailable: the store fails; there may be more.
        """
        with store_errors("list"):
            async for batch in obstore.list(self._store, prefix="sha256"):
                for found in batch:
                    name = str(found["path"]).rpartition("/")[2]
                    # A file that is being copied beside its target has another name.
                    if len(name) == 64 and found["path"] == blob_key(name):
                        ref = BlobRef(name, int(found["size"]))
                        yield StoredBlob(ref, found["last_modified"])

    async def delete(self, sha256: str) -> None:
        """Delete a blob; one that is not there is no error."""
        try:
            with store_errors("delete", sha256):
                await obstore.delete_async(self._store, blob_key(sha256))
        except NotFound:
            return

    async def is_whole(self, ref: BlobRef) -> bool:
        """Whether the stored bytes are those that the name says; reads all of them.

        Raises:
            NotFound: there is no such blob.
        """
        try:
            async with self.local(ref):
                return True
        except Integrity:
            return False

    async def read(
        self, sha256: str, start: int = 0, stop: int | None = None
    ) -> AsyncIterator[bytes]:
        """The bytes from ``start`` up to ``stop`` (the end when None), in chunks, unchecked.

        Raises:
            NotFound: there is no such blob.
            Unavailable: the store fails; what was yielded so far is no blob.
        """
        size = await self.size(sha256)
        stop = size if stop is None else min(stop, size)
        if start >= stop:
            return
        with store_errors("read", sha256):
            result = await obstore.get_async(
                self._store, blob_key(sha256), options={"range": (start, stop)}
            )
            async for chunk in result.stream(min_chunk_size=READ_CHUNK):
                yield bytes(chunk)

    @asynccontextmanager
    async def local(self, ref: BlobRef) -> AsyncIterator[Path]:
        """A local file with the blob's bytes, checked against ``ref``, while the block runs.

        For a directory this is the blob itself: read it, never write it. For S3 it is a copy that
        goes away with the block.

        Raises:
            NotFound: there is no such blob.
            Integrity: the stored bytes are not what the name says.
        """
        if self._root is not None:
            path = self._root / blob_key(ref.sha256)
            with store_errors("read", ref.sha256):
                found = await asyncio.to_thread(hash_file, path)
            check_blob(found, ref, f"blob {ref.sha256[:12]}")
            yield path
            return
        copy = self._scratch / uuid.uuid4().hex
        try:
            digest, size = hashlib.sha256(), 0
            with copy.open("xb") as file:
                async for chunk in self.read(ref.sha256):
                    await asyncio.to_thread(_write_hashed, file.write, digest.update, chunk)
                    size += len(chunk)
            check_blob(BlobRef(digest.hexdigest(), size), ref, f"blob {ref.sha256[:12]}")
            yield copy
        finally:
            copy.unlink(missing_ok=True)

    async def _promote_upload(self, path: Path, ref: BlobRef) -> None:
        await self._promote(path, ref, "blob.upload")

    async def _promote(self, path: Path, ref: BlobRef, point: str) -> None:
        """Move a file whose hash is known to be ``ref``'s into the store."""
        key = blob_key(ref.sha256)
        with store_errors("write"):
            if self._root is not None:
                await asyncio.to_thread(_promote_local, path, self._root / key, point)
                return
            # Also one that is there: it counts as new from then on (``orchestrator.retention``).
            part = max(S3_PART, -(-ref.size // 10_000))
            points.reach(f"{point}.s3.before")
            await obstore.put_async(self._store, key, path, chunk_size=part)
            points.reach(f"{point}.s3.after")
            await asyncio.to_thread(path.unlink)


def check_blob(found: BlobRef, ref: BlobRef, what: str) -> None:
    """Refuse bytes that are not the declared ones.

    Raises:
        Integrity: ``blob.truncated``, ``blob.size`` or ``blob.hash``; ``what`` names the bytes.
    """
    if found.size < ref.size:
        raise Integrity(
            "blob.truncated",
            f"{what} has {found.size} of its declared {ref.size} bytes.",
            "Upload it again.",
        )
    if found.size > ref.size:
        raise Integrity(
            "blob.size",
            f"{what} has {found.size} bytes, its declared size is {ref.size}.",
            "Hash and upload the file again; it may have changed meanwhile.",
        )
    if found.sha256 != ref.sha256:
        raise Integrity(
            "blob.hash",
            f"{what} has the SHA-256 {found.sha256}, declared was {ref.sha256}.",
            "Hash and upload the file again; it may have changed meanwhile.",
        )


def _write_hashed(
    write: Callable[[bytes], int], update: Callable[[bytes], None], chunk: bytes
) -> None:
    write(chunk)
    update(chunk)


def _promote_local(path: Path, target: Path, point: str) -> None:
    """Give a file its name in the store: afterwards the blob survives a power cut, whole."""
    if os.name != "posix" and target.exists():  # elsewhere a file that is open stays in the way
        os.utime(target)
        path.unlink()
        return
    _make_directory(target.parent)
    # A file from another file system is copied beside its target first: only a rename is atomic.
    if os.stat(path).st_dev != os.stat(target.parent).st_dev:
        copy = target.parent / f".{uuid.uuid4().hex}"
        try:
            shutil.copyfile(path, copy)
            durable.promote(copy, target, point=point)
        except OSError:
            copy.unlink(missing_ok=True)
            raise
        path.unlink()
    else:
        durable.promote(path, target, point=point)


def _make_directory(path: Path) -> None:
    """Make a directory whose own name survives a power cut, too."""
    if path.is_dir():
        return
    _make_directory(path.parent)
    path.mkdir(exist_ok=True)
    durable.sync_directory(path.parent)


@contextmanager
def store_errors(doing: str, sha256: str = "") -> Iterator[None]:
    """Say in our words what the store or the disk said."""
    try:
        yield
    except (BaseError, OSError, ValueError) as problem:
        if isinstance(problem, FileNotFoundError) and sha256:
            raise no_blob(sha256) from problem
        first_line = str(problem).strip().splitlines()[0] if str(problem).strip() else repr(problem)
        raise Unavailable(
            "blob.store",
            f"The blob store failed to {doing}: {first_line[:300]}",
            "Check the disk's free space, or the object store's address and credentials.",
        ) from problem
