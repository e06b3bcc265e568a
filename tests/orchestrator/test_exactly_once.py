from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from distribai.core.ranges import SampleRange, normalize, total
from distribai.core.spec import BlobRef, RoundSpec
from distribai.core.tasks import Outcome
from distribai.orchestrator.jobs import queries
from distribai.orchestrator.rounds.verifying import without
from distribai.store.statements import jobs, submissions
from distribai.store.tables import submissions as table
from tests.orchestrator.harness import FakeNode, World
from tests.orchestrator.test_whole_job import assert_every_position_once, consumed


async def finish_everything(world: World, node: FakeNode) -> None:
    """Let a node do its tasks until it has none."""
    while await node.work():
        await world.settle()


async def states(world: World, job_id: str, phase: str = "train") -> dict[str, str]:
    tasks = (await queries.list_tasks(world.grid, job_id)).items
    return {t.id: t.state for t in tasks if t.phase == phase}


async def two_at_work(world: World, **changes: object) -> tuple[str, FakeNode, FakeNode]:
    a, b = await world.node("a"), await world.node("b")
    job_id = await world.job(**changes)
    await world.settle()
    return job_id, a, b


async def test_the_same_result_again_counts_once_and_gets_the_same_answer(world: World) -> None:
    job_id, a, _ = await two_at_work(world)
    outcome = await a.outcome(a.only_task())
    await a.report(outcome)
    await a.report(outcome)
    await world.settle()
    await a.report(outcome)
    assert [ack.counted for ack in a.acks] == [True, True]
    async with world.grid.db.read() as tx:
        assert len(await submissions.submissions_of_round(tx, job_id, 0, 0)) == 1


async def test_a_node_cannot_report_for_another(world: World) -> None:
    job_id, a, b = await two_at_work(world)
    before = await states(world, job_id)
    await b.report(await b.outcome(a.only_task()))
    assert b.acks[-1].code == "task.not_held"
    assert await states(world, job_id) == before


async def test_a_task_that_does_not_exist_is_not_held(world: World) -> None:
    _, a, _ = await two_at_work(world)
    await a.report(Outcome("task_nothing", 1, "done"))
    assert a.acks[-1].code == "task.not_held"


async def test_a_result_with_anothers_signature_changes_nothing(world: World) -> None:
    job_id, a, b = await two_at_work(world)
    before = await states(world, job_id)
    await a.report(await a.outcome(a.only_task()), key=b.key)
    assert a.acks[-1].code == "node.key"
    assert await states(world, job_id) == before


async def test_who_comes_back_after_losing_a_lease_is_fenced(world: World) -> None:
    job_id, a, b = await two_at_work(world, rounds=RoundSpec(inner_steps=2, quorum=1.0), steps=2)
    lost = a.only_task()
    late = await a.outcome(lost)
    await finish_everything(world, b)
    await a.vanish()
    await world.advance(60, b)
    assert b.only_task().task_id == lost.task_id, "the free device takes over"
    await a.connect()
    assert [d.task_id for d in (a.register_ack.drop if a.register_ack else [])] == [lost.task_id]
    await a.report(late)
    assert a.acks[-1].code == "task.not_held"
    assert await world.run_job(job_id) == "completed"
    await assert_every_position_once(world, job_id)


async def test_a_late_result_is_superseded_and_its_samples_are_trained_again(
    world: World,
) -> None:
    rounds = RoundSpec(inner_steps=2, grace_max=20.0, staleness=0)
    job_id, a, b = await two_at_work(world, rounds=rounds)
    slow = b.only_task()
    late = await b.outcome(slow)
    await a.work("train")
    await world.advance(30, a, b)
    assert (await queries.show_job(world.grid, job_id)).version == 1
    assert slow.task_id in b.stopped
    await b.report(late)
    await world.settle()
    assert b.acks[-1].code == "task.superseded"
    assert (await states(world, job_id))[slow.task_id] == "superseded"
    assert await world.run_job(job_id) == "completed"
    trained = {p for r in await consumed(world, job_id) for p in range(r.start, r.stop)}
    assert {p for r in slow.samples for p in range(r.start, r.stop)} <= trained
    await assert_every_position_once(world, job_id)


async def test_a_node_that_stops_because_its_round_closed_has_not_failed(world: World) -> None:
    job_id, a, b = await two_at_work(world)
    slow = b.only_task()
    await a.work("train")
    await world.advance(30, a, b)
    await b.fail(slow, "task.cancelled", "stopped")
    await world.settle()
    assert (await states(world, job_id))[slow.task_id] == "cancelled"
    assert b.only_task().round == 1, "it takes part in the next round"


async def test_what_a_node_did_not_consume_goes_back_to_the_pool(world: World) -> None:
    job_id, a, b = await two_at_work(world)
    task = a.only_task()
    await a.report(await a.outcome(task, steps=1))
    await world.settle()
    async with world.grid.db.read() as tx:
        job = await jobs.get(tx, job_id)
        assert job is not None
        assert total(jobs.pool_of(job).returned) == 2
    await b.work("train")
    assert await world.run_job(job_id) == "completed"
    await assert_every_position_once(world, job_id)


def _spoil(outcome: Outcome, how: str) -> Outcome:
    samples = outcome.samples
    return {
        "another base": replace(outcome, base_hash="0" * 64),
        "too many tokens": replace(outcome, tokens=outcome.tokens + 1),
        "no steps": replace(outcome, steps=0, tokens=0, samples=()),
        "too many steps": replace(outcome, steps=99),
        "too few samples": replace(outcome, samples=samples[:0]),
        "others' samples": replace(
            outcome, samples=tuple(SampleRange(r.start + 100, r.stop + 100) for r in samples)
        ),
        "samples twice": replace(outcome, samples=(*samples, *samples)),
        "no delta": replace(outcome, delta=None),
        "an unknown delta": replace(outcome, delta=BlobRef("0" * 64, 10)),
    }[how]


@pytest.mark.parametrize(
    "how",
    [
        "another base",
        "too many tokens",
        "no steps",
        "too many steps",
        "too few samples",
        "others' samples",
        "samples twice",
        "no delta",
        "an unknown delta",
    ],
)
async def test_a_bad_submission_is_rejected_and_its_slot_goes_to_another(
    world: World, how: str
) -> None:
    job_id, a, b = await two_at_work(world)
    task = a.only_task()
    await finish_everything(world, b)
    await a.report(_spoil(await a.outcome(task), how))
    await world.settle()
    assert not a.acks[-1].counted
    found = await states(world, job_id)
    assert found[task.task_id] == "rejected"
    replacement = b.only_task()
    assert replacement.task_id != task.task_id
    assert total(replacement.samples) == total(task.samples)
    await assert_every_position_is_somewhere(world, job_id)


async def assert_every_position_is_somewhere(world: World, job_id: str) -> None:
    """Accepted, open and pooled positions are all positions, once each."""
    async with world.grid.db.read() as tx:
        job = await jobs.get(tx, job_id)
        assert job is not None
        pool = jobs.pool_of(job)
    tasks = (await queries.list_tasks(world.grid, job_id)).items
    alive = ("queued", "leased", "submitted", "verifying", "accepted")
    held = [r for t in tasks if t.phase == "train" and t.state in alive for r in t.samples]
    assert normalize([*held, *pool.returned]) == (SampleRange(0, pool.cursor),)


async def test_a_delta_with_infinities_is_rejected(world: World) -> None:
    _, a, b = await two_at_work(world, rounds=RoundSpec(inner_steps=2, codec_up="fp32"))
    task = a.only_task()
    honest = await a.outcome(task)
    assert honest.delta is not None
    # Bytes that no honest node would write: every value's exponent bits set.
    async with world.grid.blobs.local(honest.delta) as path:
        raw = bytearray(path.read_bytes())
    raw[-4:] = b"\x00\x00\x80\x7f"
    spoiled = await world.grid.blobs.put_bytes(bytes(raw))
    await a.report(replace(honest, delta=spoiled))
    await b.work("train")
    await world.settle()
    assert "NaN or infinity" in a.acks[-1].reason


async def test_the_primary_key_alone_lets_a_task_count_once(world: World) -> None:
    job_id, a, _ = await two_at_work(world)
    await a.work("train")
    await world.settle()
    async with world.grid.db.write() as tx:
        (row,) = await submissions.submissions_of_round(tx, job_id, 0, 0)
        values = {k: v for k, v in row._mapping.items() if k in table.c}
        assert not await submissions.add_submission(tx, **values)


@given(
    st.lists(st.integers(1, 5), min_size=1, max_size=6),
    st.data(),
)
def test_consumed_and_left_over_positions_make_the_whole(
    sizes: list[int], data: st.DataObject
) -> None:
    start, held = 0, []
    for size in sizes:
        start += data.draw(st.integers(0, 2))
        held.append(SampleRange(start, start + size))
        start += size
    positions = [p for r in held for p in range(r.start, r.stop)]
    used = data.draw(st.sets(st.sampled_from(positions)))
    consumed = tuple(SampleRange(p, p + 1) for p in used)
    left = without(tuple(held), consumed)
    assert sorted(used) == sorted(
        set(positions) - {p for r in left for p in range(r.start, r.stop)}
    )
    assert total(left) == len(positions) - len(used)
