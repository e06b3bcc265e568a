from __future__ import annotations

from collections.abc import Iterable, Mapping
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from distribai.core.spec import BlobRef
from distribai.core.tasks import UpdateRef, WeightsRef
from distribai.errors import Integrity, InternalFault
from distribai.merge.update import UpdateHeader, apply_update, write_update
from distribai.merge.version0 import make_version0
from distribai.merge.weights import Weights, weights_hash, write_weights
from distribai.training.versions import CanonicalCopy, way_to
from tests.merge.support import ODD, trained


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


class _Line:
    """Versions of one history of a job, and the files of the grid that made them."""

    def __init__(self, folder: Path, start: Weights, seed: int) -> None:
        folder.mkdir()
        self.folder, self.weights = folder, {0: start}
        self.updates: dict[int, UpdateRef] = {}
        self.snapshots: dict[int, BlobRef] = {}
        for version in (1, 2):
            base = self.weights[version - 1]
            change = trained(ODD, make_version0(ODD, seed), 10 * seed + version)
            header = UpdateHeader("job", version, ODD.hash, "fp32")
            values = {n: np.asarray(a) for n, a in change.items()}
            update = write_update(folder / "update", ODD, values, header)
            self.weights[version] = apply_update(ODD, base, folder / "update")
            digest = weights_hash(ODD, self.weights[version])
            self.updates[version] = UpdateRef(version, self._keep("update", update), digest)
            snapshot = write_weights(folder / "snapshot", ODD, self.weights[version])
            self.snapshots[version] = self._keep("snapshot", snapshot)

    def _keep(self, name: str, blob: BlobRef) -> BlobRef:
        (self.folder / name).rename(self.folder / blob.sha256)
        return blob

    def target(self, version: int) -> WeightsRef:
        update = self.updates[version]
        return WeightsRef(version, update.weights_hash, self.snapshots[version], version, (update,))

    def fetch(self, blobs: Iterable[BlobRef]) -> Mapping[str, Path]:
        return {b.sha256: self.folder / b.sha256 for b in blobs}


def test_who_holds_a_version_of_a_grid_that_was_restored_since_starts_from_the_snapshot(
    tmp_path: Path,
) -> None:
    start = make_version0(ODD, 1)
    lost, present = _Line(tmp_path / "lost", start, 2), _Line(tmp_path / "present", start, 3)
    copy = CanonicalCopy("job", ODD, 1)
    copy.advance(lost.target(1), lost.fetch)
    assert copy.hash == lost.updates[1].weights_hash
    copy.advance(present.target(2), present.fetch)
    assert (copy.version, copy.hash) == (2, present.updates[2].weights_hash)
    assert copy.weights is not None
    assert weights_hash(ODD, copy.weights) == copy.hash


def test_a_grid_whose_files_do_not_lead_to_its_version_is_named(tmp_path: Path) -> None:
    start = make_version0(ODD, 1)
    line, other = _Line(tmp_path / "line", start, 2), _Line(tmp_path / "other", start, 3)
    copy = CanonicalCopy("job", ODD, 1)
    copy.advance(line.target(1), line.fetch)
    wrong = WeightsRef(2, "0" * 64, other.snapshots[2], 2, (other.updates[2],))
    with pytest.raises(Integrity, match="Version 2 hashes to"):
        copy.advance(wrong, other.fetch)
    assert copy.weights is None


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
