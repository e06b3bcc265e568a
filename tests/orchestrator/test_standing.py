"""Standing and orders of nodes."""

from __future__ import annotations

import pytest

from distribai.core.standing import QUARANTINE_JOBS, WINDOW_S
from distribai.errors import Conflict, NotAllowed, NotFound
from distribai.orchestrator import callers
from distribai.orchestrator.fleet import standing
from distribai.orchestrator.fleet.queries import node_state
from distribai.orchestrator.fleet.why import node_events, why_node
from distribai.orchestrator.jobs import commands, queries
from distribai.store.statements import fleet
from tests.orchestrator.harness import FakeNode, World, breathe


async def fail_a_job(world: World, bad: FakeNode, good: FakeNode, number: int) -> None:
    """A job in which one node fails and the other does the work."""
    job_id = await world.job(await world.spec(name=f"job{number}", workers_min=2))
    task = await bad.next_training()
    await bad.fail(task, "node.child", f"cause {number}")
    bad.tasks.pop(task.task_id, None)
    for _ in range(4):
        await world.settle()
        world.time.now += 1.0
        await good.work()
    await commands.cancel_job(world.grid, job_id, "", "tester")
    await world.settle()
    bad.tasks.clear()


async def test_a_node_that_fails_what_others_can_is_quarantined(any_world: World) -> None:
    world = any_world
    bad, good = await world.node("bad"), await world.node("good")
    for number in range(QUARANTINE_JOBS):
        assert (await node_state(world.grid, bad.id)).standing == "trusted"
        await fail_a_job(world, bad, good, number)
    await world.settle()
    state = await node_state(world.grid, bad.id)
    assert state.standing == "quarantined"
    assert "cause 0 [node.child]; cause 1 [node.child]; cause 2" in state.standing_reason
    assert (await node_state(world.grid, good.id)).standing == "trusted"
    events = await node_events(world.grid, bad.id)
    (told,) = [e for e in events if e.kind == "node.quarantined"]
    assert told.data["by"] == "the grid"
    (why,) = [r for r in (await why_node(world.grid, bad.id)).reasons if r.code == "quarantined"]
    assert "cause 1" in why.text
    assert "pardon" in why.hint
    assert bad.end is not None
    assert (bad.end.code, bad.end.retry) == ("node.quarantined", True)
    await bad.connect()
    assert bad.end is not None, "it knocks in vain"

    await standing.set_standing(world.grid, bad.id, "pardon", "new memory", "tester")
    await standing.set_standing(world.grid, bad.id, "pardon", "new memory", "tester")
    await bad.connect()
    assert bad.end is None
    await world.settle()
    assert (await node_state(world.grid, bad.id)).standing == "probation", "the past is forgotten"


async def test_jobs_that_fail_everywhere_and_old_failures_blame_nobody(world: World) -> None:
    only = await world.node("only")
    for number in range(QUARANTINE_JOBS + 1):
        await world.job(await world.spec(name=f"broken{number}", max_attempts=1))
        task = await only.next_training()
        await only.fail(task, "internal.fault", "a bad recipe")
        only.tasks.clear()
        await world.settle()
    assert (await node_state(world.grid, only.id)).standing == "trusted"
    async with world.grid.db.read() as tx:
        assert len(await fleet.failures_since(tx, 0.0, only.id)) == QUARANTINE_JOBS + 1
    world.time.now += 3 * WINDOW_S
    await standing.judge(world.grid)
    async with world.grid.db.read() as tx:
        assert not await fleet.failures_since(tx, 0.0, only.id)


async def test_a_task_that_kills_several_nodes_fails_its_job_with_their_causes(
    any_world: World,
) -> None:
    world = any_world
    nodes = [await world.node(f"n{i}") for i in range(3)]
    job_id = await world.job(max_attempts=3, workers_max=1)
    seen: set[str] = set()
    for turn in range(3):
        await world.settle()
        for _ in range(5):
            for node in nodes:
                await node.work("evaluate")
            await world.settle()
        (victim,) = [n for n in nodes if any(t.phase == "train" for t in n.tasks.values())]
        seen.add(victim.id)
        task = victim.only_task()
        await victim.fail(task, "node.memory", f"killed {turn}")
        victim.tasks.pop(task.task_id, None)
    await world.settle()
    record = await queries.show_job(world.grid, job_id)
    assert record.state == "failed"
    assert len(seen) == 3, "never straight back to a node that it has just killed"
    for turn, node in enumerate(sorted(seen)):
        assert node in record.reason
        assert f"killed {turn} [node.memory]" in record.reason


async def test_a_banned_node_cannot_register_and_a_ban_ends_by_a_pardon_only(
    any_world: World,
) -> None:
    world = any_world
    node = await world.node("bad")
    job_id = await world.job()
    held = await node.next_training()
    await standing.set_standing(world.grid, node.id, "ban", "it lies", "tester")
    tasks = {t.id: t for t in (await queries.list_tasks(world.grid, job_id)).items}
    assert tasks[held.task_id].state == "queued"
    with pytest.raises(NotAllowed):
        await callers.verify_token(world.grid, node.token)
    await breathe()
    assert node.end is not None
    assert (node.end.code, node.end.retry) == ("node.banned", False)
    await node.connect()
    assert node.end is not None
    assert "it lies" in node.end.message
    with pytest.raises(Conflict) as refused:
        await standing.set_standing(world.grid, node.id, "trust", "sorry", "tester")
    assert refused.value.code == "node.standing"
    await standing.set_standing(world.grid, node.id, "pardon", "sorry", "tester")
    await standing.set_standing(world.grid, node.id, "trust", "sorry", "tester")
    await node.connect()
    assert node.end is None
    assert (await node_state(world.grid, node.id)).standing == "trusted"


async def test_an_order_reaches_the_node_and_keeps_work_away_at_once(any_world: World) -> None:
    world = any_world
    node = await world.node("one")
    await standing.order(world.grid, node.id, "pause", "tester")
    await standing.order(world.grid, node.id, "pause", "tester")
    await world.job()
    await world.settle()
    assert node.orders == ["pause"], "told once"
    assert not node.tasks
    (why,) = (await why_node(world.grid, node.id)).reasons
    assert (why.code, why.text) == ("paused", "The operator has paused it.")
    await node.heartbeat("pause")  # it obeys, and tells so
    await node.vanish()
    node.session = ""
    await node.connect()  # its daemon was restarted, and knows nothing of the order
    await world.settle()
    assert node.orders == ["pause", "pause"]
    await standing.order(world.grid, node.id, "resume", "tester")
    await world.settle()
    assert node.orders[-1] == "resume"
    await node.heartbeat("contribute")
    assert await node.next_training()
    kinds = [e.kind for e in await node_events(world.grid, node.id)]
    assert [k for k in kinds if k in ("node.paused", "node.resumed")] == [
        "node.paused",
        "node.resumed",
    ]


async def test_a_node_that_missed_the_end_of_a_pause_is_told_again(world: World) -> None:
    node = await world.node("one")
    await node.heartbeat("pause")
    await node.vanish()
    node.session = ""
    await node.connect()
    await world.settle()
    assert node.orders == ["resume"], "harmless to one that its owner paused"


async def test_a_drained_node_is_welcome_again(any_world: World) -> None:
    world = any_world
    node = await world.node("one")
    await standing.order(world.grid, node.id, "drain", "tester")
    await world.settle()
    assert node.orders == ["drain"]
    await node.heartbeat("drain")
    await node.leave()
    await world.settle()
    state = await node_state(world.grid, node.id)
    assert (state.liveness, state.ordered) == ("offline", "contribute")
    with pytest.raises(Conflict):
        await standing.order(world.grid, node.id, "drain", "tester")
    node.intent = "contribute"
    node.session = ""
    await node.connect()
    await world.job()
    assert await node.next_training()


async def test_verbs_about_a_node_that_never_was_say_so(world: World) -> None:
    for verb in standing.VERBS:
        with pytest.raises(NotFound, match="There is no node"):
            await standing.set_standing(world.grid, "node_x", verb, "", "tester")
    for verb in standing.ORDERS:
        with pytest.raises(NotFound, match="There is no node"):
            await standing.order(world.grid, "node_x", verb, "tester")
