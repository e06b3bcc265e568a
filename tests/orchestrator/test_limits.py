"""Who asks too often is told so, or slowed; nobody else notices."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import httpx
import pytest

from distribai.client.problems import error_of
from distribai.errors import TooMany
from distribai.orchestrator.context import Grid
from distribai.orchestrator.grpc import serve
from distribai.orchestrator.limits import SLOWED, Limits, address_of, network_of
from distribai.orchestrator.people import keys
from distribai.sections import LimitSettings
from distribai.wire.v1 import distribai_pb2 as pb
from tests.http.interface import caller
from tests.orchestrator.harness import World, breathe

STRANGER, NEIGHBOUR, FAR = "203.0.113.5", "203.0.113.77", "198.51.100.1"
TIGHT = LimitSettings(
    anonymous_per_s=1.0,
    anonymous_burst=3.0,
    network_per_s=1.0,
    network_burst=50.0,
    key_per_s=1.0,
    key_burst=8.0,
    owner_per_s=1.0,
    owner_burst=10.0,
    joins_per_s=1.0,
    joins_burst=2.0,
    messages_per_s=2.0,
    messages_burst=5.0,
)


@pytest.mark.parametrize(
    ("address", "network"),
    [
        ("203.0.113.5", "203.0.113.0/24"),
        ("2001:db8:1:2::3", "2001:db8:1::/48"),
        ("::ffff:203.0.113.5", "203.0.113.0/24"),
        ("fe80::1%eth0", "fe80::/48"),
        ("127.0.0.1", ""),
        ("::1", ""),
        ("", ""),
        ("testclient", ""),
    ],
)
def test_a_network_is_what_a_subscriber_has(address: str, network: str) -> None:
    assert network_of(address) == network


@pytest.mark.parametrize(
    ("peer", "address"),
    [
        ("ipv4:203.0.113.5:1234", "203.0.113.5"),
        ("ipv6:%5B2001:db8::1%5D:1234", "2001:db8::1"),
        ("unix:/run/x", ""),
        ("", ""),
    ],
)
def test_grpc_s_names_of_peers_are_read(peer: str, address: str) -> None:
    assert address_of(peer) == address


async def tight(world: World) -> httpx.AsyncClient:
    """The operator's client, and a grid whose limits are tight."""
    grid = world.grid
    grid.settings = replace(grid.settings, limits=TIGHT)
    grid.limits = Limits(TIGHT, world.time)
    world.operator = await keys.ensure_operator_key(  # type: ignore[attr-defined]
        grid.db, Path(world.root), grid.entropy
    )
    return client(grid, STRANGER, world.operator)  # type: ignore[attr-defined]


def client(grid: Grid, address: str, token: str = "") -> httpx.AsyncClient:
    return caller(grid, token, address=address)


async def ask(client: httpx.AsyncClient, times: int, path: str = "/api/v1/nodes") -> list[int]:
    return [(await client.get(path)).status_code for _ in range(times)]


async def test_strangers_share_their_network_s_small_allowance(world: World) -> None:
    await tight(world)
    async with (
        client(world.grid, STRANGER) as stranger,
        client(world.grid, NEIGHBOUR, "guess") as guesser,
        client(world.grid, FAR) as far,
        client(world.grid, "127.0.0.1") as local,
    ):
        assert await ask(stranger, 2) == [401, 401]
        assert await ask(guesser, 2) == [401, 429], "guesses are no better than nothing"
        assert await ask(far, 1) == [401]
        assert await ask(local, 9) == [401] * 9
        world.time.now += 1.0
        assert await ask(stranger, 2) == [401, 429]


async def test_a_refusal_says_when_to_ask_again_in_the_interface_s_own_words(world: World) -> None:
    await tight(world)
    async with client(world.grid, STRANGER) as stranger:
        await ask(stranger, 3, "/healthz")
        answer = await stranger.get("/healthz", headers={"X-Request-ID": "mine"})
    assert answer.status_code == 429
    assert answer.headers["retry-after"] == "1"
    assert answer.headers["content-type"] == "application/problem+json"
    assert answer.headers["x-request-id"] == "mine"
    assert answer.json()["code"] == "limit.rate"
    assert "203.0.113.0/24" in answer.json()["detail"]
    assert isinstance(error_of(answer), TooMany)


async def test_proven_credentials_have_the_key_s_and_the_owner_s_limit(world: World) -> None:
    operator = await tight(world)
    async with operator, client(world.grid, STRANGER) as stranger:
        assert await ask(operator, 1) == [200], "the first use is an unproven one"
        assert await ask(stranger, 3) == [401, 401, 429]
        assert await ask(operator, 8) == [200] * 7 + [429], "what others do does not matter"
        world.time.now += 5.0
        assert await ask(operator, 6) == [200] * 5 + [429]


async def test_credentials_that_are_good_no_more_are_strangers_again(world: World) -> None:
    operator = await tight(world)
    async with operator:
        await ask(operator, 1)
        world.grid.limits.refused(world.operator)  # type: ignore[attr-defined]
        assert await ask(operator, 3) == [200, 200, 200]
        assert world.grid.limits.anonymous.take(network_of(STRANGER), world.time.now) == 0.0


async def test_a_good_token_on_an_open_route_proves_nothing(world: World) -> None:
    await tight(world)
    async with client(world.grid, STRANGER, "invented") as stranger:
        assert await ask(stranger, 4, "/healthz") == [200, 200, 200, 429]


async def test_no_limit_is_a_setting(world: World) -> None:
    await tight(world)
    world.grid.limits = Limits(replace(TIGHT, anonymous_per_s=0.0), world.time)
    async with client(world.grid, STRANGER) as stranger:
        assert await ask(stranger, 9) == [401] * 9


async def refused_join(world: World, peer: str) -> str:
    async def incoming():  # type: ignore[no-untyped-def]
        return
        yield

    answers = [m async for m in serve(world.grid, incoming(), peer)]
    end = answers[-1].session_end
    assert not end.code or end.retry, "the node comes again later"
    return str(end.code)


async def test_streams_that_a_network_opens_too_fast_are_told_to_come_later(world: World) -> None:
    await tight(world)
    codes = [await refused_join(world, f"ipv4:{STRANGER}:{port}") for port in range(3)]
    assert codes == ["", "", "limit.rate"]
    assert await refused_join(world, "ipv4:127.0.0.1:1") == ""
    world.time.now += 1.0
    assert await refused_join(world, f"ipv4:{NEIGHBOUR}:1") == ""


async def test_a_node_that_talks_too_much_is_read_slower_and_loses_nothing(world: World) -> None:
    await tight(world)
    node = await world.node("a")
    slept: list[float] = []

    async def sleep(seconds: float) -> None:
        slept.append(seconds)
        world.time.now += seconds

    world.grid.sleep = sleep
    began = world.time.now
    for number in range(15):
        await node.send(pb.NodeMessage(log=pb.LogMessage(level="info", message=str(number))))
    assert [entry.message for entry in world.grid.fleet.logs] == [str(n) for n in range(15)]
    assert slept == [pytest.approx(0.5)] * 10
    assert world.time.now - began == pytest.approx(5.0)
    quiet = await world.node("b")
    await quiet.heartbeat()
    assert len(slept) == 10, "nobody else waits"


async def test_a_node_that_never_stops_talking_is_sent_away_with_the_reason(world: World) -> None:
    await tight(world)
    node = await world.node("a")

    for _ in range(SLOWED + 10):
        node.queue.put_nowait(pb.NodeMessage(log=pb.LogMessage(message="x")))
    await node.taken_in()
    await breathe()
    assert node.end is not None
    assert (node.end.code, node.end.retry) == ("limit.rate", True)
