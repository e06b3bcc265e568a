"""Whom the node believes to be its grid: the CA that the join link names by its hash, kept in the
state directory once it was fetched; or the system's authorities; or, in a grid without TLS, nobody.
"""

from __future__ import annotations

import asyncio
import os
import ssl
from collections.abc import Callable
from pathlib import Path

import structlog

from distribai import durable, tls
from distribai.errors import Integrity
from distribai.wire.joinlink import JoinLink

log = structlog.get_logger("distribai.node")

CA_FILE = "ca-cert"


class Trust:
    """What TLS needs to know of one grid.

    Args:
        directory: the node's state directory.
        fetch: how the CA is got; blocking.
    """

    def __init__(
        self, join: JoinLink, directory: Path, fetch: Callable[..., str] = tls.fetch_ca
    ) -> None:
        self._join = join
        self._path = directory / CA_FILE
        self._fetch = fetch
        self._pem = ""
        self._lock = asyncio.Lock()

    @property
    def plain(self) -> bool:
        """Whether the grid has no TLS."""
        return not self._join.ca

    @property
    def pinned(self) -> bool:
        """Whether the grid's own CA counts, and no other."""
        return self._join.ca not in ("", tls.PUBLIC)

    async def roots(self) -> bytes | None:
        """The certificates (PEM) that may vouch for the gRPC server; None: those that gRPC knows.

        Raises:
            Integrity: ``grid.ca``: another CA is there than the join link names.
            Unavailable: ``grid.unreachable``: it cannot be fetched now.
            OSError: the state directory cannot be used.
        """
        if self.pinned:
            return (await self._authority()).encode()
        bundle = _bundle()
        return await asyncio.to_thread(Path(bundle).read_bytes) if bundle else None

    async def context(self) -> ssl.SSLContext | bool:
        """httpx's ``verify`` for the HTTP interface.

        Raises:
            Integrity, Unavailable, OSError: as :meth:`roots`.
        """
        if self.pinned:
            return tls.pinned_context(await self._authority())
        bundle = _bundle()  # httpx looks at it only where it looks at proxies, too
        return ssl.create_default_context(cafile=bundle) if bundle else True

    async def _authority(self) -> str:
        async with self._lock:
            if not self._pem:
                self._pem = await asyncio.to_thread(self._find)
            return self._pem

    def _find(self) -> str:
        pin = self._join.ca
        if self._path.is_file():
            try:
                return tls.check_pin(self._path.read_text(encoding="ascii"), pin, str(self._path))
            except (Integrity, UnicodeDecodeError):
                log.info("the CA that was kept is another grid's or damaged; fetching it anew")
        pem = self._fetch(self._join.http_url, pin, trust_env=not self._join.loopback)
        self._path.parent.mkdir(parents=True, exist_ok=True)
        durable.write(self._path, pem.encode(), point="node.ca")
        return pem


def _bundle() -> str:
    """What Python's TLS goes by, so that one variable does for both channels."""
    return os.environ.get("SSL_CERT_FILE", "")
