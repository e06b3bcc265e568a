"""Half-open ranges of sample positions, and the pool they are leased from (A8).

Positions count on over epochs: position ``p`` of a data set with ``n`` training sequences is entry
``p mod n`` of epoch ``p div n``. A job's pool is a cursor (everything at or beyond it was never
issued) and the ranges that came back from dead, rejected or superseded tasks.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass


@dataclass(frozen=True, slots=True, order=True)
class SampleRange:
    """Positions ``start <= p < stop``; never empty."""

    start: int
    stop: int

    def __post_init__(self) -> None:
        if not 0 <= self.start < self.stop:
            raise ValueError(f"not a sample range: {self.start}..{self.stop}")

    def __len__(self) -> int:
        return self.stop - self.start


Ranges = tuple[SampleRange, ...]


def total(ranges: Iterable[SampleRange]) -> int:
    """Positions in ``ranges``."""
    return sum(len(r) for r in ranges)


def normalize(ranges: Iterable[SampleRange]) -> Ranges:
    """Sorted, adjacent ranges joined.

    Raises:
        ValueError: two ranges overlap; a position would be consumed twice.
    """
    out: list[SampleRange] = []
    for r in sorted(ranges):
        if out and r.start < out[-1].stop:
            raise ValueError(f"sample ranges overlap at {r.start}")
        if out and r.start == out[-1].stop:
            out[-1] = SampleRange(out[-1].start, r.stop)
        else:
            out.append(r)
    return tuple(out)


def split(ranges: Ranges, count: int) -> tuple[Ranges, Ranges]:
    """The first ``count`` positions of ``ranges`` in their order, and the rest.

    Raises:
        ValueError: ``ranges`` hold fewer than ``count`` positions.
    """
    if count > total(ranges) or count < 0:
        raise ValueError(f"cannot take {count} of {total(ranges)} positions")
    head: list[SampleRange] = []
    rest: list[SampleRange] = []
    for r in ranges:
        if count >= len(r):
            head.append(r)
            count -= len(r)
        elif count == 0:
            rest.append(r)
        else:
            head.append(SampleRange(r.start, r.start + count))
            rest.append(SampleRange(r.start + count, r.stop))
            count = 0
    return tuple(head), tuple(rest)


@dataclass(frozen=True, slots=True)
class SamplePool:
    """What of a job's endless sample order is still to be issued."""

    cursor: int = 0
    returned: Ranges = ()

    def take(self, count: int) -> tuple[Ranges, SamplePool]:
        """Lease ``count`` positions: returned ones first, lowest first, then new ones."""
        if count < 1:
            raise ValueError("a lease takes at least one position")
        again = min(count, total(self.returned))
        head, rest = split(self.returned, again)
        fresh = count - again
        if fresh:
            head = (*head, SampleRange(self.cursor, self.cursor + fresh))
        return normalize(head), SamplePool(self.cursor + fresh, rest)

    def give_back(self, ranges: Iterable[SampleRange]) -> SamplePool:
        """The pool with ``ranges`` to be issued again.

        Raises:
            ValueError: a range is in the pool already, or was never issued.
        """
        back = tuple(ranges)
        if any(r.stop > self.cursor for r in back):
            raise ValueError("a sample range comes back that was never issued")
        return SamplePool(self.cursor, normalize((*self.returned, *back)))
