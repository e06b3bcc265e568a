"""Blobs from the cache, or from the grid."""

from __future__ import annotations

import asyncio
from pathlib import Path
from weakref import WeakValueDictionary

from distribai.core.spec import BlobRef
from distribai.node.blobs import BlobClient
from distribai.node.cache import BlobCache, Pins


class Fetcher:
    """Blobs in the cache, downloaded when they are missing; never the same one twice at a time."""

    def __init__(self, cache: BlobCache, client: BlobClient) -> None:
        self._cache = cache
        self._client = client
        self._locks: WeakValueDictionary[str, asyncio.Lock] = WeakValueDictionary()

    async def fetch(self, blob: BlobRef, job_id: str, pins: Pins | None = None) -> Path:
        """The verified file of a blob, held by ``pins`` if given.

        Raises:
            DistribAIError: as :meth:`BlobClient.download`.
            OSError: the disk is full.
        """
        lock = self._locks.setdefault(blob.sha256, asyncio.Lock())
        async with lock:
            while True:
                path = await asyncio.to_thread(self._cache.find, blob)
                if path is None:
                    partial = self._cache.partial(blob)
                    await self._client.download(blob, partial, job_id)
                    path = await asyncio.to_thread(self._cache.take, partial, blob)
                if pins is None or pins.add(blob.sha256):
                    return path
