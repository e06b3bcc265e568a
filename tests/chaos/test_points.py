"""Killed anywhere, the orchestrator loses nothing: the job completes with the very same bits.

A few points, drawn by a seed, in every run of the suite; all of them with ``make chaos``
(``CHAOS=all``). ``CHAOS_SEED`` draws others.
"""

from __future__ import annotations

import logging
import os
import statistics
from pathlib import Path

import pytest
import structlog

from distribai.testing.faults import choose, read_record
from tests.chaos.scenario import Case, When, make_keys, play, play_all

EVERYTHING = os.environ.get("CHAOS") == "all"
SEED = int(os.environ.get("CHAOS_SEED", "1"))
FEW = 5

pytestmark = pytest.mark.e2e


@pytest.fixture(autouse=True)
def quiet_nodes() -> object:
    """The nodes run in this process: only what is wrong with them is worth reading."""
    structlog.configure(wrapper_class=structlog.make_filtering_bound_logger(logging.ERROR))
    yield
    structlog.reset_defaults()


async def test_killed_at_any_point_the_orchestrator_goes_on_to_the_same_bits(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    keys = make_keys(tmp_path / "keys")
    whens: tuple[When, ...] = ("first start", "restart") if EVERYTHING else ("first start",)
    cases: list[Case] = []
    calm: list[str] = []
    for when in whens:
        undisturbed = await play(tmp_path / when, keys, Case(when))
        assert not undisturbed.problems, undisturbed.problems
        assert not undisturbed.killed
        assert calm in ([], undisturbed.weights), "a restart alone changes no bit"
        calm = undisturbed.weights
        reached = read_record(tmp_path / when / "points.txt")
        assert len(reached) >= 30, "points have got lost"
        # A busy machine reaches a repeated one less often: only the first half of the times.
        often = {point: (times + 1) // 2 for point, times in reached.items()}
        cases += [Case(when, hit) for hit in choose(often, SEED, None if EVERYTHING else FEW)]

    results = await play_all(tmp_path / "cases", keys, cases)

    failures = []
    for result in results:
        if not result.killed:
            result.problems.append("the point was never reached")
        if not result.problems and result.weights != calm:
            result.problems.append("the weights are other ones than undisturbed")
        if result.problems:
            failures.append(f"{result.case}: {'; '.join(result.problems)}")
    seconds = statistics.median(r.seconds for r in results)
    with capsys.disabled():
        print(
            f"\nkilled at {sum(r.killed for r in results)} of {len(cases)} points (seed {SEED}), "
            f"{len(failures)} failures, {seconds:.1f} s each (median)"
        )
    assert not failures, "\n".join(failures)
