from __future__ import annotations

from hypothesis import given, settings
from hypothesis import strategies as st

from distribai.core.forecast import forecast
from distribai.core.known import Known, Overhead
from distribai.core.proposal import AIM, LEAST_ROUNDS, TARGET, apply, propose
from distribai.core.validation import validate_spec
from tests.core.test_forecast import NOTHING, known
from tests.core.test_plan import make_spec


def test_settings_that_are_good_enough_stay() -> None:
    spec = make_spec(rounds__inner_steps=100)
    found = propose(spec, [known(spec, 1.0, 0.1)], NOTHING)
    assert found.changes == {}
    assert found.reason == "inner steps are 100% of the time as it is"


def test_a_slow_line_gets_settings_that_leave_the_time_to_inner_steps() -> None:
    spec = make_spec(steps=100_000, rounds__inner_steps=50)
    machines = [known(spec, 1.0, 25.0)]
    found = propose(spec, machines, NOTHING)
    assert forecast(spec, machines, NOTHING).compute_share == 0.5
    assert found.forecast.compute_share >= AIM
    assert found.reason.startswith("inner steps are 50% of the time as it is, and 9")
    again = apply(spec, found.changes)
    validate_spec(again)
    assert forecast(again, machines, NOTHING) == found.forecast


def test_where_nothing_reaches_the_target_it_says_so() -> None:
    spec = make_spec(steps=LEAST_ROUNDS * 50, rounds__inner_steps=50)
    found = propose(spec, [known(spec, 1.0, 1.0)], Overhead(1e6, "measured"))
    assert found.forecast.compute_share < TARGET
    assert "more steps would allow longer rounds" in found.reason


@settings(deadline=None, max_examples=50)
@given(
    st.integers(1, 10**5),
    st.integers(1, 500),
    st.floats(1e9, 1e14),
    st.floats(0.1, 1000),
    st.floats(0, 60),
)
def test_a_proposal_is_never_worse_and_always_possible(
    steps: int, inner: int, operations: float, mbps: float, rest: float
) -> None:
    spec = make_spec(steps=steps, rounds__inner_steps=inner)
    machines = [Known("a", operations_per_s=operations, up_mbps=mbps, down_mbps=mbps)]
    overhead = Overhead(rest, "measured")
    found = propose(spec, machines, overhead)
    assert found.forecast.compute_share >= forecast(spec, machines, overhead).compute_share
    again = apply(spec, found.changes)
    validate_spec(again)
    if again.rounds.inner_steps != inner:
        assert again.round_count >= LEAST_ROUNDS
