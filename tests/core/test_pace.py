"""How long a task may take."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from distribai.core.pace import LEAST_SHARE, MOST_S, SLACK, UNKNOWN_COST_S, deadline_s, expected_s
from distribai.core.spec import DataSpec, JobSpec, ModelSpec

MODEL = {"dim": 8, "layers": 1, "heads": 2, "ffn_dim": 8}
SPEC = JobSpec("j", ModelSpec("decoder_transformer", MODEL), DataSpec(), 100, batch=4, seq_len=25)
USUAL = 3600.0


def test_what_a_device_reached_before_foretells_it() -> None:
    assert expected_s(SPEC, "train", 10, 50.0, 0.0) == (20.0, "measured")
    assert expected_s(SPEC, "evaluate", 30, 50.0, 0.0) == (pytest.approx(20.0), "measured")


def test_without_a_past_the_benchmark_says_it_and_without_that_nobody_knows() -> None:
    seconds, basis = expected_s(SPEC, "train", 10, None, 2.0)
    assert basis == "benchmark"
    assert expected_s(SPEC, "train", 10, None, 1.0) == (pytest.approx(2 * seconds), "benchmark")
    assert expected_s(SPEC, "train", 10, None, 0.0) == (UNKNOWN_COST_S, "unknown")
    assert expected_s(SPEC, "generate", 0, 50.0, 2.0) == (UNKNOWN_COST_S, "unknown")


def test_a_slow_device_gets_longer_and_a_fast_one_not_too_short() -> None:
    slow, why = deadline_s(3000.0, "measured", USUAL)
    assert slow == SLACK * 3000.0
    assert "3000 s" in why
    assert deadline_s(1.0, "measured", USUAL)[0] == LEAST_SHARE * USUAL
    assert deadline_s(1.0, "benchmark", USUAL)[0] == USUAL, "a claim never shortens it"
    assert deadline_s(1e12, "measured", USUAL)[0] == MOST_S
    assert deadline_s(5.0, "unknown", USUAL)[0] == USUAL


@given(st.floats(0.1, 1e6), st.floats(0.1, 1e6), st.sampled_from(["measured", "benchmark"]))
def test_who_is_slower_never_gets_less(one: float, two: float, basis: str) -> None:
    shorter, longer = sorted(
        deadline_s(expected_s(SPEC, "train", 7, s if basis == "measured" else None, s)[0],
                   basis, USUAL)[0]  # type: ignore[arg-type]
        for s in (one, two)
    )  # fmt: skip
    slow = expected_s(SPEC, "train", 7, None, min(one, two))
    assert deadline_s(*slow, USUAL)[0] >= USUAL
    assert shorter <= longer


def test_a_longer_task_gets_longer() -> None:
    long = replace(SPEC, batch=4000)
    assert deadline_s(*expected_s(long, "train", 100, 50.0, 0.0), USUAL) > deadline_s(
        *expected_s(SPEC, "train", 100, 50.0, 0.0), USUAL
    )
