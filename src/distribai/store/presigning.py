"""Addresses at which an object store hands out one blob for a short while, to whoever has them.

A node or client that is sent there fetches from the store itself, so that the bytes do not pass
through a replica. The address holds a signature made with the grid's own credentials (AWS Signature
Version 4 in the query), good for one blob and :data:`LIFETIME`; no other secret goes to the store.
Whoever sees the address can fetch that blob as long: it is written nowhere.
"""

from __future__ import annotations

import ipaddress
from collections.abc import Mapping
from datetime import timedelta
from pathlib import Path
from urllib.parse import urlsplit

import obstore
from obstore.store import S3Store

from distribai.errors import UsageError
from distribai.store.blobs import blob_key, store_errors
from distribai.store.s3 import endpoint_of, is_bucket, open_bucket

LIFETIME = timedelta(minutes=2)
"""A download must begin within it, by the store's clock; it may last longer. Enough for a slow
connection and for clocks that differ by a minute."""


class Presigner:
    """Signs addresses of one bucket."""

    def __init__(self, bucket: S3Store) -> None:
        self._bucket = bucket

    async def address(self, sha256: str) -> str:
        """Where the blob can be fetched with GET for a while, whether or not it is there.

        Raises:
            NotFound: nothing can go by that name.
            Unavailable: ``blob.store``: the credentials cannot be had.
        """
        key = blob_key(sha256)
        with store_errors("sign"):
            return await obstore.sign_async(self._bucket, "GET", key, LIFETIME)


def presigner(
    place: str | Path,
    choice: str,
    public: str = "",
    *,
    s3: Mapping[str, str] | None = None,
) -> Presigner | None:
    """Who signs for the blobs at ``place``; None: they pass through the replicas.

    Args:
        place: a directory or ``s3://bucket/prefix``.
        choice: ``off``; ``on``; ``auto``: on for a bucket that is reached over https and by an
            address that is not this machine's alone.
        public: the store's address as nodes and clients reach it; empty: as this process does.
        s3: as :meth:`distribai.store.blobs.BlobStore.open` takes it.

    Raises:
        UsageError: ``config.invalid``: ``on`` for a directory, or ``public`` is no address.
        Unavailable: ``blob.store``: the S3 settings are impossible.
    """
    if choice == "off":
        return None
    if not is_bucket(place):
        if choice == "on":
            raise _bad("presign", "presign is on, and the blobs lie in a directory")
        return None
    config = {**(s3 or {}), **({"endpoint": public} if public else {})}
    endpoint = urlsplit(endpoint_of(config) or "https://s3.amazonaws.com")
    if endpoint.scheme not in ("http", "https") or not endpoint.hostname:
        raise _bad("public_blobs", f"public_blobs is {public!r}, which is no http(s) address")
    if choice == "auto" and (endpoint.scheme != "https" or _is_loopback(endpoint.hostname)):
        return None
    with store_errors("open"):
        return Presigner(open_bucket(str(place), config))


def _is_loopback(host: str) -> bool:
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost" or host.endswith(".localhost")


def _bad(name: str, why: str) -> UsageError:
    return UsageError(
        "config.invalid",
        f"{why}.",
        "docs/how-to/replicas.md says when nodes can fetch from the object store itself.",
        field=f"orchestrator.{name}",
    )
