"""Either protection alone lets work count once; without both the audit finds it counted twice."""

from __future__ import annotations

from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from distribai.core.spec import RoundSpec
from distribai.orchestrator import main as orchestrator
from distribai.orchestrator.rounds import results
from distribai.store.statements import submissions
from distribai.testing import sabotage
from distribai.testing.audit import audit
from tests.orchestrator.harness import World
from tests.store.databases import new_sqlite


@pytest.fixture
async def world(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[World]:
    """A grid whose protections are put back afterwards."""
    for room, name in (
        (results, "_take"),
        (submissions, "add_submission"),
        (submissions, "has_submission"),
        (orchestrator, "migrate"),
    ):
        monkeypatch.setattr(room, name, getattr(room, name))
    made = await World(tmp_path, await new_sqlite(tmp_path)).open()
    yield made
    await made.close()


async def run(world: World, without: tuple[str, ...], *, at_once: bool = True) -> str:
    """A job whose node reports everything again, as one does that has lost the answer: right away
    and after the round has merged, or only then. The job's id."""
    for name in without:
        sabotage.remove(name)
    if "submission-key" in without:
        await sabotage.drop_submission_key(world.grid.db)
    a, b = await world.node("a"), await world.node("b")
    job_id = await world.job(rounds=RoundSpec(inner_steps=2, quorum=1.0))
    for _ in range(10):
        await world.settle()
        outcomes = [await a.outcome(task) for task in list(a.tasks.values())]
        for outcome in outcomes:
            await a.report(outcome)
            await world.settle()
            if at_once:
                await a.report(outcome)
                await world.settle()
        await b.work()
        await world.settle()
        for outcome in outcomes:
            await a.report(outcome)
        await world.settle()
    assert await world.run_job(job_id) == "completed"
    return job_id


@pytest.mark.parametrize("without", [(), ("fence",), ("submission-key",)])
async def test_either_protection_alone_lets_work_count_once(
    world: World, without: tuple[str, ...]
) -> None:
    found = audit(world.root, await run(world, without))
    assert found.ok, found.problems
    assert found.rounds == 3


async def test_without_both_work_counts_twice_and_the_audit_says_so(world: World) -> None:
    found = audit(world.root, await run(world, ("fence", "submission-key"), at_once=False))
    assert any("consumed twice" in problem for problem in found.problems), found.problems


async def test_without_both_even_then_no_merge_takes_one_task_twice(world: World) -> None:
    with pytest.raises(ValueError, match="exactly one delta"):
        await run(world, ("fence", "submission-key"))


def test_a_protection_that_does_not_exist_is_refused() -> None:
    with pytest.raises(ValueError, match="fence"):
        sabotage.remove("seat belt")
