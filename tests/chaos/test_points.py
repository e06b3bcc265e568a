"""Killed anywhere, the orchestrator loses nothing: the job completes with the very same bits.

A few points, drawn by a seed, in every run of the suite; all of them with ``make chaos``
(``CHAOS=all``). ``CHAOS_SEED`` draws others.
"""

from __future__ import annotations

import itertools
import logging
import os
import statistics
from collections.abc import Iterator, Mapping
from pathlib import Path

import pytest
import structlog

from distribai.testing.faults import choose, read_record
from tests.chaos import replicas, storm
from tests.chaos.scenario import Case, Result, When, make_keys, play, play_all
from tests.e2e.harness import EVERYTHING

SEED = int(os.environ.get("CHAOS_SEED", "1"))
FEW = 2

pytestmark = pytest.mark.e2e


@pytest.fixture(autouse=True)
def quiet_nodes() -> Iterator[None]:
    """The nodes run in this process: only what is wrong with them is worth reading."""
    before = structlog.get_config()
    structlog.configure(wrapper_class=structlog.make_filtering_bound_logger(logging.ERROR))
    yield
    structlog.configure(**before)


async def test_killed_at_any_point_the_orchestrator_goes_on_to_the_same_bits(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    keys = make_keys(tmp_path / "keys")
    calm, reached = await undisturbed(tmp_path, keys, "first start")
    assert len(reached) >= 30, "points have got lost"
    named = {*storm.POINTS, *replicas.POINTS} - {"blob.upload.s3.after"}  # these blobs are files
    assert named <= reached.keys(), "a storm names a point that is none any more"
    cases = plan("first start", reached, None if EVERYTHING else FEW)
    if EVERYTHING:
        # Starting on a running job is another matter than starting an empty grid; what follows
        # once the nodes are back is not.
        again, reached = await undisturbed(tmp_path, keys, "restart")
        assert again == calm, "a restart alone changes no bit"
        start = itertools.takewhile(lambda point: "registration" not in point, reached)
        cases += plan("restart", {point: reached[point] for point in start}, None)

    def tell(result: Result) -> None:
        if EVERYTHING:
            with capsys.disabled():
                print(f"{result.case}: {'; '.join(result.problems) or 'well'}", flush=True)

    results = await play_all(tmp_path / "cases", keys, cases, calm, tell)

    failures = [f"{r.case}: {'; '.join(r.problems)}" for r in results if r.problems]
    seconds = statistics.median(r.seconds for r in results)
    with capsys.disabled():
        print(
            f"\nkilled at {sum(r.killed for r in results)} of {len(cases)} points (seed {SEED}), "
            f"{len(failures)} failures, {seconds:.1f} s each (median)"
        )
    assert not failures, "\n".join(failures)


async def undisturbed(root: Path, keys: Path, when: When) -> tuple[list[str], Mapping[str, int]]:
    """The hashes of all versions, and the points that were reached, in their order."""
    result = await play(root / when, keys, Case(when))
    assert not result.problems, result.problems
    assert not result.killed
    return result.weights, read_record(root / when / "points.txt")


def plan(when: When, reached: Mapping[str, int], count: int | None) -> list[Case]:
    """A busy machine reaches a repeated point less often: only the first half of the times."""
    often = {point: (times + 1) // 2 for point, times in reached.items()}
    return [Case(when, hit) for hit in choose(often, SEED, count)]
