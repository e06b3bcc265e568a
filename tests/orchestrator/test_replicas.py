"""Two replicas over one database: what one of them does late must not harm the other's nodes."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path

from sqlalchemy import select

from distribai.core.states import Liveness, TaskState
from distribai.orchestrator import feed
from distribai.orchestrator.duties import Duties
from distribai.orchestrator.feed import Wanted
from distribai.orchestrator.fleet import queries
from distribai.orchestrator.fleet import replicas as fleet_replicas
from distribai.orchestrator.fleet.liveness import after_start, flush, wait_for_nodes
from distribai.orchestrator.fleet.queries import list_nodes
from distribai.orchestrator.grpc import serve
from distribai.store.statements import fleet, work
from distribai.store.tables import sessions
from distribai.wire import convert, signing
from distribai.wire.v1 import distribai_pb2 as pb
from tests.orchestrator.harness import LIVENESS, FakeNode, World, breathe


async def moves(node: FakeNode, world: World) -> None:
    """The node goes to another replica, as its daemon does when a stream breaks."""
    node.world = world
    world.nodes.append(node)
    await node.connect()
    assert node.end is None


async def open_sessions(world: World) -> list[str]:
    async with world.grid.db.read() as tx:
        rows = await tx.all(select(sessions.c.holder).where(sessions.c.ended_at.is_(None)))
    return [row.holder for row in rows]


async def test_a_registration_that_was_overtaken_by_a_newer_one_is_refused(
    replicas: tuple[World, World],
) -> None:
    """A replica that freezes in the middle of one and thaws later would end the session that the
    node has begun elsewhere, and the node would end as if a second daemon had its key."""
    slow, other = replicas
    node = await slow.node("a")
    await node.vanish()

    received: asyncio.Queue[pb.NodeMessage] = asyncio.Queue()

    async def incoming() -> AsyncIterator[pb.NodeMessage]:
        while True:
            yield await received.get()

    stream = serve(slow.grid, incoming())
    challenge = (await anext(stream)).challenge
    slow.time.now += 1.0
    await moves(node, other)
    slow.time.now += 20.0
    stale = pb.RegisterSession(
        protocol=challenge.protocol_max,
        public_key=node.public,
        signature=signing.sign_register(node.key, challenge.grid_id, challenge.nonce),
        name="a",
        devices=[convert.device_to_wire(d) for d in node.devices],
    )
    received.put_nowait(pb.NodeMessage(register=stale))
    answer = await anext(stream)
    assert answer.WhichOneof("body") == "session_end"
    assert answer.session_end.retry, "if it is there after all, it may try again"

    await node.heartbeat()
    await flush(other.grid)
    await breathe()
    assert node.end is None
    assert await open_sessions(slow) == [other.grid.holder]


async def test_a_late_goodbye_does_not_end_the_next_session_of_its_node(
    replicas: tuple[World, World],
) -> None:
    first, other = replicas
    node = await first.node("a")
    await node.heartbeat("drain")
    first.time.now += 1.0
    again = FakeNode(other, "a", key=node.key)
    other.nodes.append(again)
    await again.connect()

    await node.leave()  # the first replica notices only now
    await breathe()
    await again.heartbeat()
    await flush(other.grid)
    await breathe()
    assert again.end is None
    (record,) = await list_nodes(other.grid)
    assert record.liveness == Liveness.ONLINE


async def leased_to(world: World) -> list[str]:
    async with world.grid.db.read() as tx:
        return [t.node_id for t in await work.tasks_in(tx, (TaskState.LEASED,))]


async def test_replicas_that_start_again_and_again_keep_no_lease_of_a_dead_node_alive(
    replicas: tuple[World, World], tmp_path: Path
) -> None:
    leader, other = replicas
    node = await leader.node("a")
    await leader.job()
    await leader.settle()
    assert await leased_to(leader) == [node.id]
    await node.vanish()
    for _ in range(12):
        leader.time.now += 10.0
        await after_start(other.grid)
        await leader.settle()
    assert await leased_to(leader) == []


async def test_whoever_leads_after_a_dead_leader_gives_the_nodes_time_to_come_back(
    replicas: tuple[World, World],
) -> None:
    leader, other = replicas
    node = await leader.node("a")
    await leader.job()
    await leader.settle()
    await node.vanish()
    # The leader dies with the node's stream; nobody looks until its lease has run out.
    leader.time.now += LIVENESS.offline_s + 1.0
    await other.settle()
    assert await leased_to(other) == [node.id]
    leader.time.now += LIVENESS.startup_grace_s - 5.0
    await moves(node, other)
    await other.settle()
    assert await leased_to(other) == [node.id]
    assert node.stopped == []


async def test_replicas_that_write_about_the_same_nodes_at_once_do_not_undo_each_other(
    replicas: tuple[World, World],
) -> None:
    """PostgreSQL undoes one of two transactions that lock the same rows in opposite orders."""
    nodes = [await replicas[0].node(f"n{i}") for i in range(12)]
    forth = sorted((node.id for node in nodes), reverse=True)

    async def hear(world: World) -> None:
        for _ in range(40):
            async with world.grid.db.write() as tx:
                await fleet.heard(tx, [{"node_id": i, "up": 1, "down": 1} for i in forth])

    async def start(world: World) -> None:
        for _ in range(40):
            await after_start(world.grid)
            async with world.grid.db.write() as tx:
                await wait_for_nodes(world.grid, tx)

    first, second = replicas
    await asyncio.gather(hear(first), hear(second), start(first), start(second))


async def told_of_replicas(world: World) -> list[tuple[str, object]]:
    found = await feed.read(world.grid, Wanted.of(["replica"]), "", 100)
    return [(e.kind, e.data["replica"]) for e in found.items]


async def test_a_replica_that_is_gone_is_told_once_and_shown_until_it_is_back(
    replicas: tuple[World, World],
) -> None:
    leader, other = replicas
    await other.settle()
    here = ("host0:8766", "host1:8766")
    summary = await queries.summary(leader.grid)
    assert (summary.replicas, summary.problems) == (here, ())

    for _ in range(6):
        await leader.advance(10.0)
    summary = await queries.summary(leader.grid)
    assert summary.replicas == here[:1]
    assert not summary.ok
    assert "host1:8766 is gone" in summary.problems[0]
    page = (await leader.grid.metrics.page(leader.grid)).decode()
    assert 'distribai_grid_replicas{state="here"} 1.0' in page
    assert 'distribai_grid_replicas{state="gone"} 1.0' in page

    await other.settle()
    await leader.settle()
    summary = await queries.summary(leader.grid)
    assert (summary.replicas, summary.problems) == (here, ())
    assert await told_of_replicas(leader) == [
        ("replica.here", "host0:8766"),
        ("replica.here", "host1:8766"),
        ("replica.gone", "host1:8766"),
        ("replica.here", "host1:8766"),
    ]


async def test_a_replica_that_leaves_in_order_or_long_ago_is_not_missed(
    replicas: tuple[World, World],
) -> None:
    leader, other = replicas
    await other.settle()
    async with other.grid.db.write() as tx:
        await fleet_replicas.leave(other.grid, tx)
    assert (await queries.summary(leader.grid)).problems == ()
    assert (await told_of_replicas(leader))[-1] == ("replica.left", "host1:8766")

    other.duties = Duties(other.grid)
    await other.settle()
    leader.time.now += fleet_replicas.SHOWN_S + 60.0
    await leader.settle()
    assert (await queries.summary(leader.grid)).problems == ()
    async with leader.grid.db.read() as tx:
        assert [r.name for r in await fleet_replicas.shown(tx)] == ["host0:8766"]


async def test_an_embedded_database_has_no_replicas_to_tell_of(world: World) -> None:
    await world.settle()
    assert (await queries.summary(world.grid)).replicas == ()
    assert await told_of_replicas(world) == []
