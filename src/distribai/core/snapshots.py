"""Which versions of a job keep a snapshot (ADR 0012); pure.

Every merge writes one, since the next merge starts from it: weights, momentum, and what the way
down keeps. Afterwards a job keeps that of version 0, of the newest version, of the newest ``keep``
versions whose number is a multiple of ``every``, and of all multiples of :func:`stride`. So no
version is more than :data:`CHAIN` - 1 encoded updates from a snapshot before it, however long the
job runs; the updates themselves are never deleted.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Collection, Sequence
from typing import Final

from distribai.core.spec import SnapshotSpec

CHAIN: Final = 64
"""Updates that a reference to weights names at most."""


def stride(every: int) -> int:
    """Versions between two snapshots that are kept for ever: the largest multiple of ``every``
    that is at most :data:`CHAIN`.

    Args:
        every: from 1 to :data:`CHAIN`.
    """
    return every * (CHAIN // every)


def is_kept(version: int, newest: int, every: int, keep: int) -> bool:
    """Whether a job whose newest version is ``newest`` keeps the snapshot of ``version`` for good,
    or for now."""
    if version in (0, newest) or version % stride(every) == 0:
        return True
    return version % every == 0 and version > newest - newest % every - keep * every


def to_let_go(
    present: Sequence[int], newest: int, rule: SnapshotSpec, most: int, bases: Collection[int]
) -> tuple[int, ...]:
    """The versions whose snapshots nothing needs any more.

    Args:
        present: versions that have a snapshot, ascending; 0 and ``newest`` among them.
        newest: the job's newest version.
        rule: the job's wish.
        most: ``keep`` is this at most.
        bases: versions that open tasks start from: what their nodes were told to fetch stays, the
            last snapshot before each, and the last one before it that nodes keep themselves.
    """
    keep = min(rule.keep, most)
    regular = [v for v in present if v % rule.every == 0]
    needed = {
        known[bisect_right(known, base) - 1] for base in bases for known in (present, regular)
    }
    return tuple(v for v in present if not is_kept(v, newest, rule.every, keep) and v not in needed)
