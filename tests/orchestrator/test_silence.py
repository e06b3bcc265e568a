"""Encoded both ways, over many rounds in which everything goes wrong: canonical copies stay equal,
and nothing that was learned is lost."""

from __future__ import annotations

import random
from dataclasses import dataclass, field, replace

import numpy as np
import pytest

from distribai.core.codecs import CodecStage, Schedule
from distribai.core.spec import RoundSpec
from distribai.core.tasks import Assignment, OwnWork
from distribai.orchestrator.jobs import queries
from distribai.store.statements import jobs
from distribai.testing.audit import audit
from tests.orchestrator.harness import World
from tests.orchestrator.silent import SilentNode
from tests.orchestrator.test_whole_job import assert_every_position_once


def rounds(up: Schedule, down: Schedule, **changes: int) -> RoundSpec:
    told = RoundSpec(
        inner_steps=2, grace_min=2.0, grace_max=5.0, codec_up=up, codec_down=down, quorum=0.6
    )
    return replace(told, **changes)


async def join(world: World, name: str) -> SilentNode:
    node = SilentNode(world, name)
    world.nodes.append(node)
    await node.connect()
    return node


@dataclass
class Story:
    """A job's life; ``seen`` counts what happened."""

    world: World
    job_id: str
    chance: random.Random
    nodes: list[SilentNode] = field(default_factory=list)
    away: dict[str, int] = field(default_factory=dict)
    seen: dict[str, int] = field(default_factory=dict)
    pattern: Assignment | None = None

    def tell(self, what: str) -> None:
        self.seen[what] = self.seen.get(what, 0) + 1

    @property
    def here(self) -> list[SilentNode]:
        return [n for n in self.nodes if n.name not in self.away]

    async def turn(self) -> None:
        """A few seconds in which every node that is here does what it has in hand, or does not."""
        await self.world.advance(2.0, *self.here)
        for node in self.here:
            for task in list(node.tasks.values()):
                await self.do(node, task)
        for name in [n for n, left in self.away.items() if left == 0]:
            del self.away[name]
            node = next(n for n in self.nodes if n.name == name)
            if self.chance.random() < 0.5:
                node.restart()
                self.tell("node restarted")
            await node.connect()
        self.away = {name: left - 1 for name, left in self.away.items()}
        if self.chance.random() < 0.08:
            await self.restart()

    async def do(self, node: SilentNode, task: Assignment) -> None:
        if task.phase != "train":
            await node.report(await node.outcome(task))
            return
        self.pattern = task
        draw = self.chance.random()
        if draw < 0.08 and len(self.here) > 1:  # it cannot be reached for a while
            await node.vanish()
            self.away[node.name] = self.chance.choice([1, 3, 6, 40])
            self.tell("vanished")
            return
        outcome = await node.outcome(task)
        if draw < 0.16 or (node.name == "a" and task.round == 1):
            outcome = replace(outcome, tokens=outcome.tokens + 1)
            self.tell("refused")
        await node.report(outcome)

    async def restart(self) -> None:
        """The orchestrator dies and another one starts on the same stores."""
        self.tell("orchestrator restarted")
        self.world = await self.world.restart()
        for node in self.nodes:
            node.world = self.world
            self.world.nodes.append(node)
            if node.name not in self.away:
                await node.connect()


@pytest.mark.parametrize(
    ("count", "up", "down", "seed"),
    [
        (30, "int4", "int4", 1),
        (10, "int2", "sparse", 2),
        (
            10,
            (CodecStage(0, "int4"), CodecStage(3, "int2"), CodecStage(7, "bf16")),
            (CodecStage(0, "fp32"), CodecStage(2, "sparse256"), CodecStage(6, "int8")),
            3,
        ),
    ],
)
async def test_rounds_lose_no_mass_and_all_copies_stay_equal(
    world: World, count: int, up: Schedule, down: Schedule, seed: int
) -> None:
    job_id = await world.job(
        steps=2 * count, rounds=rounds(up, down), workers_min=1, max_attempts=1000
    )
    story = Story(world, job_id, random.Random(seed))
    story.nodes = [await join(world, name) for name in ("a", "b", "c")]
    for turn in range(600):
        await story.turn()
        record = await queries.show_job(story.world.grid, job_id)
        if record.state == "completed":
            break
        if turn == 10:
            story.nodes.append(await join(story.world, "d"))
        if turn == 25 and story.nodes[1].name not in story.away:
            await story.nodes[1].vanish()  # for good
            story.away[story.nodes[1].name] = 10**9
    world = story.world
    assert record.state == "completed", (record.version, story.seen)
    assert record.version == count
    wanted = {"vanished", "refused", "node restarted", "orchestrator restarted"}
    assert count < 30 or wanted <= story.seen.keys()
    task = story.pattern
    assert task is not None
    async with world.grid.db.read() as tx:
        version = await jobs.version(tx, job_id, count)
    assert version is not None
    assert version.residual_hash
    merged = lost = 0
    for node in story.nodes:
        assert await node.newest(job_id, task) == version.weights_hash
        gap, counted, refused = await node.missing(job_id, task)
        np.testing.assert_allclose(gap, 0, atol=2e-5, err_msg=node.name)
        merged, lost = merged + counted, lost + refused
    assert merged >= count
    assert lost, story.seen
    assert sum(node.reached for node in story.nodes) > count
    await assert_every_position_once(world, job_id)
    await world.close()
    found = audit(world.root, job_id)
    assert found.ok, found.problems
    assert found.rounds == count


@pytest.mark.parametrize("codec", ["fp32", "int8", "sparse"])
async def test_another_codec_than_the_round_s_is_refused(world: World, codec: str) -> None:
    node = await world.node("a")
    await world.job(rounds=rounds((CodecStage(0, "int4"), CodecStage(1, codec)), "int4"))
    task = await node.next_training()
    wrong = replace(task, spec=replace(task.spec, rounds=rounds(codec, "int4")))
    await node.report(await node.outcome(wrong))
    await world.settle()
    assert node.acks[-1].code == "task.rejected"
    assert codec in node.acks[-1].reason
    await world.advance(10.0, node)  # what it spoilt rests
    await node.report(await node.outcome(await node.next_training()))
    await world.settle()
    assert node.acks[-1].counted
    second = await node.next_training()
    assert (second.round, second.spec.codec_up_of(second.round)) == (1, codec)
    await node.report(await node.outcome(second))
    await world.settle()
    assert node.acks[-1].counted


async def test_a_node_is_told_what_became_of_its_work_where_it_needs_to_know(world: World) -> None:
    a = await world.node("a")
    job_id = await world.job(rounds=rounds("int4", "fp32"))
    first = await a.next_training()
    assert first.own == ()
    await a.report(replace(await a.outcome(first), steps=first.steps + 1))
    await world.settle()
    await world.advance(10.0, a)  # what it spoilt rests
    again = await a.next_training()
    assert again.own == (), "what was refused is not named"
    await a.report(await a.outcome(again))
    second = await a.next_training()
    assert second.own == (OwnWork(again.task_id, again.attempt, True),)
    await a.vanish()
    a.session = ""
    await a.connect(jobs=[job_id, "job_of_another_grid"])
    assert a.register_ack is not None
    assert list(a.register_ack.ended) == ["job_of_another_grid"]


async def test_a_job_without_error_feedback_names_nothing(world: World) -> None:
    a = await world.node("a")
    await world.job(rounds=rounds("int8", "int4"))
    await a.report(await a.outcome(await a.next_training()))
    assert (await a.next_training()).own == ()
