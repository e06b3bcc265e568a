"""Domain values in JSON columns, and what rows leave out."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from distribai.core.ranges import Ranges, SampleRange
from distribai.core.spec import BlobRef


def ranges_to_json(ranges: Iterable[SampleRange]) -> list[list[int]]:
    """``[[start, stop], ...]`` in the same order."""
    return [[r.start, r.stop] for r in ranges]


def ranges_from_json(value: Sequence[Sequence[int]]) -> Ranges:
    """What :func:`ranges_to_json` wrote."""
    return tuple(SampleRange(start, stop) for start, stop in value)


def blob_or_none(sha256: str, size: int) -> BlobRef | None:
    """A reference, None for the empty hash that stands for no blob."""
    return BlobRef(sha256, size) if sha256 else None
