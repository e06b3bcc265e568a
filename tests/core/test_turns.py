"""Whose turn it is: tiers, ageing, fair shares, votes."""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from distribai.core.scheduling import FreeDevice, QueuedTask, match
from distribai.core.turns import (
    AGEING_S,
    MOST_WEIGHT,
    OVERDUE_S,
    PHASE_HEADS,
    TIERS,
    Accounts,
    Tag,
    Turns,
    in_turn,
    level_of,
    standing_of,
)
from tests.core.test_scheduling import task


def order(tasks: list[QueuedTask], now: float = 0.0) -> list[str]:
    return [t.task_id for t in in_turn(tasks, now, {})]


def test_a_task_rises_by_a_tier_for_each_ageing_time_that_it_waits() -> None:
    late = task("late", priority="P3")
    assert [level_of(late, AGEING_S * n - 1) for n in (1, 2, 3, 4, 9)] == [3, 2, 1, 0, 0]
    assert standing_of(late, AGEING_S) == "it has waited 900 s, and counts as P2 by now"
    assert standing_of(late, 5.0) == "it has waited 5 s"
    assert level_of(task("of the future", queued_at=10.0), 0.0) == 2


def test_a_vote_counts_like_age_and_so_does_a_phase() -> None:
    heavy, old = task("heavy", weight=2.0, queued_at=AGEING_S - 1), task("old")
    assert order([old, heavy], AGEING_S - 1) == ["heavy", "old"]
    assert order([old, task("later", weight=2.0, queued_at=AGEING_S + 1)]) == ["old", "later"]
    beyond = task("beyond", weight=1e9)
    assert order([beyond, task("most", weight=MOST_WEIGHT)]) == ["beyond", "most"], "by name"
    phases = [task(phase, phase=phase) for phase in ("evaluate", "train", "generate")]
    assert order(phases) == ["generate", "train", "evaluate"]


def test_equal_organizations_take_turns_whatever_each_queues() -> None:
    crowd = [task(f"a{i}", organization="a", queued_at=i) for i in range(5)]
    single = [task(f"b{i}", organization="b", queued_at=100.0 + i) for i in range(2)]
    assert order([*crowd, *single]) == ["a0", "b0", "a1", "b1", "a2", "a3", "a4"]


def test_who_waited_for_nothing_has_saved_nothing_up() -> None:
    busy = Accounts({("a", 2): Tag(90.0, 100.0)}, {2: 90.0})
    queue = [task(f"a{i}", organization="a") for i in range(3)]
    queue += [task(f"b{i}", organization="b", cost=5.0) for i in range(9)]
    turns, found = Turns(queue, 2, 0.0, busy), []
    for one in turns:
        turns.served(one)
        found.append(one.organization)
    # b starts at the level's virtual time, not at 0: it is two tasks ahead, not twenty.
    assert found[:4] == ["b", "b", "a", "b"] or found[:4] == ["b", "b", "a", "a"]


@given(
    weights=st.lists(st.sampled_from([0.5, 1.0, 2.0, 4.0]), min_size=2, max_size=4),
    costs=st.lists(st.floats(1.0, 100.0), min_size=4, max_size=4),
    per_round=st.integers(1, 3),
)
@settings(max_examples=40, deadline=None)
def test_shares_of_organizations_that_always_wait_differ_by_a_task_each_at_most(
    weights: list[float], costs: list[float], per_round: int
) -> None:
    """The bound of start-time fair queuing, over many separate matches of few devices."""
    devices = [FreeDevice(f"n{i}", 0, "cpu", 1000) for i in range(per_round)]
    tags: dict[tuple[str, int], Tag] = {}
    got: Counter[int] = Counter()
    served = [0.0] * len(weights)
    for turn in range(150):
        queue = [
            task(f"{o}-{turn}-{i}", organization=str(o), weight=w, cost=costs[o])
            for o, w in enumerate(weights)
            for i in range(per_round)
        ]
        by_id = {t.task_id: t for t in queue}
        matches, _ = match(queue, devices, 0.0, tags)
        for found in matches:
            tags[found.account, found.level] = found.tag
            number = int(found.account)
            got[number] += 1
            served[number] += by_id[found.task_id].cost / weights[number]
    assert min(got[o] for o in range(len(weights))) > 0
    for f in range(len(weights)):
        for g in range(f):
            bound = costs[f] / weights[f] + costs[g] / weights[g]
            assert abs(served[f] - served[g]) <= bound * (1 + 1e-9)


def test_splitting_work_into_many_jobs_gains_nothing() -> None:
    tags: dict[tuple[str, int], Tag] = {}
    got: Counter[str] = Counter()
    for turn in range(40):
        queue = [task(f"a{turn}", organization="a")]
        queue += [task(f"b{turn}-{i}", organization="b", job_id=f"j{i}") for i in range(30)]
        for found in match(queue, [FreeDevice("n", 0, "cpu", 0)], 0.0, tags)[0]:
            tags[found.account, found.level] = found.tag
            got[found.account] += 1
    assert got == {"a": 20, "b": 20}


ATTACKS = st.lists(
    st.fixed_dictionaries(
        {
            "priority": st.sampled_from(TIERS),
            "phase": st.sampled_from(sorted(PHASE_HEADS)),
            "weight": st.sampled_from([1.0, MOST_WEIGHT, 1e6]),
            "organization": st.sampled_from(["victim", "a", "b"]),
            "cost": st.sampled_from([1.0, 10.0]),
            "preferred": st.sampled_from([None, ("n", 0)]),
        }
    ),
    min_size=1,
    max_size=4,
)


@given(attack=ATTACKS, victim=st.sampled_from(TIERS), phase=st.sampled_from(sorted(PHASE_HEADS)))
@settings(max_examples=30, deadline=None)
def test_nothing_starves_whatever_keeps_arriving(
    attack: list[dict[str, Any]], victim: str, phase: str
) -> None:
    """One device, free once a minute, and an adversary who queues up to four times what it does.

    After an hour the victim is the oldest that is overdue but for the adversary's first tasks. A
    fifth of the time is theirs: between two of them others get at most four times the dearest of
    them, in tasks of 1 s.
    """
    step, dearest = 60.0, 10
    bound = int(OVERDUE_S / step) + (len(attack) + 1) * (4 * dearest + dearest)
    waiting = [task("victim", priority=victim, phase=phase, organization="victim")]
    tags: dict[tuple[str, int], Tag] = {}
    device = [FreeDevice("n", 0, "cpu", 1000)]
    for turn in range(bound):
        now = turn * step
        # The queue grows without end; the newest of it tell nothing new.
        room = max(0, 40 - len(waiting))
        waiting += [task(f"x{turn:05}-{i}", queued_at=now, **how) for i, how in enumerate(attack)][
            :room
        ]
        (found,) = match(waiting, device, now, tags)[0]
        tags[found.account, found.level] = found.tag
        if found.task_id == "victim":
            return
        waiting = [t for t in waiting if t.task_id != found.task_id]
    pytest.fail(f"it has waited for {bound} turns")


def test_the_overdue_get_their_share_and_no_more() -> None:
    """Two organizations: one with a backlog of hours, one whose tasks are all fresh."""
    tags: dict[tuple[str, int], Tag] = {}
    got: Counter[str] = Counter()
    now = 100 * AGEING_S
    for turn in range(200):
        old = [task(f"a{turn}-{i}", organization="a", priority="P0") for i in range(3)]
        new = [
            task(f"b{turn}-{i}", organization="b", priority="P0", queued_at=now) for i in range(3)
        ]
        (found,) = match([*old, *new], [FreeDevice("n", 0, "cpu", 0)], now, tags)[0]
        tags[found.account, found.level] = found.tag
        got[found.account] += 1
    assert got == {"a": 80, "b": 80, "*": 40}
