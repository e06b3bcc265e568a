from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from distribai.core.architectures.decoder_transformer import PROFILES
from distribai.core.forecast import forecast
from distribai.core.known import Known, Overhead
from distribai.core.plain import to_plain
from distribai.core.proposal import AIM, GAIN, LEAST_ROUNDS, TARGET, apply, propose
from distribai.core.spec import JobSpec
from distribai.core.steps import Reached, step_work
from distribai.core.validation import validate_spec
from tests.core.test_forecast import NOTHING, hopeless, known
from tests.core.test_plan import make_spec


def with_codecs(own: tuple[str, str], **changes: Any) -> JobSpec:
    return make_spec(rounds__codec_up=own[0], rounds__codec_down=own[1], **changes)


def codecs(spec: JobSpec) -> tuple[str, str]:
    return str(spec.rounds.codec_up), str(spec.rounds.codec_down)


def near(spec: JobSpec, share: float) -> list[Known]:
    """One machine whose rounds compute for that share of the time."""
    compute = 0.01 * spec.rounds.inner_steps
    return [known(spec, 0.01, compute * (1 - share) / share / 2)]


def test_settings_that_are_good_enough_stay() -> None:
    spec = make_spec(rounds__inner_steps=100)
    found = propose(spec, [known(spec, 1.0, 0.1)], NOTHING)
    assert found.changes == {}
    assert found.reason == "inner steps are 99.8% of the time as it is"


def test_a_slow_line_gets_settings_that_leave_the_time_to_inner_steps() -> None:
    spec = make_spec(steps=100_000, rounds__inner_steps=50)
    machines = [known(spec, 1.0, 25.0)]
    found = propose(spec, machines, NOTHING)
    assert forecast(spec, machines, NOTHING).compute_share == 0.5
    assert found.forecast.compute_share >= AIM
    assert found.reason.startswith("inner steps are 50.0% of the time as it is, and 9")
    again = apply(spec, found.changes)
    validate_spec(again)
    assert forecast(again, machines, NOTHING) == found.forecast


def test_where_nothing_reaches_the_target_it_says_so() -> None:
    spec = make_spec(steps=LEAST_ROUNDS * 50, rounds__inner_steps=50)
    found = propose(spec, [known(spec, 1.0, 1.0)], Overhead(1e6, "measured"))
    assert found.forecast.compute_share < TARGET
    assert "more steps would allow longer rounds" in found.reason


def test_a_hopeless_machine_gets_settings_that_help_it_and_it_is_said_what_it_costs() -> None:
    spec = with_codecs(("fp32", "fp32"), steps=1000, rounds__inner_steps=50)
    machines = hopeless(spec, 100.0)
    found = propose(spec, machines, NOTHING)
    assert codecs(apply(spec, found.changes))[0] == "int2"
    before = forecast(spec, machines, NOTHING)
    assert found.forecast.hours < before.hours / 5
    assert (
        "without the machine that the others wait for it would take 105 s as it is" in found.reason
    )


def test_sparse_codecs_must_save_a_quarter_of_the_hours() -> None:
    config = to_plain(PROFILES["base"])
    spec = with_codecs(
        ("int2", "int2"), steps=100_000, rounds__inner_steps=1000, model__config=config
    )
    overhead = Overhead(0.0, "measured")
    bad, worse = (propose(spec, near(spec, share), overhead).changes for share in (0.9, 0.0001))
    assert bad.keys() == {"rounds.inner_steps"}
    assert worse["rounds.codec_up"] == "sparse"


@pytest.mark.parametrize("own", [("int3", "int3"), ("int2", "int3")])
def test_no_loss_is_paid_for_a_few_percent(own: tuple[str, str]) -> None:
    spec = with_codecs(own, steps=100_000, rounds__inner_steps=50)
    found = propose(spec, near(spec, 0.946), NOTHING)
    assert found.changes.keys() <= {"rounds.codec_up"}
    assert found.changes.get("rounds.codec_up", "int2") == "int2"
    if not found.changes:
        assert found.reason.startswith("inner steps are 94.6% of the time as it is; 9")
        assert "save less than 5% of the hours" in found.reason


def test_the_ladder_goes_on_from_what_the_job_has() -> None:
    for own, least in (("int4", "int3"), ("int3", "int2"), ("int2", "sparse")):
        spec = with_codecs((own, own), steps=3000, rounds__inner_steps=30)
        found = propose(spec, near(spec, 0.05), Overhead(0.0, "measured"))
        assert found.changes, own
        assert codecs(apply(spec, found.changes))[0] in (own, least, "int2", "sparse")
    spec = with_codecs(("sparse", "sparse"), steps=10_000, rounds__inner_steps=10)
    found = propose(spec, near(spec, 0.5), NOTHING)
    assert found.changes.keys() == {"rounds.inner_steps"}


def test_two_bits_up_and_three_down_come_before_two_both_ways() -> None:
    spec = with_codecs(("int3", "int3"), steps=1000, rounds__inner_steps=50)
    found = propose(spec, near(spec, 0.3), NOTHING)
    assert found.changes["rounds.codec_up"] == "int2"
    slow_up = [Known("a", reached=(Reached(step_work(spec), 0.01),), up_mbps=0.1, down_mbps=1e4)]
    assert "rounds.codec_down" not in propose(spec, slow_up, NOTHING).changes


@settings(deadline=None, max_examples=50)
@given(
    st.integers(1, 10**5),
    st.integers(1, 500),
    st.floats(1e-4, 1e3),
    st.floats(0.1, 1000),
    st.floats(0, 60),
    st.sampled_from([("fp32", "fp32"), ("int4", "int4"), ("int3", "int3"), ("int2", "int3")]),
)
def test_a_proposal_is_never_worse_and_always_possible(
    steps: int, inner: int, step_s: float, mbps: float, rest: float, own: tuple[str, str]
) -> None:
    spec = with_codecs(own, steps=steps, rounds__inner_steps=inner)
    reached = (Reached(step_work(spec), step_s),)
    machines = [Known("a", reached=reached, up_mbps=mbps, down_mbps=mbps)]
    overhead = Overhead(rest, "measured")
    found = propose(spec, machines, overhead)
    before = forecast(spec, machines, overhead)
    assert found.forecast.hours <= before.hours
    assert found.forecast.compute_share >= before.compute_share - 1e-9
    again = apply(spec, found.changes)
    validate_spec(again)
    bits = [int(codec[-1]) if codec[0] == "i" else 0 for codec in own]
    for codec, least in zip(codecs(again), bits, strict=True):
        assert not (least and codec.startswith("int")) or int(codec[-1]) <= least, "never finer"
    if again.rounds.inner_steps != inner or codecs(again) == ("int2", "int2"):
        assert found.forecast.hours <= before.hours * (1 - GAIN)
    if again.rounds.inner_steps != inner:
        assert again.round_count >= LEAST_ROUNDS
