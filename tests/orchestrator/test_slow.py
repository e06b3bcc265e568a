"""Nodes whose downloads take longer than the rounds: they fetch ahead, and are given time."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from distribai.core.spec import RoundSpec
from distribai.core.why import CODES
from distribai.orchestrator.fleet import supplies
from distribai.orchestrator.fleet.why import why_node
from distribai.orchestrator.jobs import queries
from distribai.orchestrator.rounds.slow import MOST, SLOW, Slow, pause, slow_among, slow_devices
from distribai.store.statements import jobs
from tests.orchestrator.harness import FakeNode, World


@given(st.integers(0, 10_000))
def test_a_pause_grows_with_the_row_and_has_an_end(tasks: int) -> None:
    assert 0 <= pause(tasks) <= pause(tasks + 1) <= MOST
    assert (pause(tasks) == 0) == (tasks < SLOW)


@given(
    ended=st.lists(st.tuples(st.sampled_from("ab"), st.integers(0, 1), st.integers(0, 30))),
    delivered=st.dictionaries(
        st.tuples(st.sampled_from("ab"), st.integers(0, 1)), st.integers(0, 30)
    ),
)
def test_only_what_ended_since_a_device_has_delivered_counts(
    ended: list[tuple[str, int, int]], delivered: dict[tuple[str, int], int]
) -> None:
    found = slow_among(ended, delivered)
    for node in "ab":
        for device in (0, 1):
            last = delivered.get((node, device), -1)
            rounds = [r for n, d, r in ended if (n, d) == (node, device) and r > last]
            slow = found.get((node, device))
            if len(rounds) < SLOW:
                assert slow is None
            else:
                assert slow == Slow(len(rounds), max(rounds))
                assert slow.next > max(rounds) + 1


SHORT = RoundSpec(inner_steps=2, grace_min=2.0, grace_max=5.0)


async def pass_rounds(
    world: World, job_id: str, upto: int, quick: FakeNode, slow: FakeNode
) -> set[int]:
    """Until version ``upto`` is there, which ``quick`` alone works for; the rounds of which
    ``slow`` has had a task."""
    had: set[int] = set()
    for _ in range(20 * upto):
        await world.settle()
        had |= {t.round for t in slow.tasks.values() if t.phase == "train"}
        if (await queries.show_job(world.grid, job_id)).version >= upto:
            return had
        await quick.work()
        await world.advance(10, quick, slow)
        for task_id in slow.stopped:
            slow.tasks.pop(task_id, None)
        await slow.work("evaluate")
    raise AssertionError("the rounds do not go on")


async def state_of(world: World, job_id: str) -> dict[tuple[str, int], Slow]:
    async with world.grid.db.read() as tx:
        job = await jobs.get(tx, job_id)
        assert job is not None
        return await slow_devices(tx, job_id, job.version, SHORT.staleness)


async def test_who_never_gets_to_a_step_is_left_out_for_a_while_and_the_reason_is_said(
    any_world: World,
) -> None:
    world = any_world
    quick, slow = await world.node("quick"), await world.node("slow")
    job_id = await world.job(steps=60, rounds=SHORT)
    assert await pass_rounds(world, job_id, 8, quick, slow) == {0, 2, 5}
    await world.advance(10, quick, slow)
    assert await state_of(world, job_id) == {(slow.id, 0): Slow(3, 5)}

    why = await why_node(world.grid, slow.id)
    assert {r.code for r in why.reasons} <= set(CODES)
    assert "late" not in {r.code for r in why.reasons}
    (reason,) = [r for r in why.reasons if r.code == "slow"]
    assert "its last 3 tasks in a row" in reason.text
    assert "left out until round 11" in reason.text
    assert "rounds.inner_steps" in reason.hint

    # Meanwhile it may go on fetching, though no task of the job is in its hands.
    assert slow.tasks == {}
    async with world.grid.db.read() as tx:
        newest = (await jobs.latest_versions(tx, job_id, 8, 1))[0]
    assert await supplies.may_fetch(world.grid, slow.id, newest.update_sha, job_id)

    assert await pass_rounds(world, job_id, 10, quick, slow) == {10}
    await slow.work("train")  # what it hands in ends the row
    await world.settle()
    assert await state_of(world, job_id) == {}
    assert "slow" not in {r.code for r in (await why_node(world.grid, slow.id)).reasons}


async def test_a_slow_node_is_not_left_out_of_a_round_that_cannot_do_without_it(
    world: World,
) -> None:
    quick, slow = await world.node("quick"), await world.node("slow")
    job_id = await world.job(steps=60, rounds=SHORT)
    await pass_rounds(world, job_id, 7, quick, slow)
    assert (await state_of(world, job_id))[slow.id, 0].next > 7
    await quick.vanish()
    await world.advance(world.grid.settings.liveness.offline_s + 30, slow)
    assert (await slow.next_training()).round == 7
