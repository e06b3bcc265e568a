from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator

import pytest

from distribai.testing.proxy import Proxy


@pytest.fixture
async def echo() -> AsyncIterator[int]:
    """The port of a server that sends back what it gets."""

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        while data := await reader.read(1000):
            writer.write(data)
        writer.close()

    server = await asyncio.start_server(serve, "127.0.0.1", 0)
    yield int(server.sockets[0].getsockname()[1])
    server.close()
    await server.wait_closed()


async def test_bytes_pass_both_ways_until_either_side_is_done(echo: int) -> None:
    async with Proxy("127.0.0.1", echo, bytes_per_s=1e9, delay_s=0.001) as proxy:
        reader, writer = await asyncio.open_connection("127.0.0.1", proxy.port)
        payload = bytes(range(256)) * 500
        writer.write(payload)
        writer.write_eof()
        assert await reader.read(-1) == payload
        writer.close()


async def test_a_cut_resets_connections_and_refuses_new_ones_until_it_heals(echo: int) -> None:
    async with Proxy("127.0.0.1", echo) as proxy:
        reader, writer = await asyncio.open_connection("127.0.0.1", proxy.port)
        writer.write(b"a")
        assert await reader.readexactly(1) == b"a"
        proxy.cut()
        with pytest.raises((ConnectionResetError, asyncio.IncompleteReadError)):
            await reader.readexactly(1)
        again, other = await asyncio.open_connection("127.0.0.1", proxy.port)
        with pytest.raises((ConnectionResetError, asyncio.IncompleteReadError)):
            await again.readexactly(1)
        proxy.heal()
        healed, third = await asyncio.open_connection("127.0.0.1", proxy.port)
        third.write(b"b")
        assert await healed.readexactly(1) == b"b"
        for end in (writer, other, third):
            end.close()


async def test_a_frozen_connection_says_nothing_and_loses_nothing(echo: int) -> None:
    async with Proxy("127.0.0.1", echo) as proxy:
        reader, writer = await asyncio.open_connection("127.0.0.1", proxy.port)
        proxy.freeze()
        writer.write(b"late")
        read = asyncio.ensure_future(reader.readexactly(4))
        for _ in range(20):
            await asyncio.sleep(0)
        assert not read.done()
        proxy.heal()
        assert await asyncio.wait_for(read, 30) == b"late"
        writer.close()


async def test_a_target_that_is_not_there_ends_the_connection() -> None:
    async with Proxy("127.0.0.1", 1) as proxy:
        reader, writer = await asyncio.open_connection("127.0.0.1", proxy.port)
        with pytest.raises((ConnectionResetError, asyncio.IncompleteReadError)):
            await reader.readexactly(1)
        writer.close()
