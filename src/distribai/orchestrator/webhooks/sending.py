"""One delivery over the network, to an address that was checked.

The name is resolved once and every answer has to pass the rule; the connection goes to the first of
them, with the name's SNI, and to no other place: no redirect is followed, no proxy of the
environment is asked. All of it together takes at most :data:`TIMEOUT_S` seconds, and at most
:data:`MAX_ANSWER` bytes of the answer are read.
"""

from __future__ import annotations

import asyncio
import socket
import ssl
from collections.abc import Awaitable, Callable, Iterable, Mapping
from dataclasses import dataclass
from functools import cache
from ipaddress import ip_address

import httpcore

from distribai.core.addresses import Address, Rule, Target
from distribai.core.webhooks import MAX_ANSWER, TIMEOUT_S

Resolve = Callable[[str, int], Awaitable[list[Address]]]
"""All addresses of a name, for a port.

Raises:
    OSError: it has none, or nobody knows.
"""


@dataclass(frozen=True, slots=True)
class Answer:
    """What became of one try. ``status`` is None when nobody answered; ``reason`` is empty after a
    2xx."""

    status: int | None
    reason: str
    seconds: float

    @property
    def ok(self) -> bool:
        """Whether the receiver has taken it."""
        return not self.reason


async def system_resolve(host: str, port: int) -> list[Address]:
    """What the system's resolver says."""
    loop = asyncio.get_running_loop()
    found = await loop.getaddrinfo(host, port, type=socket.SOCK_STREAM, proto=socket.IPPROTO_TCP)
    return [ip_address(entry[4][0]) for entry in found]


@cache
def default_tls() -> ssl.SSLContext:
    """Verifies with the system's authorities. Making it takes longer than a delivery."""
    return ssl.create_default_context()


@dataclass(frozen=True, slots=True)
class Sender:
    """How deliveries leave this process.

    Args:
        rule: which addresses may be connected to.
        clock: monotonic seconds.
        resolve: names to addresses.
        tls: how receivers' certificates are verified.
    """

    rule: Rule
    clock: Callable[[], float]
    resolve: Resolve = system_resolve
    tls: Callable[[], ssl.SSLContext] = default_tls

    async def post(self, target: Target, headers: Mapping[str, str], body: bytes) -> Answer:
        """POST ``body``; never raises for what a receiver or the network does."""
        began = self.clock()
        status: int | None = None
        try:
            async with asyncio.timeout(TIMEOUT_S):
                address, refused = await self._address(target)
                if not refused:
                    status, refused = await self._exchange(target, address, headers, body)
        except TimeoutError:
            refused = f"no whole answer within {TIMEOUT_S:g} s"
        except OSError as problem:
            refused = f"{target.host} is not found: {problem.strerror or problem}"
        except (
            httpcore.NetworkError,
            httpcore.ProtocolError,
            httpcore.TimeoutException,
        ) as problem:
            refused = f"the connection failed: {problem or type(problem).__name__}"
        return Answer(status, refused, self.clock() - began)

    async def _address(self, target: Target) -> tuple[Address, str]:
        """The address to connect to, and why not."""
        literal = target.literal
        found = [literal] if literal else await self.resolve(target.host, target.port)
        if not found:
            raise OSError(f"{target.host} has no address")
        for address in found:
            if why := self.rule(address, target.port):
                return address, f"not sent: {why}"
        return found[0], ""

    async def _exchange(
        self, target: Target, address: Address, headers: Mapping[str, str], body: bytes
    ) -> tuple[int, str]:
        host = f"[{target.host}]" if ":" in target.host else target.host
        default = {"http": 80, "https": 443}[target.scheme]
        shown = host if target.port == default else f"{host}:{target.port}"
        sent = {
            "Host": shown,
            "Content-Type": "application/json",
            "Content-Length": str(len(body)),
            "Connection": "close",
            **headers,
        }
        url = httpcore.URL(
            scheme=target.scheme.encode(),
            host=target.host.encode(),
            port=target.port,
            target=target.path.encode(),
        )
        async with (
            httpcore.AsyncConnectionPool(
                ssl_context=self.tls() if target.scheme == "https" else None,
                network_backend=_Pinned(str(address)),
            ) as pool,
            pool.stream("POST", url, headers=list(sent.items()), content=body) as response,
        ):
            read = 0
            async for chunk in response.aiter_stream():
                read += len(chunk)
                if read > MAX_ANSWER:
                    return response.status, f"the answer has more than {MAX_ANSWER} bytes"
        if 200 <= response.status < 300:
            return response.status, ""
        if 300 <= response.status < 400:
            return response.status, f"answered {response.status}: no redirect is followed"
        return response.status, f"answered {response.status}"


class _Pinned(httpcore.AsyncNetworkBackend):
    """Connects to one address, whatever name is asked for."""

    def __init__(self, address: str) -> None:
        self._address = address
        self._network = httpcore.AnyIOBackend()

    async def connect_tcp(
        self,
        host: str,
        port: int,
        timeout: float | None = None,  # noqa: ASYNC109  # the interface is httpcore's
        local_address: str | None = None,
        socket_options: Iterable[httpcore.SOCKET_OPTION] | None = None,
    ) -> httpcore.AsyncNetworkStream:
        return await self._network.connect_tcp(
            self._address, port, timeout, local_address, socket_options
        )
