"""Blobs that the node has on disk, by hash, within a size limit.

A file's name is ``<sha256>.<size>``. It gets that name only after its bytes were hashed and
flushed, so a daemon that is killed leaves no half blob behind; a file whose size is not the one in
its name was torn by the machine's own crash and is dropped at the start. Files that lay there at
the start are hashed once more before their first use.

The least recently used go first. A blob that a task holds is pinned: the limit then yields, until
the task lets go. Times of last use survive as the files' modification times.

Methods hash and move files: call those that say so from a worker thread. All may be called from any
thread.
"""

from __future__ import annotations

import hashlib
import os
import re
import threading
import time
from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from distribai.core.spec import BlobRef
from distribai.errors import Integrity

_NAME = re.compile(r"([0-9a-f]{64})\.(\d+)")
_CHUNK = 1 << 20

STALE_S = 24 * 3600.0
"""Age of an unfinished download at which the task that wanted it is surely gone."""


@dataclass(slots=True)
class _Entry:
    size: int
    checked: bool
    pins: int = 0


def sha256_of(path: Path) -> str:
    """SHA-256 (hex) of a file. Blocking."""
    digest = hashlib.sha256()
    with path.open("rb") as file:
        while chunk := file.read(_CHUNK):
            digest.update(chunk)
    return digest.hexdigest()


class BlobCache:
    """The cache of one node.

    Args:
        root: its directory; made if missing, and nobody else's.
        limit: bytes that unpinned blobs may fill it up to.
        now: seconds of the wall clock; only orders blobs by last use across restarts.

    Raises:
        OSError: the directory cannot be made or read.
    """

    def __init__(self, root: Path, limit: int, now: Callable[[], float] = time.time) -> None:
        self._root = root
        self._limit = limit
        self._now = now
        self._lock = threading.RLock()
        self._entries: OrderedDict[str, _Entry] = OrderedDict()  # least recently used first
        root.mkdir(parents=True, exist_ok=True)
        self._scan()
        self._evict()

    @property
    def size(self) -> int:
        """Bytes in the cache."""
        with self._lock:
            return sum(entry.size for entry in self._entries.values())

    @property
    def room(self) -> int:
        """Bytes that may come in before anything has to go."""
        return max(0, self._limit - self.size)

    def held_of(self, blobs: Iterable[BlobRef]) -> dict[str, int]:
        """Bytes of those of ``blobs`` that are here, whole or in part, by SHA-256: as far as names
        and lengths say."""
        found = {}
        for blob in blobs:
            with self._lock:
                whole = blob.sha256 in self._entries
            size = blob.size if whole else self._collected(blob)
            if size:
                found[blob.sha256] = size
        return found

    def _collected(self, blob: BlobRef) -> int:
        try:
            return min(blob.size, self.partial(blob).stat().st_size)
        except FileNotFoundError:
            return 0

    def newest(self, count: int) -> list[str]:
        """Hashes, most recently used first, at most ``count``."""
        with self._lock:
            return list(reversed(self._entries))[:count]

    def partial(self, blob: BlobRef) -> Path:
        """Where to collect the bytes of a blob before :meth:`take`; may hold some already."""
        return self._root / f"{blob.sha256}.part"

    def find(self, blob: BlobRef) -> Path | None:
        """The file of a blob, used now; None when it is not there. May hash it: blocking."""
        with self._lock:
            entry = self._entries.get(blob.sha256)
            if entry is None:
                return None
            path = self._path(blob.sha256, entry.size)
            entry.pins += 1  # not evicted while its hash is computed
        intact = entry.checked or (path.is_file() and sha256_of(path) == blob.sha256)
        with self._lock:
            entry.pins -= 1
            entry.checked = intact
            if intact and path.is_file():
                self._use(blob.sha256)
                return path
            self._drop(blob.sha256)
            return None

    def take(self, path: Path, blob: BlobRef) -> Path:
        """Move a file into the cache once its bytes are found to be the blob's. Blocking.

        The file is removed when it is refused.

        Raises:
            Integrity: ``blob.size`` or ``blob.hash``.
            OSError: the disk is full, or the file is gone.
        """
        size = path.stat().st_size
        found = sha256_of(path) if size == blob.size else ""
        if found != blob.sha256:
            path.unlink()
            if size != blob.size:
                raise Integrity(
                    "blob.size", f"Blob {blob.sha256[:12]} has {size} bytes, not {blob.size}."
                )
            raise Integrity(
                "blob.hash", f"Blob {blob.sha256[:12]} arrived with the hash {found[:12]}."
            )
        with path.open("rb+") as file:
            os.fsync(file.fileno())
        target = self._path(blob.sha256, blob.size)
        with self._lock:
            path.chmod(0o444)
            path.replace(target)
            entry = self._entries.setdefault(blob.sha256, _Entry(blob.size, True))
            entry.checked = True
            entry.pins += 1
            self._use(blob.sha256)
            self._evict()
            entry.pins -= 1
        return target

    @contextmanager
    def pinned(self) -> Iterator[Pins]:
        """A set of blobs that stay in the cache until the block ends."""
        pins = Pins(self)
        try:
            yield pins
        finally:
            self._unpin(pins.held)

    def _pin(self, sha256: str) -> bool:
        with self._lock:
            entry = self._entries.get(sha256)
            if entry is not None:
                entry.pins += 1
            return entry is not None

    def _unpin(self, held: Iterable[str]) -> None:
        with self._lock:
            for sha256 in held:
                entry = self._entries.get(sha256)
                if entry is not None:
                    entry.pins -= 1
            self._evict()

    def _use(self, sha256: str) -> None:
        self._entries.move_to_end(sha256)
        now = self._now()
        os.utime(self._path(sha256, self._entries[sha256].size), (now, now))

    def _evict(self) -> None:
        size = sum(entry.size for entry in self._entries.values())
        for sha256, entry in list(self._entries.items()):
            if size <= self._limit:
                return
            if entry.pins == 0 and self._drop(sha256):
                size -= entry.size

    def _drop(self, sha256: str) -> bool:
        entry = self._entries[sha256]
        try:
            self._path(sha256, entry.size).unlink(missing_ok=True)
        except PermissionError:  # Windows: somebody reads it; it goes at the next chance
            return False
        del self._entries[sha256]
        return True

    def _scan(self) -> None:
        found: list[tuple[float, str, int]] = []
        for path in self._root.iterdir():
            name = _NAME.fullmatch(path.name)
            stat = path.stat()
            if path.suffix == ".part" and self._now() - stat.st_mtime > STALE_S:
                path.unlink()
                continue
            if name is None:
                continue  # a download that will go on, or nothing of ours
            if stat.st_size != int(name[2]):
                path.unlink()
                continue
            found.append((stat.st_mtime, name[1], stat.st_size))
        for _, sha256, size in sorted(found):
            self._entries[sha256] = _Entry(size, checked=False)

    def _path(self, sha256: str, size: int) -> Path:
        return self._root / f"{sha256}.{size}"


class Pins:
    """Blobs held by one task; made by :meth:`BlobCache.pinned`."""

    def __init__(self, cache: BlobCache) -> None:
        self._cache = cache
        self.held: set[str] = set()

    def add(self, sha256: str) -> bool:
        """Hold one more blob; False when it is not in the cache (any more)."""
        if sha256 in self.held:
            return True
        if not self._cache._pin(sha256):
            return False
        self.held.add(sha256)
        return True
