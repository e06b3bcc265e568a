from __future__ import annotations

import dataclasses
from dataclasses import replace

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from distribai.core.forecast import (
    FORWARD,
    MOST_MACHINES,
    Forecast,
    duration,
    fastest,
    forecast,
    overhead_of,
)
from distribai.core.known import TYPICAL, Known, Overhead
from distribai.core.pace import EFFICIENCY
from distribai.core.paradigms.diloco import GRACE_LEAST
from distribai.core.plain import from_plain, to_plain
from distribai.core.plan import STATE_BYTES, parameter_count, plan
from distribai.core.spec import JobSpec
from distribai.core.steps import Reached, step_work
from distribai.core.traffic import MBPS
from tests.core.test_plan import make_spec

NOTHING = Overhead(0.0, "measured")


def known(spec: JobSpec, step_s: float, round_s: float, **more: object) -> Known:
    """A device whose step takes ``step_s`` and whose bytes of a round ``round_s`` each way."""
    whole = plan(spec, parameter_count(spec), 1)
    line = {
        "up_mbps": whole.bytes_up / whole.rounds / MBPS / round_s,
        "down_mbps": whole.bytes_down / whole.rounds / MBPS / round_s,
    }
    reached = (Reached(step_work(spec), step_s),)
    return Known(**{"node_id": "a", **line, **more}, reached=reached)  # type: ignore[arg-type]


def test_one_machine_computes_while_it_does_not_move_bytes_or_wait() -> None:
    spec = make_spec(rounds__inner_steps=100)
    found = forecast(spec, [known(spec, 0.5, 10.0)], Overhead(5.0, "measured"))
    (node,) = found.nodes
    assert (node.download_s, node.compute_s, node.upload_s) == pytest.approx((10, 50, 10))
    assert node.waiting_s == pytest.approx(5)
    assert found.round_s == pytest.approx(75)
    assert found.compute_share == pytest.approx(50 / 75)
    assert found.hours == pytest.approx((10 * 75 + found.once_s) / 3600)
    assert found.memory_bytes >= STATE_BYTES * parameter_count(spec)
    assert found.bytes_up == plan(spec, parameter_count(spec), 1).bytes_up
    assert (found.assumed, node.why_slow) == ((), "")


def test_a_slower_machine_does_fewer_steps_and_is_there_at_the_same_time() -> None:
    spec = make_spec(rounds__inner_steps=100)
    machines = [known(spec, 0.5, 10.0), known(spec, 1.0, 5.0, node_id="b")]
    fast, slow = forecast(spec, machines, NOTHING).nodes
    assert (fast.inner_steps, slow.inner_steps) == (100, 60)
    assert slow.waiting_s == pytest.approx(0.0)
    assert slow.why_slow == ""


def test_machines_that_are_too_slow_are_named_with_the_reason() -> None:
    spec = make_spec(rounds__inner_steps=100, resources__memory_mb=1000)
    fine = [known(spec, 0.5, 5.0, node_id=f"fine{i}") for i in range(4)]
    odd = [
        known(spec, 0.5, 100.0, node_id="modem"),
        known(spec, 0.5, 25.0, node_id="village"),
        known(spec, 10.0, 5.0, node_id="watch"),
        known(spec, 0.5, 5.0, node_id="small", memory_mb=999),
        known(spec, 0.5, 5.0, node_id="thrifty", month_left=spec.round_count * 100),
    ]
    found = forecast(spec, [*odd, *fine], NOTHING)
    why = {n.node_id: n.why_slow for n in found.nodes}
    assert why["modem"].startswith("link: a round's bytes take it 3.3 min")
    assert "and the others are done after" in why["modem"]
    assert why["village"].startswith("link: it moves bytes for 50 s of a round")
    assert why["watch"] == "speed: a step takes it 10 s; in the others' round it does 5 of 100"
    assert why["small"] == "memory: it has 999 MB, and a task needs 1000 MB"
    assert why["thrifty"].startswith("month: what its owner still gives lasts for 0 of")
    assert {why[n.node_id] for n in fine} == {""}
    by_id = {n.node_id: n for n in found.nodes}
    assert by_id["modem"].inner_steps == by_id["small"].inner_steps == 0


def test_without_machines_typical_homes_are_assumed_and_it_says_so() -> None:
    spec = make_spec(workers_min=3)
    found = forecast(spec, [], overhead_of(spec, None), held_out=0)
    assert len(found.nodes) == 3
    assert found.nodes[0].up_mbps == TYPICAL.up_mbps
    assert found.nodes[0].step_s == step_work(spec).seconds(TYPICAL.operations_per_s, "")
    assert found.assumed[0].startswith("no node is here yet; typical homes are assumed: 10 Mbit/s")
    assert "merging, evaluating" in found.assumed[1]


def test_what_is_guessed_is_said_for_each_kind_of_guess() -> None:
    spec = make_spec(workers_min=3)
    machines = [
        Known("a", gflops=100.0, up_mbps=1.0, down_mbps=1.0),
        Known("b", reached=(Reached(step_work(spec), 1.0),)),
    ]
    found = forecast(spec, machines, overhead_of(spec, 1.0))
    assert [text.split(";")[0] for text in found.assumed] == [
        "1 more must come",
        "1 of 2 nodes moved too little to know the link",
        "1 of 2 nodes never trained here",
    ]
    a = next(n for n in found.nodes if n.node_id == "a")
    assert a.step_s == step_work(spec).seconds(1e11 * EFFICIENCY, "")


def test_evaluating_costs_what_its_batches_take_shared_by_all() -> None:
    spec = make_spec(rounds__inner_steps=60)
    machine = known(spec, 1.0, 1.0)
    base = overhead_of(spec, None).seconds
    one = forecast(spec, [machine], overhead_of(spec, None), held_out=10**6)
    assert one.overhead_s == pytest.approx(base + 30 * FORWARD)
    two = forecast(spec, [machine, replace(machine, node_id="b")], overhead_of(spec, None), 8)
    assert two.overhead_s == pytest.approx(base + FORWARD / 2)


def test_the_fastest_take_part_where_there_are_too_many() -> None:
    spec = make_spec(workers_max=2)
    machines = [known(spec, s, 1.0, node_id=f"n{s}") for s in (3.0, 1.0, 2.0)]
    assert [n.node_id for n in forecast(spec, machines, NOTHING).nodes] == ["n1.0", "n2.0"]


def test_of_very_many_machines_the_fastest_are_looked_at() -> None:
    spec = make_spec()
    many = [known(spec, 1.0 + i, 1.0, node_id=f"n{i}") for i in range(MOST_MACHINES + 5)]
    chosen = fastest(spec, many[::-1])
    assert {m.node_id for m in chosen} == {f"n{i}" for i in range(MOST_MACHINES)}
    assert fastest(spec, many[:3]) == many[:3]


def test_a_forecast_survives_being_stored() -> None:
    found = forecast(make_spec(), [Known("a")], NOTHING)
    assert from_plain(Forecast, to_plain(found)) == found


MACHINES = st.builds(
    Known,
    node_id=st.sampled_from("abcdef"),
    reached=st.builds(Reached, st.just(step_work(make_spec())), st.floats(1e-4, 1e4)).map(
        lambda reached: (reached,)
    ),
    up_mbps=st.floats(0.01, 1e4),
    down_mbps=st.floats(0.01, 1e4),
    memory_mb=st.sampled_from([0, 0, 100, 10**6]),
    month_left=st.none() | st.integers(0, 10**12),
)


@settings(deadline=None, max_examples=50)
@given(
    st.lists(MACHINES, max_size=8),
    st.integers(1, 500),
    st.floats(0, 100),
    st.floats(0.05, 1.0),
)
@example(  # the round does not wait for the last one, which is still at its steps
    [
        Known("a", reached=(Reached(step_work(make_spec()), 1e3),), up_mbps=1.0, down_mbps=down)
        for down in (1.0, 8.0, 0.5)
    ],
    50,
    0.0,
    0.5,
)
def test_no_forecast_contradicts_itself(
    machines: list[Known], inner: int, rest: float, quorum: float
) -> None:
    spec = make_spec(rounds__inner_steps=inner, rounds__quorum=quorum)
    found = forecast(spec, machines, Overhead(rest, "measured"))
    assert 0.0 <= found.compute_share <= 1.0
    assert found.round_s > 0
    for node in found.nodes:
        assert 0 <= node.inner_steps <= inner
        assert node.waiting_s >= 0
        assert 0 <= node.compute_share <= 1
        if node.inner_steps < inner and not node.why_slow.startswith(("link", "speed", "memory")):
            least = spec.rounds.min_inner_steps * inner
            assert node.inner_steps >= min(least, inner) - 1


@settings(deadline=None, max_examples=50)
@given(st.floats(0.1, 100), st.floats(1.0, 10.0))
def test_a_faster_line_never_lowers_the_share(mbps: float, faster: float) -> None:
    spec = make_spec()
    slow = Known("a", gflops=1e4, up_mbps=mbps, down_mbps=mbps)
    fast = dataclasses.replace(slow, up_mbps=mbps * faster)
    before, after = (forecast(spec, [m], NOTHING).compute_share for m in (slow, fast))
    assert after >= before - 1e-12


def test_seconds_are_told_for_people() -> None:
    told = [duration(s) for s in (0.034, 1.25, 12.3, 130, 7500, 90_000, 10**6)]
    assert told == ["0.034 s", "1.2 s", "12 s", "2.2 min", "2.1 h", "25 h", "12 days"]


def test_who_is_unknown_is_taken_to_be_like_the_others_here() -> None:
    spec = make_spec(workers_min=3)
    here = [known(spec, 0.5, 1.0), known(spec, 0.7, 1.0, node_id="b"), Known("new", type="cuda")]
    steps = {n.node_id: n.step_s for n in forecast(spec, here, NOTHING).nodes}
    assert steps["new"] == pytest.approx(0.6)


def test_a_cpu_of_which_nothing_is_known_is_no_gpu() -> None:
    spec = make_spec()
    (cpu,) = forecast(spec, [Known("a", type="cpu")], NOTHING).nodes
    (gpu,) = forecast(spec, [Known("a", type="cuda")], NOTHING).nodes
    assert cpu.step_s == step_work(spec).seconds(TYPICAL.cpu_operations_per_s, "cpu")
    assert gpu.step_s == step_work(spec).seconds(TYPICAL.operations_per_s, "cuda")


def hopeless(spec: JobSpec, seconds: float, good: int = 1) -> list[Known]:
    """Good devices that are done in a moment, and one whose bytes take it ``seconds``."""
    fine = [known(spec, 0.1, 0.1, node_id=f"fine{i}") for i in range(good)]
    return [*fine, known(spec, 0.1, seconds / 2, node_id="modem")]


@pytest.mark.parametrize(("seconds", "round_s"), [(300.0, 120.0), (50.0, 50.0)])
def test_two_devices_wait_for_a_hopeless_one_as_long_as_the_grid_would_and_it_is_told(
    seconds: float, round_s: float
) -> None:
    spec = make_spec(rounds__inner_steps=10)
    found = forecast(spec, hopeless(spec, seconds), NOTHING)
    fine, modem = found.nodes
    assert found.round_s == pytest.approx(round_s, abs=1.3)
    assert modem.awaited_s == pytest.approx(found.round_s - 1.2)
    assert "the others are done after 1.2 s; each round waits " in modem.why_slow
    assert (fine.awaited_s, fine.why_slow, fine.hours_without) == (0.0, "", None)
    alone = forecast(spec, hopeless(spec, seconds)[:1], NOTHING)
    assert modem.hours_without == pytest.approx(alone.hours)
    assert found.hours > 20 * alone.hours


def test_many_learn_not_to_wait_for_a_hopeless_one() -> None:
    spec = make_spec(rounds__inner_steps=10)
    found = forecast(spec, hopeless(spec, 1e4, good=9), NOTHING)
    assert found.round_s == pytest.approx(1.2 + GRACE_LEAST)
    assert found.nodes[-1].inner_steps == 0


def test_a_round_below_its_least_members_waits_for_them() -> None:
    spec = make_spec(rounds__inner_steps=10, workers_min=2)
    found = forecast(spec, hopeless(spec, 500.0), NOTHING)
    assert found.round_s == pytest.approx(500.0, rel=0.01)
    assert [n.hours_without for n in found.nodes] == [None, None], "nobody can be left out"


def test_the_share_is_that_of_those_who_bring_something() -> None:
    spec = make_spec(rounds__inner_steps=10, rounds__grace_max=2.0)
    fine, modem = (found := forecast(spec, hopeless(spec, 300.0), NOTHING)).nodes
    assert modem.inner_steps == 0
    assert found.compute_share == fine.compute_share > 0.3


def test_owners_limits_are_known_before_any_byte_has_moved() -> None:
    spec = make_spec()
    limits = {"up_limit_mbps": 0.5, "down_limit_mbps": 4.0}
    (new,) = forecast(spec, [Known("a", **limits)], NOTHING).nodes
    assert (new.up_mbps, new.down_mbps, new.link_basis) == (0.5, 4.0, "typical")
    (wide,) = forecast(spec, [Known("a", up_limit_mbps=1e3, down_limit_mbps=1e3)], NOTHING).nodes
    assert (wide.up_mbps, wide.down_mbps) == (TYPICAL.up_mbps, TYPICAL.down_mbps)
    (fast,) = forecast(spec, [Known("a", up_mbps=9.0, down_mbps=9.0, **limits)], NOTHING).nodes
    assert (fast.up_mbps, fast.down_mbps, fast.link_basis) == (0.5, 4.0, "measured")


def test_the_data_is_fetched_once_and_counts_in_hours_and_in_the_month() -> None:
    spec = make_spec()
    size = 17_600_000
    machine = known(spec, 0.1, 1.0)
    none = forecast(spec, [machine], NOTHING, data_bytes=0)
    some = forecast(spec, [machine], NOTHING, data_bytes=size)
    assert some.once_bytes == size
    assert some.once_s == pytest.approx(size / (machine.down_mbps * MBPS))
    assert some.hours - none.hours == pytest.approx(some.once_s / 3600)
    assert some.round_s == none.round_s
    a_round = (some.bytes_up + some.bytes_down) / some.rounds
    thrifty = replace(machine, month_left=int(size + 7.5 * a_round))
    (node,) = forecast(spec, [thrifty], NOTHING, data_bytes=size).nodes
    assert node.why_slow.startswith(
        f"month: what its owner still gives lasts for 7 of {some.rounds}"
    )
    enough = replace(machine, month_left=int(size + (some.rounds + 1) * a_round))
    assert forecast(spec, [enough], NOTHING, data_bytes=size).nodes[0].why_slow == ""


def test_machines_that_stand_in_are_marked_and_others_are_not() -> None:
    spec = make_spec(workers_min=2)
    here, missing = sorted(forecast(spec, [Known("a")], NOTHING).nodes, key=lambda n: n.stands_in)
    assert (here.stands_in, missing.stands_in) == (False, True)
