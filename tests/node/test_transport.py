"""The link over real gRPC."""

from __future__ import annotations

import asyncio
import gc
from collections.abc import AsyncIterator

import grpc.aio
import pytest

from distribai.errors import ProtocolMismatch
from distribai.node.certificate import Certificate
from distribai.node.link import Link
from distribai.node.transport import ConnectionLost, GrpcTransport, in_words
from distribai.testing.clock import FakeClock
from distribai.testing.proxy import Proxy
from distribai.testing.shaping import Shape, ShapedLink
from distribai.wire.joinlink import JoinLink
from distribai.wire.v1 import distribai_pb2 as pb
from tests.node.helpers import GRID, NoJitter, Peer, ScriptedOrchestrator, eventually
from tests.node.test_link import IDENTITY, Recorder


@pytest.fixture
async def orchestrator() -> AsyncIterator[ScriptedOrchestrator]:
    async with ScriptedOrchestrator() as running:
        yield running


async def test_a_connection_that_is_reset_is_resumed_and_loses_nothing(
    orchestrator: ScriptedOrchestrator,
) -> None:
    async with Proxy("127.0.0.1", orchestrator.port) as proxy:
        address = f"127.0.0.1:{proxy.port}"
        handler, peer = Recorder(), Peer()
        link = Link(
            JoinLink("h", address, address, GRID),
            GrpcTransport(address),
            IDENTITY,
            handler,
            FakeClock(),
            NoJitter(),
        )
        running = asyncio.ensure_future(link.run())
        await peer.welcome(await orchestrator.accept())
        for n in range(100):
            link.send(pb.TaskResult(task_id=f"task_{n}"))
            peer.say(control=pb.ControlMessage(action=f"action_{n}"))
        got = [(await peer.hear("task_result")).task_id for _ in range(5)]
        proxy.reset()
        for n in range(100, 110):
            link.send(pb.TaskResult(task_id=f"task_{n}"))
            peer.channel.number(
                pb.OrchestratorMessage(control=pb.ControlMessage(action=f"action_{n}"))
            )
        await peer.welcome(await orchestrator.accept(), resume=True)
        got += [(await peer.hear("task_result")).task_id for _ in range(105)]
        assert got == [f"task_{n}" for n in range(110)]
        await eventually(lambda: len(handler.got) == 110)
        assert [m.control.action for m in handler.got] == [f"action_{n}" for n in range(110)]
        running.cancel()
        await asyncio.wait({running})


async def test_the_end_of_a_stream_is_told_from_its_loss(
    orchestrator: ScriptedOrchestrator,
) -> None:
    transport = GrpcTransport(f"127.0.0.1:{orchestrator.port}")
    connection = await transport.connect()
    stream = await orchestrator.accept()
    stream.say(pb.OrchestratorMessage(seq=3))
    message = await connection.read()
    assert message is not None
    assert message.seq == 3
    stream.say(None)
    assert await connection.read() is None
    with pytest.raises(ConnectionLost):
        await connection.write(pb.NodeMessage())
    await connection.close()
    await connection.close()


async def test_a_closed_connection_ends_on_the_other_side(
    orchestrator: ScriptedOrchestrator,
) -> None:
    connection = await GrpcTransport(f"127.0.0.1:{orchestrator.port}").connect()
    stream = await orchestrator.accept()
    await connection.close()
    async with asyncio.timeout(30):
        await stream.ended.wait()


async def test_nobody_listening_is_a_lost_connection() -> None:
    async with ScriptedOrchestrator() as gone:
        port = gone.port
    connection = await GrpcTransport(f"127.0.0.1:{port}").connect()
    with pytest.raises(ConnectionLost) as caught:
        await connection.read()
    assert str(caught.value) == f"nothing listens at 127.0.0.1:{port}"
    await connection.close()


async def hang_up(_: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    writer.close()


async def test_what_was_closed_is_gone_and_tries_no_more_whoever_keeps_its_exception() -> None:
    async with await asyncio.start_server(hang_up, "127.0.0.1", 0) as server:
        connection = await GrpcTransport(
            f"127.0.0.1:{server.sockets[0].getsockname()[1]}"
        ).connect()
        gc.disable()  # a quiet program collects cycles seldom
        try:
            with pytest.raises(ConnectionLost) as caught:
                await connection.read()
            with pytest.raises(ConnectionLost):
                await connection.write(pb.NodeMessage())
            await connection.close()
            left = [o for o in gc.get_objects() if issubclass(type(o), grpc.aio.Channel)]
        finally:
            gc.enable()
        assert caught.value.__traceback__ is not None
        assert left == []
        with pytest.raises(ConnectionLost):
            await connection.read()


async def test_a_link_with_long_round_trips_is_given_the_time_to_connect(
    orchestrator: ScriptedOrchestrator,
) -> None:
    far = ShapedLink(up=Shape(latency_s=0.5), down=Shape(latency_s=0.5))
    async with Proxy("127.0.0.1", orchestrator.port, far) as proxy:
        connection = await GrpcTransport(f"127.0.0.1:{proxy.port}").connect()
        (await orchestrator.accept()).say(pb.OrchestratorMessage(seq=7))
        message = await connection.read()
        assert message is not None
        assert message.seq == 7
        await connection.close()


async def test_who_is_cut_before_the_first_word_hears_that_the_link_may_be_another_one() -> None:
    async def hint(port: int) -> str:
        connection = await GrpcTransport(f"127.0.0.1:{port}").connect()
        with pytest.raises(ConnectionLost) as caught:
            await connection.read()
        await connection.close()
        return caught.value.hint

    async with await asyncio.start_server(hang_up, "127.0.0.1", 0) as server:
        port = server.sockets[0].getsockname()[1]
        assert "TLS" in await hint(port)
    assert await hint(port) == "", "where nobody listens it is not the link"


class Doubts(Certificate):
    """Counts how often the node doubts its certificate."""

    def __init__(self) -> None:
        self.count = 0

    def doubt(self) -> None:
        self.count += 1


async def test_a_cut_connection_raises_doubt_and_one_that_never_was_does_not(
    orchestrator: ScriptedOrchestrator,
) -> None:
    async def doubts(port: int) -> int:
        certificate = Doubts()
        connection = await GrpcTransport(f"127.0.0.1:{port}", None, certificate).connect()
        with pytest.raises(ConnectionLost):
            await connection.read()
        await connection.close()
        return certificate.count

    async with await asyncio.start_server(hang_up, "127.0.0.1", 0) as server:
        port = server.sockets[0].getsockname()[1]
        assert await doubts(port) == 1
    assert await doubts(port) == 0

    certificate = Doubts()
    async with Proxy("127.0.0.1", orchestrator.port) as proxy:
        transport = GrpcTransport(f"127.0.0.1:{proxy.port}", None, certificate)
        connection = await transport.connect()
        (await orchestrator.accept()).say(pb.OrchestratorMessage(seq=1))
        assert await connection.read() is not None
        proxy.reset()
        with pytest.raises(ConnectionLost):
            await connection.read()
        await connection.close()
    assert certificate.count == 0, "the grid had spoken: it takes this node"


async def test_the_web_address_in_the_place_of_the_grpc_one_is_told_as_such() -> None:
    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.read(1)
        writer.write(b"HTTP/1.1 400 Bad Request\r\nContent-Length: 0\r\n\r\n")
        await writer.drain()
        writer.close()

    async with await asyncio.start_server(answer, "127.0.0.1", 0) as server:
        address = f"127.0.0.1:{server.sockets[0].getsockname()[1]}"
        connection = await GrpcTransport(address).connect()
        with pytest.raises(ConnectionLost) as caught:
            await connection.read()
        assert str(caught.value).startswith(f"what listens at {address} is no gRPC port")
        await connection.close()


@pytest.mark.parametrize(
    ("details", "words"),
    [
        ("errors resolving h:1: [address lookup failed]", "the name of h:1 is not known"),
        ("Tls handshake failed: WRONG_VERSION_NUMBER: Invalid", "h:1 speaks no TLS"),
        ("Tls handshake failed: CERTIFICATE_VERIFY_FAILED", "h:1 has not the certificate"),
        ("recvmsg:Connection reset by peer (104)", "h:1 has cut the connection"),
        ("something new", "no connection to h:1 (unavailable: something new)"),
    ],
)
def test_what_grpc_says_is_put_into_words(details: str, words: str) -> None:
    assert in_words("UNAVAILABLE", details, "h:1").startswith(words)


async def test_a_server_of_something_else_is_a_protocol_mismatch() -> None:
    server = grpc.aio.server()
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    connection = await GrpcTransport(f"127.0.0.1:{port}").connect()
    with pytest.raises(ProtocolMismatch) as caught:
        await connection.read()
    assert caught.value.code == "protocol.version"
    await connection.close()
    await server.stop(None)
