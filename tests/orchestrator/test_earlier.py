"""What earlier programs left goes on: their databases, and their nodes that were not upgraded."""

from __future__ import annotations

import asyncio
import contextlib
import os
import sqlite3
import tarfile
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import asyncpg
import pytest
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
from google.protobuf.descriptor_pb2 import FileDescriptorProto
from google.protobuf.descriptor_pool import DescriptorPool
from google.protobuf.message import Message
from google.protobuf.message_factory import GetMessageClassesForFiles
from sqlalchemy import Integer, create_engine, func, insert, make_url, select

from distribai.core.people import OPERATOR
from distribai.errors import Conflict, NotAllowed
from distribai.orchestrator import callers
from distribai.orchestrator.backup.format import reflect, tables_of, upgrade
from distribai.orchestrator.feed import Wanted, read
from distribai.orchestrator.fleet import standing
from distribai.orchestrator.fleet.liveness import after_start
from distribai.orchestrator.fleet.queries import page_nodes
from distribai.orchestrator.jobs import commands, queries
from distribai.orchestrator.people import keys
from distribai.store.engine import Database
from distribai.store.migrate import migrate
from distribai.wire.v1 import distribai_pb2 as pb
from tests.orchestrator.harness import FakeNode, FakeTime, World
from tests.orchestrator.invariants import check_all, read_all
from tests.orchestrator.test_whole_job import assert_every_position_once

EARLIER = Path(__file__).parent / "earlier"
TOKEN = "dop_OLTmUuRNp_I3DZ4mDicTZVCko6bQf1wMMy-LEiQIP9I"
DIED_AT = 1_000_003.0
"""Database time of the earlier program's last word."""


def unpack(root: Path) -> str:
    """The grid that the program of schema 0001 left, on SQLite; its URL."""
    with tarfile.open(EARLIER / "r0001.tar.xz") as archive:
        for member in archive:
            assert member.isdir() or member.isreg()
            archive.extract(member, root)
    with contextlib.closing(sqlite3.connect(root / "grid.sqlite3")) as made:
        made.executescript((root / "grid.sql").read_text())
    return f"sqlite:///{root / 'grid.sqlite3'}"


async def on_postgres(uri: str, sqlite_url: str) -> str:
    """The same rows on PostgreSQL, as a program of schema 0001 would have left them there."""
    connection = await asyncpg.connect(uri)
    await connection.execute("DROP DATABASE IF EXISTS earlier")
    await connection.execute("CREATE DATABASE earlier")
    await connection.close()
    url = make_url(uri).set(database="earlier").render_as_string(hide_password=False)
    names = tables_of("0001")
    engine = create_engine(sqlite_url)
    db = Database(url)
    with engine.connect() as old:
        found = reflect(old, names)
        async with db.write() as tx:
            await tx.conn.run_sync(upgrade, "0001")
            there = await tx.conn.run_sync(lambda c: reflect(c, names))
            for table in there.sorted_tables:
                rows = [dict(r._mapping) for r in old.execute(select(found.tables[table.name]))]
                await tx.run_many(insert(table), rows)
                (key, *more) = table.primary_key.columns
                if not more and isinstance(key.type, Integer) and rows:
                    name = func.pg_get_serial_sequence(table.name, key.name)
                    await tx.run(select(func.setval(name, max(r[key.name] for r in rows))))
    engine.dispose()
    await db.close()
    return url


@pytest.fixture(params=["sqlite", "postgresql"])
async def earlier(request: pytest.FixtureRequest, tmp_path: Path) -> AsyncIterator[World]:
    """Today's orchestrator on that grid, started after the other one died."""
    url = await asyncio.to_thread(unpack, tmp_path)
    if request.param == "postgresql":
        url = await on_postgres(request.getfixturevalue("postgres"), url)
    time = FakeTime()
    time.now = DIED_AT + 5.0
    db = Database(url, clock=time, durable=False)
    await migrate(db)  # what every start does first
    await keys.ensure_operator_key(db, tmp_path, os.urandom)
    await db.close()
    world = await World(tmp_path, url, time, seed=9).open()
    await after_start(world.grid)
    yield world
    await world.close()


def key_of(number: int) -> Ed25519PrivateKey:
    return Ed25519PrivateKey.from_private_bytes(number.to_bytes(32, "big"))


async def test_a_grid_of_the_first_schema_goes_on_where_it_was(earlier: World) -> None:
    world, grid = earlier, earlier.grid
    page = await queries.list_jobs(grid, None, 10)
    waiting, running = page.items
    assert (running.state, running.version, running.rounds_total) == ("running", 1, 3)
    assert (waiting.state, waiting.version) == ("submitted", 0)
    assert world.invite == (world.root / "invite").read_text().strip(), "the link still opens"

    nodes = [await world.node(name, key=key_of(n)) for n, name in ((1, "a"), (2, "b"))]
    known = {n.id for n in (await page_nodes(grid, 10)).items}
    assert known == {node.id for node in nodes}, "they are the same nodes, and joined long ago"
    assert await world.run_job(running.id) == "completed"
    await assert_every_position_once(world, running.id)
    job = await queries.show_job(grid, running.id)
    assert job.version == 3
    assert job.tokens == sum(r.tokens for r in await queries.list_rounds(grid, running.id))

    await commands.accept_job(grid, waiting.id, "operator")
    assert await world.run_job(waiting.id) == "completed"
    async with grid.db.read() as tx:
        check_all(await read_all(tx))


async def test_its_people_keys_and_events_are_there(earlier: World) -> None:
    grid = earlier.grid
    running = (await queries.list_jobs(grid, "running", 10)).items[0]
    found = await callers.verify_token(grid, TOKEN)
    assert (found.account_id, found.operator) == (OPERATOR, True)
    with pytest.raises(NotAllowed):
        await callers.verify_token(grid, TOKEN[:-1] + "x")
    spec = (await queries.show_job(grid, running.id)).spec
    # Its spec has more fields by now, so it is not the same request.
    with pytest.raises(Conflict) as caught:
        await commands.create_job(grid, spec, "the-key", "operator", caller=found)
    assert caught.value.code == "http.idempotency", "but no second job is made under the key"
    events = (await read(grid, Wanted(running.id), "", 200)).items
    kinds = [event.kind for event in events]
    assert kinds[0] == "job.submitted"
    assert {"job.queued", "round.merged"} <= set(kinds)


# ------------------------------------------------------------------ a node that was not upgraded


class Wire:
    """The contract of protocol 1, as a node had it that nobody has upgraded since."""

    def __init__(self) -> None:
        file = FileDescriptorProto.FromString((EARLIER / "v1.bin").read_bytes())
        pool = DescriptorPool()
        pool.Add(file)
        self._classes = GetMessageClassesForFiles([file.name], pool)
        self.dropped: set[str] = set()

    def __call__(self, message: Message) -> Message:
        """A message as the older program reads or writes it: of fields that it does not know it has
        nothing. Which ones it came across is in ``dropped``."""
        older = self._classes[message.DESCRIPTOR.full_name].FromString(message.SerializeToString())
        older.DiscardUnknownFields()
        left = type(message).FromString(older.SerializeToString())
        if left != message:
            self.dropped.add(str(message.WhichOneof("body")))
        return left


class OlderNode(FakeNode):
    """A node of protocol 1: every byte passes through its idea of the contract."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, protocol=1, **kwargs)
        self.sent, self.heard = Wire(), Wire()

    async def _incoming(self) -> AsyncIterator[pb.NodeMessage]:
        async for message in super()._incoming():
            left = self.sent(message)
            assert isinstance(left, pb.NodeMessage)
            yield left

    async def _run(self, stream: AsyncIterator[pb.OrchestratorMessage]) -> None:
        async def heard() -> AsyncIterator[pb.OrchestratorMessage]:
            async for message in stream:
                left = self.heard(message)
                assert isinstance(left, pb.OrchestratorMessage)
                yield left

        await super()._run(heard())


async def test_a_node_one_protocol_version_behind_does_a_whole_job_beside_a_newer_one(
    any_world: World,
) -> None:
    world = any_world
    older = OlderNode(world, "older")
    world.nodes.append(older)
    await older.connect()
    assert older.register_ack is not None
    assert older.register_ack.protocol == 1
    newer = await world.node("newer")
    job_id = await world.job()
    machine = pb.Machine(memory_mb=64_000)
    await older.heartbeat(machine=machine)
    assert "heartbeat" in older.sent.dropped, "it cannot say what its machine was measured to have"

    await older.next_training()
    await older.vanish()
    await older.connect()
    assert older.register_ack.resumed, "the connection breaks, and the session goes on"
    token = older.token
    assert await world.run_job(job_id) == "completed"
    assert older.end is None
    assert older.token == token, "it was told of no other"
    assert (await callers.verify_token(world.grid, token)).node_id == older.id
    await assert_every_position_once(world, job_id)
    tasks = (await queries.list_tasks(world.grid, job_id, 100)).items
    assert {older.id, newer.id} <= {t.node_id for t in tasks if t.state == "accepted"}
    async with world.grid.db.read() as tx:
        check_all(await read_all(tx))


async def test_the_operator_s_words_reach_a_node_one_protocol_version_behind(
    world: World,
) -> None:
    node = OlderNode(world, "older")
    world.nodes.append(node)
    await node.connect()
    for verb in ("pause", "resume", "drain"):
        await standing.order(world.grid, node.id, verb, "operator")
        await world.settle()
    assert node.orders == ["pause", "resume", "drain"]
    assert not node.heard.dropped, "nothing is said that it would not understand"
