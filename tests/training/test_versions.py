from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from distribai.core.spec import BlobRef
from distribai.core.tasks import UpdateRef, WeightsRef
from distribai.errors import InternalFault
from distribai.training.versions import way_to


def target(version: int, sizes: list[int], snapshot: tuple[int, int] | None = None) -> WeightsRef:
    """``sizes`` of the last updates; ``snapshot`` its version and size."""
    first = version - len(sizes) + 1
    updates = tuple(
        UpdateRef(first + i, BlobRef(f"u{first + i}", size), f"h{first + i}")
        for i, size in enumerate(sizes)
    )
    if snapshot is None:
        return WeightsRef(version, f"h{version}", updates=updates)
    return WeightsRef(version, f"h{version}", BlobRef("s", snapshot[1]), snapshot[0], updates)


def test_who_holds_the_version_before_takes_one_update() -> None:
    way = way_to(target(3, [5, 5], (1, 100)), 2)
    assert (way.start, [u.version for u in way.updates]) == ("held", [3])


def test_a_newcomer_takes_the_snapshot_and_what_follows_it() -> None:
    ref = target(3, [5, 5], (1, 100))
    way = way_to(ref, None)
    assert (way.start, [u.version for u in way.updates]) == ("snapshot", [2, 3])
    assert [b.sha256 for b in way.blobs(ref)] == ["s", "u2", "u3"]


def test_a_newcomer_without_a_snapshot_starts_from_the_seed() -> None:
    assert way_to(target(2, [5, 5]), None).start == "seed"
    assert way_to(target(0, []), None).updates == ()


def test_a_small_snapshot_beats_many_updates() -> None:
    assert way_to(target(4, [50, 50, 50], (4, 100)), 1).start == "snapshot"


def test_who_is_too_far_behind_takes_the_snapshot() -> None:
    assert way_to(target(9, [1, 1], (7, 100)), 3).start == "snapshot"


def test_a_reference_that_leads_nowhere_is_an_error() -> None:
    with pytest.raises(InternalFault, match="neither"):
        way_to(target(5, [1, 1]), 2)


@given(
    version=st.integers(0, 8),
    data=st.data(),
    held=st.one_of(st.none(), st.integers(0, 8)),
)
@settings(max_examples=60)
def test_every_way_ends_at_the_target_without_a_gap(
    version: int, data: st.DataObject, held: int | None
) -> None:
    sizes = data.draw(st.lists(st.integers(1, 50), max_size=version))
    snapshot = (
        None
        if data.draw(st.booleans())
        else (data.draw(st.integers(version - len(sizes), version)), data.draw(st.integers(1, 99)))
    )
    ref = target(version, sizes, snapshot)
    try:
        way = way_to(ref, held)
    except InternalFault:
        assert snapshot is None
        assert len(sizes) < version
        return
    start = {"held": held, "seed": 0, "snapshot": ref.snapshot_version}[way.start]
    assert start is not None
    assert [u.version for u in way.updates] == list(range(start + 1, version + 1))
