"""Sample ranges and the pool they are leased from."""

from __future__ import annotations

import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from distribai.core.ranges import Ranges, SamplePool, SampleRange, normalize, split, total


def positions(ranges: Ranges) -> list[int]:
    return [p for r in ranges for p in range(r.start, r.stop)]


disjoint = st.sets(st.integers(0, 200), max_size=60).map(
    lambda ps: normalize(SampleRange(p, p + 1) for p in ps)
)


@given(disjoint)
def test_joined_ranges_hold_the_same_positions_in_order(ranges: Ranges) -> None:
    assert positions(ranges) == sorted(positions(ranges))
    assert all(a.stop < b.start for a, b in itertools.pairwise(ranges))


@given(disjoint, st.data())
def test_a_split_loses_and_doubles_nothing(ranges: Ranges, data: st.DataObject) -> None:
    count = data.draw(st.integers(0, total(ranges)))
    head, rest = split(ranges, count)
    assert total(head) == count
    assert positions(head) + positions(rest) == positions(ranges)


def test_overlaps_empty_ranges_and_impossible_takes_are_refused() -> None:
    with pytest.raises(ValueError, match="overlap"):
        normalize([SampleRange(0, 3), SampleRange(2, 4)])
    with pytest.raises(ValueError, match="not a sample range"):
        SampleRange(3, 3)
    with pytest.raises(ValueError, match="cannot take"):
        split((SampleRange(0, 2),), 3)
    with pytest.raises(ValueError, match="at least one"):
        SamplePool().take(0)
    with pytest.raises(ValueError, match="never issued"):
        SamplePool(5).give_back([SampleRange(4, 6)])
    with pytest.raises(ValueError, match="overlap"):
        SamplePool(5, (SampleRange(0, 2),)).give_back([SampleRange(1, 3)])


class PoolMachine(RuleBasedStateMachine):
    """Leases are consumed or die in any order; nothing is ever lost or issued twice at a time."""

    def __init__(self) -> None:
        super().__init__()
        self.pool = SamplePool()
        self.leased: list[Ranges] = []
        self.consumed: list[int] = []

    @rule(count=st.integers(1, 40))
    def lease(self, count: int) -> None:
        ranges, self.pool = self.pool.take(count)
        assert total(ranges) == count
        self.leased.append(ranges)

    @precondition(lambda self: self.leased)
    @rule(data=st.data())
    def consume_a_part_and_give_the_rest_back(self, data: st.DataObject) -> None:
        ranges = self.leased.pop(data.draw(st.integers(0, len(self.leased) - 1)))
        done, rest = split(ranges, data.draw(st.integers(0, total(ranges))))
        self.consumed += positions(done)
        self.pool = self.pool.give_back(rest)

    @invariant()
    def every_issued_position_is_in_exactly_one_place(self) -> None:
        everywhere = self.consumed + positions(self.pool.returned)
        for ranges in self.leased:
            everywhere += positions(ranges)
        assert sorted(everywhere) == list(range(self.pool.cursor))


TestPoolMachine = PoolMachine.TestCase
