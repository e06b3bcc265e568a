"""What stands around replicas: a load balancer before them, an object store behind them."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Coroutine, Sequence
from pathlib import Path
from typing import Any, TypeVar
from urllib.parse import urlsplit

import boto3
from moto.server import ThreadedMotoServer

from distribai.testing.proxy import Balancer, Proxy

T = TypeVar("T")

PROBE_S = 0.5
"""Seconds between two health checks of a replica, and how long it may take to answer one."""

BUCKET = "grid"
CREDENTIALS = {
    "AWS_ACCESS_KEY_ID": "test",
    "AWS_SECRET_ACCESS_KEY": "test",
    "AWS_REGION": "us-east-1",
}


class Loop:
    """An event loop in a thread of its own."""

    def __init__(self, name: str) -> None:
        self.loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self.loop.run_forever, name=name, daemon=True)
        self._thread.start()

    def call(self, work: Coroutine[Any, Any, T]) -> T:
        """Run ``work`` there to its end."""
        return asyncio.run_coroutine_threadsafe(work, self.loop).result(60)

    def close(self) -> None:
        """End it, with all that still runs in it."""

        async def end() -> None:
            left = asyncio.all_tasks() - {asyncio.current_task()}
            for task in left:
                task.cancel()
            await asyncio.gather(*left, return_exceptions=True)

        self.call(end())
        self.loop.call_soon_threadsafe(self.loop.stop)
        self._thread.join(30)
        self.loop.close()


class ObjectStore:
    """An S3 server behind a wire that can be cut; ``env`` is what its clients need."""

    def __init__(self, loop: Loop) -> None:
        self._loop = loop
        self._server = ThreadedMotoServer(ip_address="127.0.0.1", port=0, verbose=False)
        self._server.start()
        host, port = self._server.get_host_and_port()
        self._client = boto3.client(
            "s3",
            endpoint_url=f"http://{host}:{port}",
            aws_access_key_id="test",
            aws_secret_access_key="test",
            region_name="us-east-1",
        )
        self._client.create_bucket(Bucket=BUCKET)
        self._wire = Proxy(str(host), int(port))
        loop.call(self._wire.__aenter__())
        self.env = {**CREDENTIALS, "AWS_ENDPOINT_URL": f"http://127.0.0.1:{self._wire.port}"}

    def refuse(self) -> None:
        """Reset all connections and refuse new ones."""
        self._loop.loop.call_soon_threadsafe(self._wire.cut)

    def serve(self) -> None:
        """Serve again."""
        self._loop.loop.call_soon_threadsafe(self._wire.heal)

    def copy(self, directory: Path) -> Path:
        """All blobs as files."""
        pages = self._client.get_paginator("list_objects_v2").paginate(Bucket=BUCKET)
        for page in pages:
            for found in page.get("Contents", []):
                path = directory / found["Key"]
                path.parent.mkdir(parents=True, exist_ok=True)
                self._client.download_file(BUCKET, found["Key"], str(path))
        return directory

    def close(self) -> None:
        """Stop it."""
        self._loop.call(self._wire.__aexit__(None, None, None))
        self._client.close()
        self._server.stop()


class LoadBalancer:
    """One address for gRPC and one for HTTP, with a health check of each replica behind them."""

    def __init__(self, loop: Loop, grpc: Sequence[str], http: Sequence[str]) -> None:
        self._loop = loop
        self._well = [True] * len(http)
        self.serves_since: float | None = time.monotonic()
        """Since when there is a replica that is well; None: there is none now."""
        self._balancers = [
            Balancer([_split(address) for address in addresses], lambda i: self._well[i])
            for addresses in (grpc, http)
        ]
        for balancer in self._balancers:
            loop.call(balancer.__aenter__())
        self.grpc, self.http = (f"127.0.0.1:{b.port}" for b in self._balancers)
        loop.call(self._begin([_split(address) for address in http]))

    async def _begin(self, addresses: Sequence[tuple[str, int]]) -> None:
        self._probes = [asyncio.create_task(self._probe(i, a)) for i, a in enumerate(addresses)]

    async def _probe(self, index: int, address: tuple[str, int]) -> None:
        while True:
            self._well[index] = await _is_ready(address)
            if not any(self._well):
                self.serves_since = None
            elif self.serves_since is None:
                self.serves_since = time.monotonic()
            await asyncio.sleep(PROBE_S)

    async def _end(self) -> None:
        for probe in self._probes:
            probe.cancel()
        await asyncio.gather(*self._probes, return_exceptions=True)

    def close(self) -> None:
        """Stop it."""
        self._loop.call(self._end())
        for balancer in self._balancers:
            self._loop.call(balancer.__aexit__(None, None, None))


async def _is_ready(address: tuple[str, int]) -> bool:
    """What a load balancer asks a replica."""
    try:
        async with asyncio.timeout(PROBE_S):
            reader, writer = await asyncio.open_connection(*address)
            try:
                writer.write(b"GET /readyz HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n")
                return b" 200 " in await reader.readline()
            finally:
                writer.close()
    except (OSError, TimeoutError):
        return False


def _split(address: str) -> tuple[str, int]:
    host, port = (address if "//" not in address else urlsplit(address).netloc).rsplit(":", 1)
    return host, int(port)
