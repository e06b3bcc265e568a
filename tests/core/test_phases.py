from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from distribai.core.phases import RoundTimes, TaskTimes, measure


def test_the_time_of_rounds_is_told_by_phase_without_the_first_one() -> None:
    rounds = [RoundTimes(0, 0.0, 100.0, 2), RoundTimes(1, 100.0, 120.0, 2)]
    rounds.append(RoundTimes(2, 120.0, 140.0, 2))
    tasks = [TaskTimes(0, 5.0, 80.0, 1.0)]
    tasks += [TaskTimes(n, 10.0, 2.0, 4.0) for n in (1, 2)]
    tasks += [TaskTimes(n, 14.0, 1.0, 1.0) for n in (1, 2)]
    found = measure(rounds, tasks)
    assert found is not None
    assert (found.rounds, found.round_s) == (2, 20.0)
    assert (found.compute_s, found.download_s, found.upload_s) == (12.0, 1.5, 2.5)
    assert found.waiting_s == pytest.approx(4.0)
    assert found.compute_share == pytest.approx(0.6)
    assert found.overhead_s == pytest.approx(4.0)


def test_the_first_round_counts_where_it_is_the_only_one() -> None:
    found = measure([RoundTimes(0, 0.0, 10.0, 1)], [TaskTimes(0, 5.0, 1.0, 1.0)])
    assert found is not None
    assert found.compute_share == 0.5


def test_a_member_without_a_result_has_waited() -> None:
    found = measure([RoundTimes(3, 0.0, 10.0, 2)], [TaskTimes(3, 8.0, 0.0, 0.0)])
    assert found is not None
    assert (found.compute_share, found.waiting_s) == (0.4, 6.0)
    assert found.overhead_s is None, "it may have been waited for"


def test_waiting_for_who_brings_nothing_is_no_overhead() -> None:
    rounds = [RoundTimes(1, 0.0, 121.0, 2), RoundTimes(2, 121.0, 124.0, 1)]
    found = measure(rounds, [TaskTimes(1, 1.0, 0.0, 0.0), TaskTimes(2, 1.0, 0.0, 0.0)])
    assert found is not None
    assert found.overhead_s == pytest.approx(2.0)


def test_nothing_is_told_of_nothing() -> None:
    assert measure([], []) is None
    assert measure([RoundTimes(1, 0.0, 10.0, 1)], []) is None
    assert measure([RoundTimes(1, 5.0, 5.0, 1)], [TaskTimes(1, 0.0, 0.0, 0.0)]) is None


@settings(deadline=None, max_examples=50)
@given(
    st.lists(st.tuples(st.floats(0.1, 100), st.integers(1, 4)), min_size=1, max_size=8),
    st.lists(st.tuples(*[st.floats(0, 50)] * 3), max_size=20),
)
def test_the_phases_never_contradict_their_rounds(
    lengths: list[tuple[float, int]], seconds: list[tuple[float, float, float]]
) -> None:
    at, rounds = 0.0, []
    for number, (length, members) in enumerate(lengths):
        rounds.append(RoundTimes(number, at, at + length, members))
        at += length
    tasks = [TaskTimes(i % len(rounds), *s) for i, s in enumerate(seconds)]
    found = measure(rounds, tasks)
    if found is not None:
        assert 0 <= found.compute_share <= 1
        assert found.waiting_s >= 0
        assert found.overhead_s is None or found.overhead_s >= 0
