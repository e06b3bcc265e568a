"""The object store, where the grid sends nodes on to, as this node reaches it.

The store is not trusted: it gets neither the session's token nor the job's name, and what it gives
is judged by its hash. Nor is it needed: a node that cannot reach it asks the grid's replicas for
the bytes, and looks again after a while (``core.direct``).
"""

from __future__ import annotations

import contextlib
from collections import deque
from collections.abc import AsyncGenerator

import httpx

from distribai.core.direct import CONNECT_S, RELAY_S
from distribai.node.clock import Clock

_TIMEOUT = httpx.Timeout(60.0, connect=CONNECT_S)

_OWED = 1000
"""Reports of moved bytes that are kept while the grid is away; older ones are dropped."""


class ObjectStore:
    """Answers of the object store, whether it is worth asking, and what the grid is to hear of it.

    ``owed``: (job, SHA-256, bytes) of answers that the grid has not yet counted.

    Args:
        trust_env: whether proxies of the environment apply.
    """

    def __init__(self, clock: Clock, *, trust_env: bool) -> None:
        self._clock = clock
        self._trust_env = trust_env
        self._avoid_until = float("-inf")
        self._client: httpx.AsyncClient | None = None
        self.owed: deque[tuple[str, str, int]] = deque(maxlen=_OWED)

    async def close(self) -> None:
        """Close all connections."""
        if self._client is not None:
            await self._client.aclose()

    @property
    def usable(self) -> bool:
        """Whether it is not known to be out of reach."""
        return self._clock.monotonic() >= self._avoid_until

    def avoid(self) -> None:
        """Ask the replicas from now on, for a while."""
        self._avoid_until = self._clock.monotonic() + RELAY_S

    @contextlib.asynccontextmanager
    async def get(self, url: httpx.URL, have: int) -> AsyncGenerator[httpx.Response]:
        """The answer to a GET from byte ``have`` on. A further redirect is not followed.

        Raises:
            httpx.TransportError: it cannot be reached, or broke off.
        """
        if self._client is None:
            # With the authorities of the system: the grid's CA vouches for the grid alone.
            self._client = httpx.AsyncClient(timeout=_TIMEOUT, trust_env=self._trust_env)
        headers = {"Accept-Encoding": "identity"}
        if have:
            headers["Range"] = f"bytes={have}-"
        async with self._client.stream("GET", url, headers=headers) as answer:
            yield answer
