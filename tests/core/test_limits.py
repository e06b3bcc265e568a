from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from distribai.core.limits import Buckets, Flow, Rate


def test_a_burst_passes_and_then_one_each_time_that_a_token_has_grown() -> None:
    buckets = Buckets(Rate(per_s=2.0, burst=3.0))
    assert [buckets.take("a", 0.0) for _ in range(4)] == [0.0, 0.0, 0.0, 0.5]
    assert buckets.take("a", 0.4) == pytest.approx(0.1)
    assert buckets.take("a", 0.5) == 0.0
    assert buckets.take("b", 0.5) == 0.0, "another caller has a bucket of its own"


def test_no_rate_is_no_limit() -> None:
    buckets = Buckets(Rate(0.0, 1.0))
    assert {buckets.take("a", 0.0) for _ in range(100)} == {0.0}
    assert len(buckets) == 0


@given(
    st.floats(0.1, 100.0),
    st.integers(1, 50),
    st.lists(st.floats(0.0, 3.0), min_size=1, max_size=200),
)
def test_nobody_gets_more_than_the_burst_and_what_grows_meanwhile(
    per_s: float, burst: int, pauses: list[float]
) -> None:
    buckets = Buckets(Rate(per_s, float(burst)))
    now, passed = 0.0, 0
    for pause in pauses:
        now += pause
        wait = buckets.take("a", now)
        passed += wait == 0.0
        assert wait <= 1.0 / per_s + 1e-9
        assert passed <= burst + per_s * now + 1e-6


def test_waiting_as_told_is_enough() -> None:
    buckets = Buckets(Rate(per_s=3.0, burst=1.0))
    now = 0.0
    buckets.take("a", now)
    for _ in range(50):
        now += buckets.take("a", now) + 1e-9
        assert buckets.take("a", now) == 0.0


def test_memory_is_bounded_whoever_comes() -> None:
    buckets = Buckets(Rate(per_s=1.0, burst=5.0), capacity=10)
    for number in range(1000):
        buckets.take(f"stranger {number}", 0.0)
    assert len(buckets) == 10
    buckets.take("later", 100.0)
    assert len(buckets) == 1, "full buckets are forgotten"


def test_a_busy_caller_is_not_forgotten_for_idle_ones() -> None:
    buckets = Buckets(Rate(per_s=1.0, burst=2.0), capacity=10)
    buckets.take("busy", 0.0)
    for number in range(100):
        buckets.take("busy", 0.0)
        buckets.take(f"idle {number}", 0.0)
    assert buckets.take("busy", 0.0) > 0.0


def test_bytes_that_are_not_there_yet_are_waited_for_in_order() -> None:
    flow = Flow(Rate(per_s=100.0, burst=50.0))
    assert [flow.take(50, 7.0), flow.take(100, 7.0), flow.take(100, 7.0)] == [0.0, 1.0, 2.0]
    assert flow.take(0, 9.0) == 0.0, "the debt is paid"
    flow.rate = Rate(0.0, 1.0)
    assert flow.take(10**9, 9.0) == 0.0


@given(st.lists(st.tuples(st.floats(-1.0, 3.0), st.integers(0, 1000)), max_size=100))
def test_bytes_never_go_faster_than_the_rate_even_when_time_runs_backwards(
    takes: list[tuple[float, int]],
) -> None:
    flow = Flow(Rate(per_s=100.0, burst=200.0))
    now = latest = 0.0
    total = 0
    for pause, size in takes:
        now += pause
        latest = max(latest, now)
        total += size
        wait = flow.take(size, now)
        # Time that is gone through twice counts twice, as it would for any monotonic clock.
        assert wait >= 0.0
        if all(p >= 0 for p, _ in takes):
            assert total <= 200.0 + 100.0 * (now + wait) + 1e-6
