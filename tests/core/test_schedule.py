"""The learning rate is a function of the global step."""

from __future__ import annotations

import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from distribai.core.schedule import lr_factor
from distribai.core.spec import ScheduleSpec

kinds = st.sampled_from(["cosine", "wsd", "constant"])


@given(kinds, st.integers(0, 200), st.floats(0, 1), st.integers(1, 5000), st.data())
def test_the_factor_stays_between_zero_and_one(
    kind: str, warmup: int, floor: float, total: int, data: st.DataObject
) -> None:
    schedule = ScheduleSpec(kind, warmup, floor)  # type: ignore[arg-type]
    step = data.draw(st.integers(0, total))
    assert 0 <= lr_factor(schedule, step, total) <= 1 + 1e-12


@pytest.mark.parametrize("kind", ["cosine", "wsd"])
def test_it_rises_in_the_warm_up_peaks_and_falls_to_the_floor(kind: str) -> None:
    schedule = ScheduleSpec(kind, warmup=10, floor=0.1)  # type: ignore[arg-type]
    rates = [lr_factor(schedule, s, 200) for s in range(201)]
    assert rates[0] == pytest.approx(0.1)
    assert rates[9] == 1.0
    assert rates[200] == pytest.approx(0.1)
    assert all(a >= b for a, b in itertools.pairwise(rates[10:]))


def test_a_warm_up_never_takes_more_than_a_tenth_of_a_short_job() -> None:
    assert lr_factor(ScheduleSpec("constant", warmup=50), 2, 20) == 1.0
    assert lr_factor(ScheduleSpec("constant", warmup=0), 0, 20) == 1.0
