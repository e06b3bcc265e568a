from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from distribai.core.spec import BlobRef
from distribai.core.tasks import KeptRef, UpdateRef, WeightsRef
from distribai.core.ways import way_to
from distribai.errors import InternalFault


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
    assert [b.sha256 for b in way.blobs] == ["s", "u2", "u3"]


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
@settings(max_examples=60, deadline=None)
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


def test_a_newcomer_makes_version_0_itself_where_all_updates_are_fewer_bytes() -> None:
    snapshot = BlobRef("5" * 64, 100)
    small = tuple(UpdateRef(v, BlobRef(f"{v}" * 64, 30), f"h{v}") for v in (1, 2, 3))
    target = WeightsRef(3, "h3", snapshot, 3, small)
    assert way_to(target, None).start == "snapshot"
    assert way_to(target, None, from_seed=True).start == "seed"
    assert way_to(target, 2, from_seed=True).start == "held"
    late = WeightsRef(3, "h3", snapshot, 3, small[1:])
    assert way_to(late, None, from_seed=True).start == "snapshot"
    large = tuple(UpdateRef(v, BlobRef(f"{v}" * 64, 40), f"h{v}") for v in (1, 2, 3))
    assert way_to(WeightsRef(3, "h3", snapshot, 3, large), None, True).start == "snapshot"


def test_who_has_an_earlier_snapshot_and_the_updates_on_disk_fetches_nothing() -> None:
    ref = replace(target(12, [50, 50], (12, 100)), kept=KeptRef(10, BlobRef("k", 100)))
    assert way_to(ref, None).blobs == (BlobRef("s", 100),), "a newcomer takes the fresh one"
    whole = {"k": 100, "u11": 50, "u12": 50}
    way = way_to(ref, None, here=whole)
    assert way.bytes(whole) == 0
    assert [b.sha256 for b in way.blobs] == ["k", "u11", "u12"]
    some = {"k": 100, "u11": 50}
    assert [b.sha256 for b in way_to(ref, None, here=some).blobs] == ["k", "u11", "u12"]
    assert way_to(ref, 11, here=whole).start == "held", "the shortest of equal ones"


def test_what_is_on_disk_does_not_tempt_to_a_way_that_fetches_more() -> None:
    ref = replace(target(13, [60, 60, 60], (13, 100)), kept=KeptRef(10, BlobRef("k", 100)))
    assert [b.sha256 for b in way_to(ref, None, here={"k": 100}).blobs] == ["s"]
    assert way_to(ref, 11, here={"s": 100}).blobs == (BlobRef("s", 100),)


def test_a_snapshot_that_is_partly_here_is_finished_though_the_version_has_moved_on() -> None:
    ref = target(13, [10, 10], (13, 100))
    begun = [KeptRef(11, BlobRef("b", 100))]
    way = way_to(ref, None, here={"b": 80}, begun=begun)
    assert [b.sha256 for b in way.blobs] == ["b", "u12", "u13"]
    assert way.bytes({"b": 80}) == 40
    fresh = way_to(ref, None, here={"b": 10}, begun=begun)
    assert [b.sha256 for b in fresh.blobs] == ["s"], "less is here than the updates since take"
    assert way_to(ref, 12, here={"b": 80}, begun=begun).start == "held"
    assert way_to(ref, None, here={"s": 90, "b": 80}, begun=begun).whole == ref.snapshot


def test_a_snapshot_to_which_the_updates_do_not_reach_back_is_no_start() -> None:
    ref = target(13, [10, 10], (13, 100))
    for version in (10, 14):
        begun = [KeptRef(version, BlobRef("b", 100))]
        assert way_to(ref, None, here={"b": 100}, begun=begun).whole == ref.snapshot


@given(data=st.data(), version=st.integers(1, 20), from_seed=st.booleans())
@settings(max_examples=100, deadline=None)
def test_no_way_that_a_reference_offers_takes_fewer_bytes(
    data: st.DataObject, version: int, from_seed: bool
) -> None:
    sizes = data.draw(st.lists(st.integers(1, 50), max_size=version))
    first = version - len(sizes)
    whole = data.draw(st.integers(first, version)), data.draw(st.integers(1, 200))
    kept = data.draw(st.none() | st.integers(first, version))
    ref = target(version, sizes, whole)
    if kept is not None:
        ref = replace(ref, kept=KeptRef(kept, BlobRef("k", whole[1])))
    held = data.draw(st.none() | st.integers(0, version))
    begun = data.draw(st.lists(st.integers(0, 22), max_size=2))
    earlier = [KeptRef(v, BlobRef(f"b{i}", whole[1])) for i, v in enumerate(begun)]
    blobs = [*ref.blobs, *(e.blob for e in earlier)]
    here = {b.sha256: data.draw(st.integers(0, b.size)) for b in blobs if data.draw(st.booleans())}
    way = way_to(ref, held, from_seed, here, earlier)
    start = way.updates[0].version - 1 if way.updates else version
    assert [u.version for u in way.updates] == list(range(start + 1, version + 1))
    if way.whole is not None and way.whole in [e.blob for e in earlier]:
        assert KeptRef(start, way.whole) in earlier, "the updates follow the version it is of"

    def cost(start: int, *blobs: BlobRef) -> int:
        used = (*blobs, *(u.blob for u in ref.updates if u.version > start))
        return sum(b.size - here.get(b.sha256, 0) for b in used)

    assert ref.snapshot is not None
    others = [cost(whole[0], ref.snapshot)]
    if kept is not None and ref.kept is not None:
        others.append(cost(kept, ref.kept.blob))
    others += [cost(e.version, e.blob) for e in earlier if first <= e.version <= version]
    if held is not None and held >= first:
        others.append(cost(held))
    if from_seed and first == 0:
        others.append(cost(0))
    assert way.bytes(here) == min(others)
