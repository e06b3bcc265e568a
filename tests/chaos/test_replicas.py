"""Three replicas, PostgreSQL and S3, and all goes wrong: work counts once, nothing is stuck.

A short run in every run of the suite; the whole one, with a dozen kills and nodes that really
train, with ``make chaos`` (``CHAOS=all``). ``CHAOS_SEED`` draws others.
"""

from __future__ import annotations

import logging
import os
import random
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest
import structlog

from tests.chaos.replicas import ReplicaEnded, Replicated, Verdict
from tests.e2e.harness import EVERYTHING

SEED = int(os.environ.get("CHAOS_SEED", "1"))
VIRTUAL, REAL = 30, 2

SHORT = ("kill", "kill", "kill", "freeze", "restart database", "refuse blobs")
WHOLE = (
    *("kill",) * 12,
    *("freeze",) * 3,
    *("restart database",) * 3,
    *("refuse blobs",) * 3,
)

pytestmark = pytest.mark.e2e


@pytest.fixture(autouse=True)
def quiet_nodes() -> Iterator[None]:
    """The virtual nodes run in this process: only what is wrong with them is worth reading."""
    before = structlog.get_config()
    structlog.configure(wrapper_class=structlog.make_filtering_bound_logger(logging.ERROR))
    requests = logging.getLogger("werkzeug")
    level = requests.level
    requests.setLevel(logging.WARNING)
    yield
    requests.setLevel(level)
    structlog.configure(**before)


def weather(
    root: Path, blows: Sequence[str], *, pretend: bool, without: tuple[str, ...] = ()
) -> Verdict:
    """One run, whose processes are gone afterwards."""
    plan = list(blows)
    random.Random(SEED).shuffle(plan)
    grid = Replicated(root, SEED, without=without)
    failed = True
    try:
        grid.begin(VIRTUAL, REAL, pretend=pretend)
        verdict = grid.run(plan)
        failed = bool(verdict.problems)
    finally:
        stubborn = grid.end()
        if failed:
            for log in sorted(root.glob("*.log")):
                sys.stderr.write(f"\n--- {log.name}\n{log.read_text()[-4000:]}")
    assert not stubborn, f"had to be killed: {stubborn}"
    print(
        f"{verdict.seconds:.0f} s, {verdict.jobs} jobs, {verdict.rounds} rounds, "
        f"{dict(verdict.blows)}, {dict(verdict.mischief)}, "
        f"{len(verdict.away)} reconnects, the longest {max(verdict.away, default=0.0):.1f} s"
    )
    return verdict


def test_three_replicas_count_everything_once_whatever_dies(tmp_path: Path) -> None:
    verdict = weather(tmp_path, WHOLE if EVERYTHING else SHORT, pretend=not EVERYTHING)
    assert verdict.problems == []
    assert verdict.rounds > 0
    assert verdict.away, "nobody ever lost a stream"
    assert all(verdict.mischief.values()), "no node was unruly"


@pytest.mark.skipif(not EVERYTHING, reason="make chaos; test_sabotage proves it in small")
def test_it_is_noticed_when_what_protects_the_count_is_taken_out(tmp_path: Path) -> None:
    try:
        problems = weather(
            tmp_path, SHORT, pretend=True, without=("fence", "submission-key")
        ).problems
    except (ReplicaEnded, AssertionError) as ended:  # it fell over its own contradictions
        problems = [str(ended)]
    assert problems, "the storm cannot fail, so it proves nothing"
