"""A webhook's receiver on the loopback, and a sender that may reach it."""

from __future__ import annotations

import asyncio
import json
import ssl
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field
from ipaddress import ip_address
from typing import Any

from distribai.core.addresses import Address
from distribai.orchestrator.webhooks.sending import Sender

OK = b"HTTP/1.1 204 No Content\r\nConnection: close\r\n\r\n"


@dataclass
class Receiver:
    """Answers each request with the next of ``answers``, then with 204; remembers what came."""

    answers: list[bytes] = field(default_factory=list)
    heads: list[dict[str, str]] = field(default_factory=list)
    bodies: list[bytes] = field(default_factory=list)
    names: list[str | None] = field(default_factory=list)
    silent: bool = False
    port: int = 0

    @property
    def events(self) -> list[dict[str, Any]]:
        return [json.loads(body)["event"] for body in self.bodies]

    @property
    def kinds(self) -> list[str]:
        return [event["kind"] for event in self.events]

    async def listen(self, tls: ssl.SSLContext | None = None) -> asyncio.Server:
        if tls is not None:
            tls.sni_callback = lambda sock, name, context: self.names.append(name)
        server = await asyncio.start_server(self._serve, "127.0.0.1", 0, ssl=tls)
        self.port = server.sockets[0].getsockname()[1]
        return server

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        first, *lines = (await reader.readuntil(b"\r\n\r\n")).decode().split("\r\n")
        head = dict(line.split(": ", 1) for line in lines if line)
        head[":"] = first
        self.heads.append({k.lower(): v for k, v in head.items()})
        self.bodies.append(await reader.readexactly(int(self.heads[-1]["content-length"])))
        if self.silent:
            await reader.read()  # until the sender has given up
        with suppress(ConnectionError, ssl.SSLError):
            writer.write(self.answers.pop(0) if self.answers else OK)
            await writer.drain()
            writer.close()
            await writer.wait_closed()


def answer(status: int, *headers: str, body: bytes = b"") -> bytes:
    """An HTTP answer."""
    lines = [f"HTTP/1.1 {status} X", f"Content-Length: {len(body)}", "Connection: close", *headers]
    return "\r\n".join(lines).encode() + b"\r\n\r\n" + body


def reaching(
    receiver: Receiver,
    clock: Callable[[], float],
    rule: Callable[[Address, int], str] = lambda address, port: "",
    found: tuple[str, ...] = ("127.0.0.1",),
    tls: Callable[[], ssl.SSLContext] = ssl.create_default_context,
) -> Sender:
    """A sender for which every name is the loopback."""

    async def resolve(host: str, port: int) -> list[Address]:
        return [ip_address(text) for text in found]

    return Sender(rule, clock, resolve, tls)
