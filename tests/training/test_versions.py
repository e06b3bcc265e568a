from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from distribai.core.child import Kept, Run
from distribai.core.spec import BlobRef, DataSpec, JobSpec, ModelSpec
from distribai.core.tasks import Assignment, KeptRef, UpdateRef, WeightsRef
from distribai.core.ways import NOTHING
from distribai.errors import Integrity
from distribai.merge.update import UpdateHeader, apply_update, write_update
from distribai.merge.version0 import make_version0
from distribai.merge.weights import Weights, weights_hash, write_weights
from distribai.training.versions import CanonicalCopy, reach
from tests.merge.support import ODD, trained


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


def run(
    base: WeightsRef, folder: Path, here: Mapping[str, int] = NOTHING, room: int = 10**9
) -> Run:
    """A task on ``base``, as the daemon tells of it."""
    spec = JobSpec("odd", ModelSpec("odd", {}), DataSpec(), 1)
    task = Assignment("job", "task", 1, base.version, "evaluate", spec, base, None)
    return Run(task, str(folder), "cpu", 1, here=here, room=room)


def test_a_version_that_the_grid_keeps_is_put_on_disk_and_an_older_one_is_reached_from_there(
    tmp_path: Path,
) -> None:
    line = _Line(tmp_path / "line", make_version0(ODD, 1), 2)
    kept = KeptRef(1, line.snapshots[1])
    first = WeightsRef(1, line.updates[1].weights_hash, updates=(line.updates[1],), kept=kept)
    second = replace(line.target(2), kept=kept)
    told: list[object] = []
    copy = CanonicalCopy("job", ODD, 1)
    reach(copy, run(first, tmp_path), line.fetch, told.append)
    (message,) = told
    assert message == Kept(str(tmp_path / "kept.safetensors"), line.snapshots[1])
    assert (tmp_path / "kept.safetensors").read_bytes() == (
        line.folder / line.snapshots[1].sha256
    ).read_bytes(), "the same file, to the byte"
    reach(copy, run(second, tmp_path), line.fetch, told.append)
    here = {b.sha256: b.size for b in (line.snapshots[1], line.updates[2].blob)}

    def only_what_is_here(blobs: Iterable[BlobRef]) -> Mapping[str, Path]:
        wanted = list(blobs)
        assert {b.sha256 for b in wanted} <= set(here)
        return line.fetch(wanted)

    again = replace(line.target(1), updates=(), kept=kept)
    reach(copy, run(again, tmp_path, here), only_what_is_here, told.append)
    assert (copy.version, copy.hash) == (1, line.updates[1].weights_hash)
    newcomer = CanonicalCopy("job", ODD, 1)
    reach(newcomer, run(second, tmp_path, here), only_what_is_here, told.append)
    assert (newcomer.version, newcomer.hash) == (2, line.updates[2].weights_hash)
    assert len(told) == 1, "it is there already"


def test_nothing_is_put_on_a_disk_without_room(tmp_path: Path) -> None:
    line = _Line(tmp_path / "line", make_version0(ODD, 1), 2)
    kept = KeptRef(1, line.snapshots[1])
    first = WeightsRef(1, line.updates[1].weights_hash, updates=(line.updates[1],), kept=kept)
    told: list[object] = []
    copy = CanonicalCopy("job", ODD, 1)
    reach(copy, run(first, tmp_path, room=10), line.fetch, told.append)
    assert copy.version == 1
    assert told == []
    assert not (tmp_path / "kept.safetensors").exists()


def test_a_snapshot_that_was_begun_leads_to_a_later_version(tmp_path: Path) -> None:
    line = _Line(tmp_path / "line", make_version0(ODD, 1), 2)
    begun = [KeptRef(1, line.snapshots[1])]
    here = {line.snapshots[1].sha256: line.snapshots[1].size}
    asked: list[str] = []

    def fetch(blobs: Iterable[BlobRef]) -> Mapping[str, Path]:
        wanted = list(blobs)
        asked.extend(b.sha256 for b in wanted)
        return line.fetch(wanted)

    copy = CanonicalCopy("job", ODD, 1)
    copy.advance(line.target(2), fetch, here, begun)
    assert (copy.version, copy.hash) == (2, line.updates[2].weights_hash)
    assert asked == [line.snapshots[1].sha256, line.updates[2].blob.sha256]


def test_a_begun_snapshot_that_is_gone_or_of_another_history_costs_no_attempt(
    tmp_path: Path,
) -> None:
    start = make_version0(ODD, 1)
    lost, line = _Line(tmp_path / "lost", start, 2), _Line(tmp_path / "line", start, 3)
    begun = [KeptRef(1, lost.snapshots[1])]
    here = {lost.snapshots[1].sha256: lost.snapshots[1].size}

    def without(blobs: Iterable[BlobRef]) -> Mapping[str, Path]:
        return line.fetch(b for b in blobs if b != lost.snapshots[1])

    def of_both(blobs: Iterable[BlobRef]) -> Mapping[str, Path]:
        folders = (lost.folder, line.folder)
        return {
            b.sha256: next(f / b.sha256 for f in folders if (f / b.sha256).exists()) for b in blobs
        }

    for fetch in (without, of_both):
        copy = CanonicalCopy("job", ODD, 1)
        copy.advance(line.target(2), fetch, here, begun)
        assert (copy.version, copy.hash) == (2, line.updates[2].weights_hash)
