from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator

import pytest

from distribai.testing.proxy import Proxy
from distribai.testing.shaping import Shape, ShapedLink


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
    shape = Shape(bytes_per_s=1e9, latency_s=0.001, jitter_s=0.001)
    async with Proxy("127.0.0.1", echo, ShapedLink(shape, shape)) as proxy:
        reader, writer = await asyncio.open_connection("127.0.0.1", proxy.port)
        payload = bytes(range(256)) * 500
        writer.write(payload)
        writer.write_eof()
        assert await reader.read(-1) == payload
        assert proxy.link.bytes_up == proxy.link.bytes_down == len(payload)
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


async def test_a_connection_breaks_at_the_chosen_byte_and_the_next_one_passes(echo: int) -> None:
    link = ShapedLink(down=Shape(resets=(40_000,)))
    async with Proxy("127.0.0.1", echo, link) as proxy:
        reader, writer = await asyncio.open_connection("127.0.0.1", proxy.port)
        writer.write(bytes(100_000))
        with pytest.raises((ConnectionResetError, asyncio.IncompleteReadError)) as caught:
            await reader.readexactly(100_000)
        if isinstance(caught.value, asyncio.IncompleteReadError):
            assert len(caught.value.partial) <= 40_000
        again, other = await asyncio.open_connection("127.0.0.1", proxy.port)
        other.write(b"a")
        assert await again.readexactly(1) == b"a"
        for end in (writer, other):
            end.close()


async def test_a_rate_holds_for_all_connections_of_a_link_together(echo: int) -> None:
    link = ShapedLink(up=Shape(bytes_per_s=100_000.0, burst=1000.0))
    began = asyncio.get_running_loop().time()
    async with Proxy("127.0.0.1", echo, link) as one, Proxy("127.0.0.1", echo, link) as two:

        async def send(port: int) -> None:
            reader, writer = await asyncio.open_connection("127.0.0.1", port)
            writer.write(bytes(25_000))
            await reader.readexactly(25_000)
            writer.close()

        await asyncio.gather(send(one.port), send(two.port))
    # No upper bound: machines may be slow. Faster than the rate they cannot be.
    assert asyncio.get_running_loop().time() - began >= 0.45
    assert link.bytes_up == 50_000


async def test_a_reset_breaks_what_is_open_and_nothing_else(echo: int) -> None:
    async with Proxy("127.0.0.1", echo) as proxy:
        reader, writer = await asyncio.open_connection("127.0.0.1", proxy.port)
        writer.write(b"a")
        assert await reader.readexactly(1) == b"a"
        proxy.reset()
        with pytest.raises((ConnectionResetError, asyncio.IncompleteReadError)):
            await reader.readexactly(1)
        again, other = await asyncio.open_connection("127.0.0.1", proxy.port)
        other.write(b"b")
        assert await again.readexactly(1) == b"b"
        for end in (writer, other):
            end.close()
