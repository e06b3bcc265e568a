"""A torn, flipped or lost file is found by its hash and named; no model is made of it."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable
from pathlib import Path

import pytest
from sqlalchemy import text

from distribai.core.spec import RoundSpec
from distribai.core.tasks import Assignment
from distribai.orchestrator.jobs import commands, queries
from distribai.store.blobs import blob_key
from distribai.testing.audit import audit
from tests.orchestrator.harness import FakeNode, World
from tests.store.databases import new_sqlite


def flip(path: Path) -> None:
    data = bytearray(path.read_bytes())
    data[-5] ^= 1
    path.write_bytes(data)


def tear(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-100])


DAMAGE: dict[str, Callable[[Path], None]] = {"flipped": flip, "torn": tear, "gone": Path.unlink}

WHOSE = {
    "weights": "SELECT weights_sha FROM versions WHERE version = 1",
    "momentum": "SELECT outer_sha FROM versions WHERE version = 1",
    "residual": "SELECT residual_sha FROM versions WHERE version = 1",
    "delta": "SELECT delta_sha FROM submissions WHERE round = 1 AND phase = 'train'",
}


@pytest.fixture
async def world(tmp_path: Path) -> AsyncIterator[World]:
    made = await World(tmp_path, await new_sqlite(tmp_path)).open()
    yield made
    await made.close()


async def at_the_second_merge(world: World) -> tuple[str, FakeNode, Assignment]:
    """A job at version 1 whose round has one submission; who brings the other, and its task."""
    a, b = await world.node("a"), await world.node("b")
    rounds = RoundSpec(inner_steps=2, quorum=1.0, codec_up="int4", codec_down="int4")
    job_id = await world.job(rounds=rounds)
    for node in (a, b, a):
        await node.report(await node.outcome(await node.next_training()))
    return job_id, b, await b.next_training()


@pytest.mark.parametrize("how", DAMAGE)
@pytest.mark.parametrize("what", WHOSE)
async def test_a_damaged_file_is_named_and_put_back_the_job_goes_on_to_the_same_bits(
    world: World, what: str, how: str
) -> None:
    job_id, b, task = await at_the_second_merge(world)
    async with world.grid.db.read() as tx:
        sha256 = str(await tx.scalar(text(WHOSE[what])))
    path = world.root / "blobs" / blob_key(sha256)
    whole = path.read_bytes()
    outcome = await b.outcome(task)
    DAMAGE[how](path)

    await b.report(outcome)
    await world.settle()
    job = await queries.show_job(world.grid, job_id)
    assert (job.state, job.version) == ("paused", 1), "no version comes of it"
    assert sha256[:12] in job.reason

    path.write_bytes(whole)
    await commands.resume_job(world.grid, job_id, "tester")
    assert await world.run_job(job_id) == "completed"
    found = audit(world.root, job_id)
    assert found.ok, found.problems
    assert found.rounds == 3


async def test_a_delta_that_is_damaged_before_it_was_judged_costs_that_submission_alone(
    world: World,
) -> None:
    job_id, b, task = await at_the_second_merge(world)
    outcome = await b.outcome(task)
    assert outcome.delta is not None
    flip(world.root / "blobs" / blob_key(outcome.delta.sha256))
    await b.report(outcome)
    await world.settle()
    states = {t.id: t for t in (await queries.list_tasks(world.grid, job_id)).items}
    assert states[task.task_id].state == "rejected"
    assert outcome.delta.sha256[:12] in states[task.task_id].reason
    assert await world.run_job(job_id) == "completed"
    found = audit(world.root, job_id)
    assert found.ok, found.problems


@pytest.mark.parametrize("what", WHOSE)
async def test_the_audit_names_a_damaged_file(world: World, what: str) -> None:
    job_id, _, _ = await at_the_second_merge(world)
    assert await world.run_job(job_id) == "completed"
    assert audit(world.root, job_id).ok
    async with world.grid.db.read() as tx:
        sha256 = str(await tx.scalar(text(WHOSE[what])))
    flip(world.root / "blobs" / blob_key(sha256))
    found = audit(world.root, job_id)
    assert any(sha256[:12] in problem for problem in found.problems), found.problems
