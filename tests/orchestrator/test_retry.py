"""Trying again what has ended."""

from __future__ import annotations

import pytest

from distribai.core.ranges import normalize
from distribai.errors import Conflict, NotFound
from distribai.orchestrator.jobs import commands, queries
from distribai.orchestrator.jobs.retry import retry_job
from distribai.store.statements import jobs
from tests.orchestrator.harness import World


async def test_a_retry_goes_on_from_the_last_version_with_the_samples_that_are_left(
    any_world: World,
) -> None:
    world = any_world
    node = await world.node("one")
    job_id = await world.job(max_attempts=1)  # three rounds of two steps
    await node.next_training()
    await node.work("train")
    task = await node.next_training()
    assert task.round == 1
    await node.fail(task, "node.child", "bad luck")
    node.tasks.clear()
    await world.settle()
    old = await queries.show_job(world.grid, job_id)
    assert (old.state, old.version) == ("failed", 1)

    again = await retry_job(world.grid, job_id, "key", "tester")
    assert await retry_job(world.grid, job_id, "key", "tester") == again
    new = await queries.show_job(world.grid, again)
    assert (new.state, new.retry_of, new.rounds_total) == ("submitted", job_id, 2)
    (first,) = await queries.list_versions(world.grid, again)
    before = {v.version: v for v in await queries.list_versions(world.grid, job_id)}
    assert first.weights_hash == before[1].weights_hash
    await commands.accept_job(world.grid, again, "tester")
    assert await world.run_job(again) == "completed"
    consumed = [
        r
        for job in (job_id, again)
        for t in (await queries.list_tasks(world.grid, job)).items
        if t.phase == "train" and t.state == "accepted"
        for r in t.samples
    ]
    normalize(tuple(consumed))  # refuses overlaps: no sample was trained on twice
    (event, *_) = await queries.list_events(world.grid, again)
    assert event.data["retry_of"] == job_id


async def test_a_job_that_never_merged_is_retried_from_its_start(world: World) -> None:
    job_id = await world.job()
    await commands.cancel_job(world.grid, job_id, "", "tester")
    async with world.grid.db.write() as tx:
        await jobs.change(tx, job_id, organization_id="org_a", weight=2.0)
    again = await retry_job(world.grid, job_id, None, "tester")
    assert await retry_job(world.grid, job_id, None, "tester") != again, "no key: another one"
    old, new = [await queries.show_job(world.grid, j) for j in (job_id, again)]
    assert new.spec == old.spec
    async with world.grid.db.read() as tx:
        row = await jobs.get(tx, again)
    assert row is not None
    assert (row.organization_id, row.weight) == ("org_a", 2.0)


async def test_only_what_failed_or_was_cancelled_is_retried(world: World) -> None:
    with pytest.raises(NotFound):
        await retry_job(world.grid, "job_x", None, "tester")
    await world.node("one")
    job_id = await world.job()
    with pytest.raises(Conflict) as refused:
        await retry_job(world.grid, job_id, None, "tester")
    assert refused.value.code == "job.state"
    assert await world.run_job(job_id) == "completed"
    with pytest.raises(Conflict):
        await retry_job(world.grid, job_id, None, "tester")
