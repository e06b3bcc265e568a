"""Everything goes wrong at random, and the job ends as if nothing had been.

``CHAOS=all`` (``make chaos``) makes the storms longer and more; ``CHAOS_SEED`` draws others.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path

import pytest

from tests.chaos.storm import ROUNDS, OrchestratorEnded, Storm, Verdict
from tests.e2e.harness import EVERYTHING

SEED = int(os.environ.get("CHAOS_SEED", "1"))
BLOWS = 40 if EVERYTHING else 12

NOISE = 0.15
"""Share of what a job learns by which two runs of it may differ: with fewer nodes at times, fewer
tokens are in its rounds, and no two runs have the same members."""

pytestmark = pytest.mark.e2e


def weather(root: Path, blows: int, *, pretend: bool, without: tuple[str, ...] = ()) -> Verdict:
    """One storm, whose processes are gone afterwards."""
    storm = Storm(root, SEED, pretend=pretend, without=without)
    failed = True
    try:
        storm.begin()
        verdict = storm.run(blows)
        failed = False
    finally:
        stubborn = storm.end()
        if failed:
            for log in sorted(root.glob("*.log")):
                sys.stderr.write(f"\n--- {log.name}\n{log.read_text()[-4000:]}")
    assert not stubborn, f"had to be killed: {stubborn}"
    print(f"{verdict.seconds:.0f} s, {dict(verdict.blows)}, losses {verdict.losses}")
    return verdict


@pytest.mark.skipif(not EVERYTHING, reason="the storm with real training says more")
def test_a_job_survives_a_long_storm_and_counts_everything_once(tmp_path: Path) -> None:
    verdict = weather(tmp_path, BLOWS, pretend=True)
    assert verdict.problems == []
    assert verdict.version == ROUNDS


def test_a_storm_leaves_no_mark_on_what_is_learned(tmp_path: Path) -> None:
    calm = weather(tmp_path / "calm", 0, pretend=False)
    storm = weather(tmp_path / "storm", BLOWS // 2, pretend=False)
    assert calm.problems == storm.problems == []
    learned = calm.losses[0] - calm.losses[ROUNDS]
    assert learned > 1.0, "it learns"
    assert storm.version == ROUNDS
    assert storm.losses[ROUNDS] < calm.losses[ROUNDS] + NOISE * learned


@pytest.mark.skipif(not EVERYTHING, reason="make chaos; test_sabotage proves it in small")
def test_the_same_storm_is_noticed_when_what_protects_the_count_is_taken_out(
    tmp_path: Path,
) -> None:
    try:
        verdict = weather(tmp_path, BLOWS, pretend=True, without=("fence", "submission-key"))
        problems = list(verdict.problems)
    except OrchestratorEnded as ended:  # it fell over its own contradictions
        problems = [str(ended)]
    assert problems, "the storm cannot fail, so it proves nothing"
