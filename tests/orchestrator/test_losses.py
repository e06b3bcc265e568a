from __future__ import annotations

from pathlib import Path

from distribai.core.spec import RoundSpec
from distribai.orchestrator.jobs import commands, queries
from distribai.orchestrator.rounds.tasks import LOST_LEASES_PER_ATTEMPT, rest_s
from distribai.store.statements import jobs
from distribai.wire.channel import Channel
from tests.orchestrator.harness import FakeNode, FakeTime, World
from tests.orchestrator.test_exactly_once import finish_everything
from tests.orchestrator.test_whole_job import assert_every_position_once
from tests.store.databases import new_postgres

PATIENT = RoundSpec(inner_steps=2, quorum=1.0)
LONGER_THAN_ALL_RESTS_S = rest_s(LOST_LEASES_PER_ATTEMPT)


async def test_a_lost_nodes_slot_goes_to_another_and_the_round_is_whole(world: World) -> None:
    a, b, c = [await world.node(n) for n in "abc"]
    job_id = await world.job(rounds=PATIENT, steps=2)
    await world.settle()
    lost = a.only_task()
    await a.vanish()
    await finish_everything(world, b)
    await finish_everything(world, c)
    await world.advance(60, b, c)
    (taker,) = [n for n in (b, c) if lost.task_id in n.tasks]
    assert taker.tasks[lost.task_id].attempt == 2
    assert taker.tasks[lost.task_id].samples == lost.samples
    assert await world.run_job(job_id) == "completed"
    rounds = await queries.list_rounds(world.grid, job_id)
    assert rounds[0].accepted == 3
    await assert_every_position_once(world, job_id)


async def test_after_quorum_a_slot_that_nobody_can_finish_in_time_goes_to_the_pool(
    world: World,
) -> None:
    a, b = await world.node("a"), await world.node("b")
    slow = RoundSpec(inner_steps=2, grace_min=1.0, grace_max=1.5)
    job_id = await world.job(rounds=slow)
    await world.settle()
    # The first round says how fast they are: two seconds a task, longer than any grace.
    for _ in range(2):
        world.time.now += 2.0
        await a.work()
        await b.work()
        await world.settle()
        await a.work("evaluate")
        await b.work("evaluate")
        await world.settle()
        if a.tasks and a.only_task().round == 1:
            break
    lost = a.only_task()
    world.time.now += 2.0
    await b.work("train")
    a.tasks.clear()
    await a.heartbeat(intent="drain")
    await world.settle()
    tasks = {t.id: t for t in (await queries.list_tasks(world.grid, job_id)).items}
    assert tasks[lost.task_id].state == "cancelled"
    await a.heartbeat(intent="contribute")
    assert await world.run_job(job_id) == "completed"
    await assert_every_position_once(world, job_id)


async def test_a_newcomer_gets_a_share_of_the_round_that_is_open(world: World) -> None:
    a = await world.node("a")
    job_id = await world.job()
    await world.settle()
    newcomer = await world.node("b")
    task = await newcomer.next_training()
    assert (task.round, task.env["RANK"], task.env["WORLD_SIZE"]) == (0, "1", "2")
    await newcomer.work("train")
    await world.settle()
    assert [t for t in newcomer.tasks.values() if t.phase == "train"] == [], "one is enough"
    await a.work("train")
    await world.settle()
    (first, *_) = await queries.list_rounds(world.grid, job_id)
    assert (first.state, len(first.members), first.accepted) == ("merged", 2, 2)
    assert await world.run_job(job_id) == "completed"
    await assert_every_position_once(world, job_id)


async def test_a_newcomer_waits_for_the_next_version_once_the_quorum_is_reached(
    world: World,
) -> None:
    a, b = await world.node("a"), await world.node("b")
    await world.job()
    await world.settle()
    await a.work("train")
    await world.settle()
    newcomer = await world.node("c")
    await world.settle()
    assert [t for t in newcomer.tasks.values() if t.phase == "train"] == []
    await b.work("train")
    assert (await newcomer.next_training()).round == 1


async def test_nodes_are_told_of_new_versions_with_the_way_to_get_them(world: World) -> None:
    a = await world.node("a")
    job_id = await world.job()
    await world.settle()
    assert a.only_task().base.snapshot is None, "version 0 is made from the seed"
    await world.run_job(job_id)
    assert [c.version for c in a.completed][-1] == 3
    assert a.completed[-1].job_done
    weights = a.completed[0].weights
    assert [u.version for u in weights.updates] == [1]
    assert weights.snapshot.sha256
    versions = await queries.list_versions(world.grid, job_id)
    assert weights.weights_hash == versions[1].weights_hash


async def test_a_node_that_rests_is_told_of_no_versions_but_that_the_job_has_ended(
    world: World,
) -> None:
    a, b = await world.node("a"), await world.node("b")
    job_id = await world.job(steps=60)
    await world.settle()
    await b.heartbeat("pause")
    for node in (a, b):
        await node.work()
    version = 0
    while version < 3:
        await world.advance(10, a, b)
        await a.work()
        version = (await queries.show_job(world.grid, job_id)).version
    assert b.completed == []
    await b.heartbeat("contribute")
    while not any(t.phase == "train" for t in b.tasks.values()):
        await a.work()
        await b.work("evaluate")
        await world.advance(10, a, b)
    assert b.only_task().base.version >= version, "its task tells of the newest"
    await b.heartbeat("pause")
    await commands.cancel_job(world.grid, job_id, "enough", "tester")
    await world.settle()
    assert b.completed[-1].job_done


async def test_a_restart_in_the_middle_of_a_round_loses_nothing(any_world: World) -> None:
    world = any_world
    a, b = await world.node("a"), await world.node("b")
    job_id = await world.job(rounds=PATIENT)
    await world.settle()
    await a.work("train")
    in_hand = b.only_task()
    again = await world.restart()
    try:
        for node in (a, b):
            node.world = again
            again.nodes.append(node)
        await again.advance(40)
        await b.connect()
        assert b.register_ack is not None
        assert not b.register_ack.resumed
        assert [k.task_id for k in b.register_ack.keep] == [in_hand.task_id]
        await a.connect()
        assert [n.only_task().attempt for n in (b,)] == [1], "the lease went on"
        assert await again.run_job(job_id) == "completed"
        record = await queries.show_job(again.grid, job_id)
        assert record.version == 3
        await assert_every_position_once(again, job_id)
    finally:
        await again.close()
        await again.grid.db.close()


async def test_a_daemon_that_comes_back_without_its_task_frees_it_at_once(world: World) -> None:
    a = await world.node("a")
    await world.job()
    await world.settle()
    lost = a.only_task()
    await a.vanish()
    a.tasks.clear()
    a.session = ""
    a.channel.renumber()
    await a.connect()
    await world.settle()
    again = a.only_task()
    assert (again.task_id, again.attempt) == (lost.task_id, 2)


async def test_a_round_that_everybody_left_opens_again_with_whoever_comes(world: World) -> None:
    a, b = await world.node("a"), await world.node("b")
    job_id = await world.job(steps=2)
    await world.settle()
    for node in (a, b):
        await node.vanish()
        node.tasks.clear()
    await world.advance(70)
    rounds = await queries.list_rounds(world.grid, job_id)
    assert [(r.number, r.take, r.state) for r in rounds] == [(0, 0, "abandoned")]
    async with world.grid.db.read() as tx:
        version = await jobs.version(tx, job_id, 0)
    assert version is not None
    assert version.outer_sha == ""
    a.session = ""
    a.channel.renumber()
    await a.connect()
    assert await world.run_job(job_id) == "completed"
    rounds = await queries.list_rounds(world.grid, job_id)
    assert (rounds[1].number, rounds[1].take, len(rounds[1].members)) == (0, 1, 1)
    await assert_every_position_once(world, job_id)


async def test_a_merge_that_was_cut_off_is_done_again_to_the_same_bytes(world: World) -> None:
    from distribai.core.states import RoundState
    from distribai.orchestrator.rounds import computing, merging
    from distribai.store.statements import work

    a = await world.node("a")
    job_id = await world.job()
    await world.settle()
    await a.work("train")
    await world.duties.verify()
    # The process dies after the freeze: the round is closing and nothing was published.
    async with world.grid.db.read() as tx:
        row = await work.get_round(tx, job_id, 0, 0)
    assert row is not None
    assert await merging._decide(world.grid, row)
    inputs = await computing.read_inputs(world.grid, row)
    scratch = world.grid.scratch / "first"
    scratch.mkdir()
    first = await computing.compute(world.grid, row, inputs, scratch)
    async with world.grid.db.read() as tx:
        row = await work.get_round(tx, job_id, 0, 0)
    assert row is not None
    assert row.state == RoundState.CLOSING
    await world.settle()
    versions = await queries.list_versions(world.grid, job_id)
    assert versions[1].weights_hash == first.weights_hash
    assert versions[1].weights == first.theta


async def test_no_lease_expires_for_a_while_after_a_start(world: World) -> None:
    a = await world.node("a")
    await world.job()
    await world.settle()
    await world.advance(45)
    again = await world.restart()
    try:
        await again.advance(50)
        a.world = again
        again.nodes.append(a)
        await a.connect()
        assert a.only_task().attempt == 1
    finally:
        await again.close()


async def test_a_paused_job_merges_what_it_has_and_opens_nothing_new(world: World) -> None:
    a = await world.node("a")
    job_id = await world.job()
    await world.settle()
    await commands.pause_job(world.grid, job_id, "tester")
    await a.work("train")
    await world.settle()
    record = await queries.show_job(world.grid, job_id)
    assert (record.version, record.state) == (1, "paused")
    assert [t for t in a.tasks.values() if t.phase == "train"] == []
    await commands.resume_job(world.grid, job_id, "tester")
    assert await world.run_job(job_id) == "completed"


async def test_two_jobs_take_turns(world: World) -> None:
    await world.node("a")
    first = await world.job(name="first", steps=4)
    second = await world.job(name="second", steps=4)
    assert await world.run_job(first) == "completed"
    assert (await queries.show_job(world.grid, second)).version >= 1
    assert await world.run_job(second) == "completed"


async def test_two_devices_of_a_node_are_two_members(world: World) -> None:
    await world.node("a", devices=2)
    job_id = await world.job(steps=4)
    assert await world.run_job(job_id) == "completed"
    rounds = await queries.list_rounds(world.grid, job_id)
    assert [r.accepted for r in rounds] == [2, 2]


async def test_two_replicas_share_the_work_and_each_tells_its_own_nodes(
    tmp_path: Path, postgres: str
) -> None:
    url, time = await new_postgres(postgres), FakeTime()
    first = await World(tmp_path, url, time).open()
    second = await World(tmp_path, url, time, seed=7).open()
    try:
        a, b = await first.node("a"), await second.node("b")
        job_id = await first.job()
        for _ in range(30):
            await first.settle()  # holds the duties: it leases, judges and merges for both
            await second.settle()
            if (await queries.show_job(first.grid, job_id)).state == "completed":
                break
            for node in (a, b):
                await node.work()
        assert (await queries.show_job(second.grid, job_id)).state == "completed"
        assert all(ack.counted for node in (a, b) for ack in node.acks)
        assert len(b.acks) >= 3
        assert b.completed[-1].job_done
        # The first replica dies: the second takes its duties over when their leases end.
        await a.vanish()
        again = await second.job(name="again")
        await second.settle()
        assert b.tasks == {}
        await second.advance(40, b)
        assert b.only_task().job_id == again
    finally:
        await first.close()
        await second.close()


async def test_a_key_that_comes_back_at_another_replica_is_fenced_here(
    tmp_path: Path, postgres: str
) -> None:
    url, time = await new_postgres(postgres), FakeTime()
    first = await World(tmp_path, url, time).open()
    second = await World(tmp_path, url, time, seed=7).open()
    try:
        a = await first.node("a")
        twin = FakeNode(second, "a", key=a.key)
        second.nodes.append(twin)
        await twin.connect()
        await a.heartbeat()
        await first.settle()
        assert a.end is not None
        assert a.end.code == "node.fenced"
        assert twin.end is None
    finally:
        await first.close()
        await second.close()


async def test_a_node_that_keeps_coming_back_without_its_task_harms_nobody(world: World) -> None:
    strange, good = await world.node("strange"), await world.node("good")
    job_id = await world.job(rounds=PATIENT, steps=2, max_attempts=1)
    await world.settle()
    task = strange.only_task()
    for _ in range(LOST_LEASES_PER_ATTEMPT + 2):
        await comes_back_empty(world, strange)
    assert task.task_id not in strange.tasks, "it has let this one go twice, and has to wait"
    await finish_everything(world, good)
    assert task.task_id in {ack.task_id for ack in good.acks if ack.counted}
    assert await world.run_job(job_id) == "completed"
    await assert_every_position_once(world, job_id)


async def test_alone_it_gets_its_task_again_after_a_rest_and_the_job_goes_on(world: World) -> None:
    strange = await world.node("strange")
    job_id = await world.job(rounds=PATIENT, steps=2, max_attempts=1)
    await world.settle()
    task, attempt = strange.only_task(), 1
    while attempt <= LOST_LEASES_PER_ATTEMPT:
        await comes_back_empty(world, strange)
        await world.advance(LONGER_THAN_ALL_RESTS_S, strange)
        attempt = await attempts_of(world, job_id, task.task_id)
    assert await world.run_job(job_id) == "completed"


async def test_nodes_that_never_heard_of_their_slots_get_their_own_again(world: World) -> None:
    """As after an orchestrator that died between the leases and the messages."""
    a, b = await world.node("a"), await world.node("b")
    await world.job(rounds=PATIENT, steps=2)
    await world.settle()
    before = {node.name: node.only_task().task_id for node in (a, b)}
    for node in (a, b):
        await node.vanish()
    for node in (b, a):
        node.tasks.clear()
        node.session, node.channel = "", Channel()
        await node.connect()
    await world.settle()
    assert {node.name: node.only_task().task_id for node in (a, b)} == before


async def attempts_of(world: World, job_id: str, task_id: str) -> int:
    (found,) = [t for t in (await queries.list_tasks(world.grid, job_id)).items if t.id == task_id]
    return found.attempt


async def comes_back_empty(world: World, node: FakeNode) -> None:
    """A new session of a node that remembers nothing."""
    await node.vanish()
    node.tasks.clear()
    node.session, node.channel = "", Channel()
    await node.connect()
    await world.settle()
