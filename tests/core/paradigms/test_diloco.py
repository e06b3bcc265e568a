"""DiLoCo: splitting and merging, as pure decisions."""

import random
from collections import Counter

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from distribai.core.paradigms import Member, MergeDecision, diloco, paradigm, paradigms
from distribai.core.ranges import SamplePool, SampleRange, normalize, split, total
from distribai.core.spec import DataSpec, JobSpec, ModelSpec, RoundSpec
from distribai.errors import InvalidSpec

SPEEDS = st.one_of(st.none(), st.floats(0, 1e6))


def make_spec(steps: int = 100, batch: int = 4, h: int = 20, least: float = 0.25) -> JobSpec:
    return JobSpec(
        "job",
        ModelSpec("decoder_transformer", {}),
        DataSpec(),
        steps,
        batch=batch,
        rounds=RoundSpec(inner_steps=h, min_inner_steps=least),
    )


def members(*speeds: float | None) -> list[Member]:
    return [Member(f"node_{i}", 0, s) for i, s in enumerate(speeds)]


def test_the_scan_finds_every_paradigm() -> None:
    assert list(paradigms()) == ["diloco"]
    assert paradigm("diloco").NAME == "diloco"
    with pytest.raises(InvalidSpec) as caught:
        paradigm("dilocko")
    assert caught.value.code == "spec.paradigm"
    assert "diloco" in caught.value.hint


def test_a_round_splits_by_speed() -> None:
    shares, pool, reason = diloco.slots(
        make_spec(), 2, members(100.0, 50.0, None, 1.0), SamplePool(40)
    )
    assert [s.steps for s in shares] == [20, 10, 20, 5]
    assert [(s.rank, s.world_size, s.inner_step_offset) for s in shares] == [
        (i, 4, 40) for i in range(4)
    ]
    assert shares[1].samples == (SampleRange(120, 160),)
    assert pool == SamplePool(40 + 55 * 4)
    assert reason == "4 workers do 20 inner steps each; of them 2 slower fewer (at least 5)"


def test_the_last_round_may_be_shorter() -> None:
    spec = make_spec(steps=45)
    shares, _, _ = diloco.slots(spec, 2, members(1.0, 0.1), SamplePool())
    assert [s.steps for s in shares] == [5, 2]
    with pytest.raises(ValueError, match="no round 3"):
        diloco.slots(spec, 3, members(1.0), SamplePool())


@settings(max_examples=60, deadline=None)
@given(speeds=st.lists(SPEEDS, min_size=1, max_size=9), seed=st.integers(0, 9))
def test_splitting_depends_on_the_membership_alone(speeds: list[float | None], seed: int) -> None:
    order = members(*speeds)
    expected = diloco.slots(make_spec(), 0, order, SamplePool(3))
    random.Random(seed).shuffle(order)
    assert diloco.slots(make_spec(), 0, order, SamplePool(3)) == expected


@settings(max_examples=100, deadline=None)
@given(
    full=st.integers(1, 500),
    least=st.floats(0.01, 1),
    speeds=st.lists(SPEEDS, min_size=1, max_size=9),
)
@example(full=20, least=0.25, speeds=[0.0, 0.0])
@example(full=20, least=0.25, speeds=[5e-324, 1e6])
def test_steps_stay_within_their_bounds(
    full: int, least: float, speeds: list[float | None]
) -> None:
    steps = diloco.inner_steps(full, least, speeds)
    assert all(least * full - 1e-6 <= s <= full for s in steps)
    assert max(steps) == full, "the fastest does all of them"
    assert all(s == full for s, speed in zip(steps, speeds, strict=True) if speed is None)


def test_a_round_without_members_or_with_one_twice_is_refused() -> None:
    for bad in ([], [Member("a", 0), Member("a", 0, 2.0)]):
        with pytest.raises(ValueError, match="each once"):
            diloco.slots(make_spec(), 0, bad, SamplePool())


@settings(max_examples=60, deadline=None)
@given(st.data())
def test_accepted_work_consumes_every_position_once(data: st.DataObject) -> None:
    """A8 over a whole job with dying, refused and unfinished tasks.

    At the end the accepted positions and what waits in the pool are exactly what was issued, and
    the accepted ones have no position twice. A job that goes on until nothing waits has consumed
    whole epochs, each sequence equally often.
    """
    draw = data.draw
    spec = make_spec(steps=20 * draw(st.integers(1, 6)), batch=draw(st.integers(1, 5)))
    pool, accepted = SamplePool(), []
    for number in range(spec.round_count):
        count = draw(st.integers(1, 5))
        speeds = draw(st.lists(SPEEDS, min_size=count, max_size=count))
        shares, pool, _ = diloco.slots(spec, number, members(*speeds), pool)
        leased = [r for s in shares for r in s.samples]
        assert total(leased) == sum(s.steps for s in shares) * spec.batch
        normalize(leased)  # raises if one position was issued to two slots
        for share in shares:
            done = draw(st.integers(0, share.steps)) * spec.batch
            consumed, rest = split(share.samples, done)
            accepted += consumed
            pool = pool.give_back(rest)
    everything = normalize([*accepted, *pool.returned])  # raises if a position came twice
    assert everything == (() if not pool.cursor else (SampleRange(0, pool.cursor),))
    if waiting := total(pool.returned):
        again, pool = pool.take(waiting)
        accepted += again
    sequences = 7
    per_sequence = Counter(p % sequences for r in accepted for p in range(r.start, r.stop))
    assert max(per_sequence.values()) - min(per_sequence[s] for s in range(sequences)) <= 1


def test_an_epoch_of_accepted_work_is_the_data_set() -> None:
    spec, pool, seen = make_spec(steps=60, batch=5), SamplePool(), Counter[int]()
    for number in range(spec.round_count):
        shares, pool, _ = diloco.slots(spec, number, members(None, None), pool)
        seen.update(p % 200 for s in shares for r in s.samples for p in range(r.start, r.stop))
    assert pool.cursor == 600
    assert seen == dict.fromkeys(range(200), 3)


def test_too_few_workers_wait_and_too_many_leave_the_slowest_out() -> None:
    assert diloco.eligible(members(1.0), 2, 3) == ((), "1 of at least 2 workers are here")
    chosen, reason = diloco.eligible(members(1.0, 9.0, None, 5.0, 5.0), 1, 3)
    assert [m.node_id for m in chosen] == ["node_1", "node_2", "node_3"]
    assert reason == "the 3 fastest of 5 workers (workers_max)"
    assert diloco.eligible(members(2.0, 1.0), 1, 3)[1] == "all 2 workers"


def test_grace_is_the_median_and_three_mad_within_its_bounds() -> None:
    rounds = RoundSpec(grace_min=2, grace_max=120)
    assert diloco.grace([1.0, 1.0], rounds) == (
        120,
        "grace_max: only 2 arrivals are on record",
    )
    assert diloco.grace([4.0, 10.0, 6.0, 5.0], rounds)[0] == pytest.approx(5.5 + 3 * 1.0)
    assert diloco.grace([0.1] * 5, rounds)[0] == 2
    assert diloco.grace([500.0] * 5, rounds)[0] == 120
    assert diloco.grace([500.0] * 9 + [3.0] * 64, rounds)[0] == 3, "old rounds are forgotten"


def test_offsets_count_from_the_quorum_on() -> None:
    assert diloco.arrival_offsets([13.0, 10.0, 11.0, 30.0], 4, 0.5) == (2.0, 19.0)
    assert diloco.arrival_offsets([10.0], 1, 0.5) == ()
    assert diloco.arrival_offsets([], 4, 0.5) == ()
    assert diloco.quorum_count(100, 0.07) == 7
    assert diloco.quorum_count(3, 0.01) == 1


def test_a_round_merges_when_all_are_in_or_the_grace_is_over() -> None:
    decide = diloco.merge_decision
    assert decide(0, [], 4, 0.5, 10) == MergeDecision(
        "wait", "0 of 4 submissions are in, the quorum is 2"
    )
    waiting = decide(25, [20, 16], 4, 0.5, 10)
    assert (waiting.action, waiting.until) == ("wait", 30)
    assert decide(25, [20, 16, 24], 4, 0.5, 10).until == 30, "a third one moves nothing"
    assert decide(30, [20, 16], 4, 0.5, 10).action == "merge"
    assert decide(25, [20, 16], 2, 0.5, 10) == MergeDecision(
        "merge", "all 2 expected submissions are in"
    )
    assert decide(25, [], 0, 0.5, 10) == MergeDecision("abandon", "no worker is left in the round")


def test_no_grace_is_longer_than_what_it_waits_for_is_worth() -> None:
    decide = diloco.merge_decision
    # 15 devices wait for one that has worked for 600 s: a chance of one in four is worth 10 s.
    waiting = decide(600, [600.0] * 15, 16, 0.5, 120, opened=0)
    assert waiting.until == pytest.approx(610)
    assert decide(600, [600.0] * 15, 16, 0.5, 5, opened=0).until == 605
    assert decide(600, [600.0] * 8, 16, 0.5, 200, opened=0).until == 750
    assert decide(600, [600.0], 2, 0.5, 120, opened=0).until == 720, "one alone may be fast"
    quick = decide(10, [10.0] * 31, 32, 0.5, 120, opened=9.0)
    assert quick.until == pytest.approx(10.5), "never below what networks need"


def test_who_is_behind_may_finish_what_equal_machines_differ_by() -> None:
    assert diloco.finish_within(600, 0) == pytest.approx(12)
    assert diloco.finish_within(5, 0) == 0.5


def test_a_round_below_its_minimum_waits_for_whoever_is_at_work_and_is_never_merged() -> None:
    decide = diloco.merge_decision
    assert decide(25, [20], 1, 0.5, 10, minimum=2) == MergeDecision(
        "abandon",
        "1 of at least 2 submissions are in, and no other worker is left in the round",
    )
    assert decide(25, [20], 2, 0.5, 10, minimum=2).until == 30, "who is behind hands in what it has"
    slow = decide(3000, [20], 2, 0.5, 10, minimum=2, at_work=1)
    assert (slow.action, slow.until) == ("wait", None), "one is no version, the other one comes"
    assert decide(30, [20], 2, 0.5, 10, minimum=2).action == "abandon", "nobody is at work"
    assert decide(30, [20], 3, 0.5, 10, minimum=3, at_work=1).action == "wait", "below the quorum"
    assert decide(50, [20, 22], 5, 0.4, 10, minimum=4, at_work=1).action == "abandon"
    assert decide(50, [20, 22], 5, 0.4, 10, minimum=4, at_work=2).action == "wait"
    assert decide(32, [20, 22], 3, 0.5, 10, minimum=2).action == "merge"


@settings(max_examples=100, deadline=None)
@given(
    arrivals=st.lists(st.floats(0, 100), max_size=6),
    missing=st.integers(0, 6),
    quorum=st.floats(0.01, 1),
    grace=st.floats(0, 50),
    now=st.floats(100, 200),
    minimum=st.integers(1, 8),
    share=st.floats(0, 1),
)
def test_a_waiting_round_decides_at_the_time_it_names_and_never_merges_too_few(
    arrivals: list[float],
    missing: int,
    quorum: float,
    grace: float,
    now: float,
    minimum: int,
    share: float,
) -> None:
    expected, at_work = len(arrivals) + missing, round(share * missing)

    def decide(when: float) -> MergeDecision:
        return diloco.merge_decision(
            when, arrivals, expected, quorum, grace, minimum, at_work=at_work
        )

    decision = decide(now)
    if decision.action == "wait" and decision.until is not None:
        assert decision.until > now
        later = decide(decision.until)
        enough, reachable = len(arrivals) >= minimum, len(arrivals) + at_work >= minimum
        expected_action = "merge" if enough else "wait" if reachable else "abandon"
        assert (later.action, later.until) == (expected_action, None)
    if decision.action == "merge":
        assert len(arrivals) >= min(expected, diloco.quorum_count(expected, quorum))
        assert len(arrivals) >= minimum
    if decision.action == "abandon":
        assert len(arrivals) + at_work < minimum


def test_samples_of_the_dead_are_reissued_only_if_they_can_be_in_time() -> None:
    assert diloco.can_reissue(0, 99, MergeDecision("wait", "open"))[0]
    assert diloco.can_reissue(10, 5, MergeDecision("wait", "grace", 15))[0]
    assert not diloco.can_reissue(11, 5, MergeDecision("wait", "grace", 15))[0]
    assert not diloco.can_reissue(0, 1, MergeDecision("merge", "all in"))[0]


def test_late_work_is_taken_within_the_bound_and_by_the_next_take_of_its_round() -> None:
    takes = diloco.takes_late
    assert [takes(4, n, RoundSpec(staleness=1))[0] for n in (4, 5, 6)] == [True, True, False]
    assert [takes(4, n, RoundSpec(staleness=2))[0] for n in (4, 5, 6, 7)] == [True] * 3 + [False]
    assert not any(takes(4, n, RoundSpec(staleness=0))[0] for n in (4, 5))
    assert "at most 1" in takes(4, 6, RoundSpec())[1]
