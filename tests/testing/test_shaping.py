from __future__ import annotations

import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from distribai.testing.shaping import Lane, Shape, ShapedLink


def lane(**figures: object) -> Lane:
    return Lane(Shape(**figures), random.Random(0))  # type: ignore[arg-type]


def test_bytes_take_as_long_as_the_rate_says_and_wait_for_those_before_them() -> None:
    up = lane(bytes_per_s=1000.0, burst=500.0)
    assert up.admit(500, 0.0).hold_s == 0.0, "the burst passes at once"
    assert up.admit(1000, 0.0).hold_s == pytest.approx(1.0)
    assert up.admit(1000, 0.0).hold_s == pytest.approx(2.0), "another connection waits as well"
    assert up.admit(1000, 2.0).hold_s == pytest.approx(1.0)
    assert up.admit(100, 60.0).hold_s == 0.0, "a pause fills the bucket again"
    assert up.passed == 3600


@given(
    st.lists(st.tuples(st.floats(0, 2), st.integers(1, 16_384)), min_size=1, max_size=60),
    st.floats(100, 1e6),
    st.floats(1, 1e5),
)
def test_no_more_passes_than_burst_and_rate_allow(
    chunks: list[tuple[float, int]], rate: float, burst: float
) -> None:
    up, now = lane(bytes_per_s=rate, burst=burst), 0.0
    for pause, size in chunks:
        now += pause
        gone = now + up.admit(size, now).hold_s
        assert up.passed <= burst + rate * gone + 1e-3 * up.passed


def test_latency_and_jitter_delay_without_holding_anybody_up() -> None:
    up = lane(latency_s=0.1, jitter_s=0.05)
    delays = [up.admit(10, 0.0).delay_s for _ in range(100)]
    assert all(0.1 <= d <= 0.15 for d in delays)
    assert max(delays) - min(delays) > 0.03
    assert up.admit(10**9, 0.0).hold_s == 0.0, "no rate is no limit"
    again = lane(latency_s=0.1, jitter_s=0.05)
    assert [again.admit(10, 0.0).delay_s for _ in range(100)] == delays, "chance is the caller's"


def test_a_reset_comes_at_its_byte_once_and_the_rest_of_the_chunk_is_lost() -> None:
    up = lane(resets=(1500, 1600))
    assert not up.admit(1000, 0.0).reset
    passage = up.admit(1000, 0.0)
    assert (passage.size, passage.reset) == (500, True)
    assert (up.admit(1000, 0.0).size, up.passed) == (100, 1600)
    assert not up.admit(10_000, 0.0).reset


def test_a_link_that_is_reshaped_goes_on_counting() -> None:
    link = ShapedLink(up=Shape(bytes_per_s=10.0))
    link.lanes["up"].admit(100, 0.0)
    link.reshape(Shape(resets=(50, 150)), Shape(latency_s=1.0))
    assert link.lanes["up"].admit(100, 0.0).size == 50, "a reset that is past does not come"
    assert link.lanes["down"].admit(7, 0.0).delay_s == 1.0
    assert (link.bytes_up, link.bytes_down) == (150, 7)
