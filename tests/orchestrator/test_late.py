"""Late work: what a round closed without counts one version later, for less, and never alone."""

from __future__ import annotations

import math
from dataclasses import replace

import numpy as np
from sqlalchemy import update

from distribai.core.architectures import manifest_of
from distribai.core.plain import from_plain
from distribai.core.spec import RoundSpec
from distribai.core.tasks import Assignment
from distribai.merge.delta import open_delta
from distribai.merge.manifests import RoundManifest, replay_round
from distribai.orchestrator.jobs import commands, queries
from distribai.store.engine import AnyRow
from distribai.store.statements import jobs, submissions, work
from distribai.store.tables import submissions as table
from distribai.testing.audit import audit
from tests.orchestrator.harness import FakeNode, World
from tests.orchestrator.invariants import check_all, read_all
from tests.orchestrator.test_whole_job import assert_every_position_once, path

PAIRS = RoundSpec(inner_steps=2, grace_min=2.0, grace_max=5.0, codec_up="fp32", codec_down="fp32")
"""Dense, so that a round is replayed from weights and momentum alone."""


async def cut_off(
    world: World, seconds: float = 20.0, **changes: object
) -> tuple[str, FakeNode, FakeNode, Assignment]:
    """Two nodes, of which one cannot be reached when the first round closes; its task."""
    a, b = await world.node("a"), await world.node("b")
    job_id = await world.job(**{"rounds": PAIRS, **changes})
    await world.settle()
    missing = b.only_task()
    await b.vanish()
    b.session = ""
    await a.work("train")
    await world.advance(seconds, a)
    assert (await queries.show_job(world.grid, job_id)).version == 1
    return job_id, a, b, missing


async def task_of(world: World, task_id: str) -> AnyRow:
    async with world.grid.db.read() as tx:
        found = await work.get_task(tx, task_id)
        check_all(await read_all(tx))
    assert found is not None
    return found


async def manifest_at(world: World, job_id: str, number: int, take: int = 0) -> RoundManifest:
    async with world.grid.db.read() as tx:
        row = await work.get_round(tx, job_id, number, take)
    assert row is not None
    return from_plain(RoundManifest, row.manifest)


async def replayed(world: World, job_id: str, record: RoundManifest) -> str:
    """The weights' hash that a replay of a round gives, from its files."""
    async with world.grid.db.read() as tx:
        job = await jobs.get(tx, job_id)
        base = await jobs.version(tx, job_id, record.round)
    assert job is not None
    assert base is not None
    manifest = manifest_of(job.spec["model"]["family"], job.spec["model"]["config"])
    deltas = [open_delta(path(world, s.delta.sha256), manifest, {}) for s in record.submissions]
    momentum = path(world, base.outer_sha) if base.outer_sha else None
    found = replay_round(manifest, record, path(world, base.weights_sha), momentum, deltas)
    assert found.ok, found.problems
    return found.weights_hash


async def test_who_was_unreachable_at_the_close_is_merged_one_version_later_for_less(
    any_world: World,
) -> None:
    world = any_world
    job_id, a, b, missing = await cut_off(world)
    await b.connect()
    await b.report(await b.outcome(missing))
    await world.settle()
    assert b.acks[-1].counted
    assert b.only_task().round == 1, "it has its share of the open round at once"
    await a.next_training()
    await a.work("train")
    await b.work("train")
    await world.settle()
    async with world.grid.db.read() as tx:
        (late,) = [
            s
            for s in await submissions.submissions_of_round(tx, job_id, 1, 0)
            if s.base_version < 1
        ]
    assert (late.task_id, late.base_version, late.round) == (missing.task_id, 0, 1)
    merged = (await queries.list_rounds(world.grid, job_id))[-2]
    assert (merged.number, merged.accepted) == (1, 3)
    assert merged.reason.endswith("submissions are in; besides, 1 of earlier rounds that came late")
    record = await manifest_at(world, job_id, 1)
    assert sorted(s.staleness for s in record.submissions) == [0, 0, 1]
    worth = {s.task_id: s.tokens / math.sqrt(1 + s.staleness) for s in record.submissions}
    shares = [float(np.float32(worth[t] / math.fsum(worth.values()))).hex() for t in worth]
    assert record.choices.order == tuple(worth)
    assert list(record.choices.weights) == shares
    assert worth[missing.task_id] == min(worth.values()) == 32 / math.sqrt(2)
    assert await replayed(world, job_id, record) == record.weights_hash
    assert (await queries.show_job(world.grid, job_id)).tokens == 32 * 4
    assert await world.run_job(job_id) == "completed"
    await assert_every_position_once(world, job_id)
    await task_of(world, missing.task_id)


async def test_who_comes_back_with_a_checkpoint_hands_it_in_and_goes_on_with_the_open_round(
    world: World,
) -> None:
    job_id, _, b, missing = await cut_off(world)
    await b.connect()
    await world.settle()
    assert b.stopped == []
    assert b.hurried[-1] == (missing.task_id, 0.0), "at once, with what it has"
    hurried = len(b.hurried)
    await world.settle()
    assert len(b.hurried) == hurried, "once is enough"
    assert [t.task_id for t in b.tasks.values()] == [missing.task_id], "one task per device"
    await b.report(await b.outcome(missing, steps=1))
    await world.settle()
    assert b.only_task().round == 1
    accepted = await task_of(world, missing.task_id)
    assert (accepted.state, accepted.round) == ("accepted", 0)
    assert await world.run_job(job_id) == "completed"
    await assert_every_position_once(world, job_id)
    found = audit(world.root, job_id)
    assert found.ok, found.problems
    async with world.grid.db.write() as tx:
        await tx.run(update(table).values(base_version=1))
    assert not audit(world.root, job_id).ok, "it looks at where work started from"


async def test_its_samples_are_its_own_until_the_next_round_freezes(world: World) -> None:
    job_id, a, b, missing = await cut_off(world)
    await world.advance(60, a)
    kept = await task_of(world, missing.task_id)
    assert kept.state == "queued", "its lease is dead"
    assert missing.task_id not in a.tasks, "nobody else gets it"
    assert not set(missing.samples) & set((await a.next_training()).samples)
    await a.work("train")
    await world.advance(10, a)
    assert (await queries.show_job(world.grid, job_id)).version == 2
    ended = await task_of(world, missing.task_id)
    assert ended.state == "cancelled"
    assert "2 versions behind, at most 1 are taken" in ended.reason
    again = await a.next_training()
    assert set(again.samples) == set(missing.samples), "they are trained again"
    await b.connect()
    assert b.register_ack is not None
    assert [t.task_id for t in b.register_ack.drop] == [missing.task_id]
    assert await world.run_job(job_id) == "completed"
    await assert_every_position_once(world, job_id)


async def test_its_work_is_taken_up_again_after_its_lease_has_died(world: World) -> None:
    job_id, a, b, missing = await cut_off(world)
    await world.advance(60, a)
    outcome = await b.outcome(missing)
    await b.connect()
    assert b.register_ack is not None
    assert [t.task_id for t in b.register_ack.keep] == [missing.task_id]
    await b.report(outcome)
    await world.settle()
    assert b.acks[-1].counted
    assert (await task_of(world, missing.task_id)).attempt == missing.attempt
    assert await world.run_job(job_id) == "completed"
    await assert_every_position_once(world, job_id)


async def test_no_version_is_made_of_late_work_alone(world: World) -> None:
    job_id, a, b, missing = await cut_off(world)
    await b.connect()
    await b.report(await b.outcome(missing))
    b.tasks.clear()
    await b.heartbeat(intent="drain")
    await b.leave()
    a.tasks.clear()
    await a.heartbeat(intent="drain")
    await a.leave()
    await world.advance(120)
    rounds = [(r.number, r.state) for r in await queries.list_rounds(world.grid, job_id)]
    assert rounds == [(0, "merged"), (1, "abandoned")]
    assert (await task_of(world, missing.task_id)).state == "accepted"
    for node in (a, b):
        node.intent = "contribute"
        await node.connect()
    assert await world.run_job(job_id) == "completed"
    record = await manifest_at(world, job_id, 1, 1)
    assert sorted(s.staleness for s in record.submissions) == [0, 0, 1], "its next take has it"
    await assert_every_position_once(world, job_id)


async def test_a_late_submission_makes_no_quorum(world: World) -> None:
    # The first round closes although all are asked for: it does not wait for who fell silent.
    job_id, _, b, missing = await cut_off(world, 70.0, rounds=replace(PAIRS, quorum=1.0))
    await b.connect()
    await b.report(await b.outcome(missing))
    await world.settle()
    assert b.acks[-1].counted
    assert (await queries.list_rounds(world.grid, job_id))[-1].state == "open"


async def test_work_for_the_last_round_comes_too_late_once_that_has_closed(world: World) -> None:
    job_id, _, b, missing = await cut_off(world, steps=2)
    outcome = await b.outcome(missing)
    await b.connect()
    await world.settle()
    assert missing.task_id in b.stopped
    await b.report(outcome)
    await world.settle()
    assert b.acks[-1].code == "task.superseded"
    assert "last round" in b.acks[-1].reason
    assert await world.run_job(job_id) == "completed"
    await assert_every_position_once(world, job_id)


async def test_the_job_does_not_wait_for_late_work(world: World) -> None:
    job_id, a, b, missing = await cut_off(world, steps=4)
    world.nodes.remove(b)
    assert await world.run_job(job_id) == "completed"
    assert (await task_of(world, missing.task_id)).state == "cancelled"
    await assert_every_position_once(world, job_id)
    assert a.tasks == {}


async def test_late_work_outlives_a_restart(world: World) -> None:
    job_id, a, b, missing = await cut_off(world)
    outcome = await b.outcome(missing)
    again = await world.restart()
    for node in (a, b):
        node.world, node.session = again, ""
        again.nodes.append(node)
    await b.connect()
    await a.connect()
    await again.settle()
    assert b.hurried[-1] == (missing.task_id, 0.0)
    await b.report(outcome)
    await again.settle()
    assert b.acks[-1].counted
    assert await again.run_job(job_id) == "completed"
    await assert_every_position_once(again, job_id)
    await again.close()


async def test_cancelling_the_job_ends_late_tasks_too(world: World) -> None:
    job_id, a, _, missing = await cut_off(world)
    await world.advance(60, a)
    await commands.cancel_job(world.grid, job_id, "enough", "tester")
    assert (await task_of(world, missing.task_id)).state == "cancelled"
    await assert_every_position_once(world, job_id)


async def test_who_comes_back_without_it_gives_its_samples_back_at_once(world: World) -> None:
    _, _, b, missing = await cut_off(world)
    b.tasks.clear()
    await b.connect()
    assert (await task_of(world, missing.task_id)).state == "cancelled"


async def test_without_staleness_late_work_is_superseded(world: World) -> None:
    _, _, b, missing = await cut_off(world, rounds=replace(PAIRS, staleness=0))
    outcome = await b.outcome(missing)
    await b.connect()
    await world.settle()
    assert missing.task_id in b.stopped
    await b.report(outcome)
    await world.settle()
    assert b.acks[-1].code == "task.superseded"
    assert "staleness is 0" in b.acks[-1].reason


async def test_work_of_an_abandoned_take_counts_in_the_next_and_its_verdict_says_what_happened(
    world: World,
) -> None:
    a, b = await world.node("a"), await world.node("b")
    job_id = await world.job(rounds=PAIRS, workers_min=2)
    await world.settle()
    missing = b.only_task()
    await b.vanish()
    b.session = ""
    await a.work("train")
    await world.advance(60, a)
    assert (await queries.list_rounds(world.grid, job_id))[0].state == "abandoned"
    await b.connect()
    await b.report(await b.outcome(missing))
    await world.settle()
    assert b.acks[-1].counted
    assert await world.run_job(job_id) == "completed"
    record = await manifest_at(world, job_id, 0, 1)
    assert missing.task_id in {s.task_id for s in record.submissions}
    assert {s.staleness for s in record.submissions} == {0}, "it starts from the same version"
    await assert_every_position_once(world, job_id)
    await task_of(world, missing.task_id)
