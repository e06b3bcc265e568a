"""Error feedback on a node's disk: whatever dies, it is as it was, or as it shall be."""

from __future__ import annotations

import random
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from distribai import points
from distribai.core.architectures import manifest_of
from distribai.core.child import RESIDUAL
from distribai.core.spec import BlobRef, RoundSpec
from distribai.core.tasks import Assignment, OwnWork
from distribai.merge.delta import DeltaHeader, open_delta, write_delta_with_feedback
from distribai.merge.feedback import Feedback, open_residual, passing
from distribai.merge.version0 import make_version0
from distribai.merge.weights import Weights
from distribai.node.feedback import FOLDER, INDEX, MAX_OPEN, FeedbackStore, Sent, State, judged
from tests.node.helpers import SPEC, assignment

MODEL = replace(SPEC.model, config={"dim": 8, "layers": 1, "heads": 2, "ffn_dim": 8})
MANIFEST = manifest_of(MODEL.family, MODEL.config)
BASE = make_version0(MANIFEST, 0)
ROOM = 10**9


def task(
    name: str, codec: str = "int2", own: tuple[OwnWork, ...] = (), **changes: Any
) -> Assignment:
    spec = replace(SPEC, model=MODEL, rounds=RoundSpec(codec_up=codec))
    return assignment(name, spec=spec, own=own, **changes)


def flat(weights: Weights) -> np.ndarray:
    return np.concatenate([weights[t.name].reshape(-1) for t in passing(MANIFEST).tensors])


class Killed(Exception):
    """The daemon is gone."""


@dataclass
class Record:
    """What the hand's record says of a task that was trained to the end."""

    delta: BlobRef
    residual: BlobRef
    path: Path


@dataclass
class Machine:
    """A node's disk, and daemons that die on it; ``learned`` by (task, attempt)."""

    root: Path
    learned: dict[tuple[str, int], np.ndarray] = field(default_factory=dict)
    records: dict[str, Record] = field(default_factory=dict)
    store: FeedbackStore = field(init=False)

    def __post_init__(self) -> None:
        self.restart()

    def restart(self) -> None:
        self.store = FeedbackStore(self.root, ROOM)

    def train(self, work: Assignment) -> None:
        """What the child does, and the record of it."""
        owed = self.store.prepare(work, 0)
        assert owed is not None
        folder = self.root / "work" / work.task_id
        folder.mkdir(parents=True, exist_ok=True)
        rng = np.random.default_rng([work.attempt, *work.task_id.encode()])
        step = {
            t.name: rng.standard_normal(t.shape).astype(np.float32) for t in MANIFEST.travelling
        }
        local = {name: np.asarray(BASE[name] - step[name]) for name in step}
        self.learned[work.task_id, work.attempt] = flat(
            {name: np.asarray(BASE[name] - local[name]) for name in local}
        )
        told = DeltaHeader(
            work.job_id, work.task_id, work.attempt, 0, MANIFEST.hash,
            work.spec.codec_up_of(work.round), 8, 1,
        )  # fmt: skip
        path = folder / "delta"
        delta, residual = write_delta_with_feedback(
            path,
            MANIFEST,
            BASE,
            local,
            told,
            Feedback(Path(owed.kept) if owed.kept else None, folder / RESIDUAL),
            [Path(p) for p in owed.lost],
        )
        self.records[work.task_id] = Record(delta, residual, path)

    def adopt(self, work: Assignment) -> Path:
        record = self.records[work.task_id]
        folder = record.path.parent
        return self.store.adopt(work, 0, folder, record.path, record.delta, record.residual)

    def do(self, work: Assignment) -> None:
        """A whole task, from wherever an earlier daemon was with it."""
        if work.task_id not in self.records:
            self.train(work)
        assert self.adopt(work).is_file()
        self.store.settle(work, 0)

    def mass(self, job: Assignment) -> np.ndarray:
        """What is kept, and what is added back to it."""
        owed = self.store.prepare(job, 0)
        assert owed is not None
        found = np.zeros(sum(t.size for t in passing(MANIFEST).tensors))
        if owed.kept:
            found += flat(dict(open_residual(Path(owed.kept), MANIFEST).arrays))
        for path in owed.lost:
            found += sent(Path(path))
        return found


def sent(path: Path) -> np.ndarray:
    packed = open_delta(path, MANIFEST, {}).packed
    return flat(
        {
            t.name: packed.reader(t)(0, t.size, np.empty(t.size, np.float32)).copy()
            for t in passing(MANIFEST).tensors
        }
    )


def files(root: Path) -> set[str]:
    return {p.name for p in (root / FOLDER).rglob("*") if p.is_file()}


@pytest.fixture
def hooked() -> Iterator[list[str]]:
    """The names of the points that were reached."""
    reached: list[str] = []
    points.install(reached.append)
    yield reached
    points.install(None)


def test_a_newcomer_owes_nothing(tmp_path: Path) -> None:
    owed = FeedbackStore(tmp_path, ROOM).prepare(task("a"), 0)
    assert owed is not None
    assert (owed.kept, owed.lost) == ("", ())
    assert not (tmp_path / FOLDER).exists()


def test_sent_and_kept_are_what_was_learned_whatever_becomes_of_a_delta(tmp_path: Path) -> None:
    node, merged = Machine(tmp_path), []
    fates = {"a": True, "b": None, "c": False, "d": True, "e": None}
    told: tuple[OwnWork, ...] = ()
    for name, fate in fates.items():
        work = task(name, own=told)
        node.do(work)
        if fate:
            merged.append(sent(node.adopt(work)))
        if fate is not None:
            told += (OwnWork(name, 1, fate),)
        else:
            told = tuple(w for w in told if w.task_id != name)
    told = tuple(replace(w, merged=True) for w in told if w.task_id != "c")
    kept = node.mass(task("f", own=told))  # c came to nothing in the end, as b and e did
    total = sum(node.learned.values())
    np.testing.assert_allclose(sum(merged) + kept, total, rtol=1e-4, atol=1e-5)


def test_an_open_fate_counts_as_sent_and_its_delta_stays_on_disk(tmp_path: Path) -> None:
    node = Machine(tmp_path)
    node.do(task("a"))
    node.do(task("b", own=(OwnWork("a", 1, False),)))
    a = sent(node.store.find(task("a"), 0, node.records["a"].delta))  # type: ignore[arg-type]
    kept = node.mass(task("c", own=(OwnWork("a", 1, False), OwnWork("b", 1, True))))
    back = node.mass(task("c", own=(OwnWork("b", 1, True),)))
    np.testing.assert_allclose(back, kept + a, atol=1e-5)


def test_an_attempt_without_a_result_has_changed_nothing(tmp_path: Path) -> None:
    node = Machine(tmp_path)
    node.do(task("a"))
    mine = (OwnWork("a", 1, True),)
    before, disk = node.mass(task("b", own=mine)), files(tmp_path)
    node.train(task("b", own=mine))
    node.adopt(task("b", own=mine))
    node.store.undo(task("b"), 0)
    assert files(tmp_path) == disk
    node.train(task("c", own=mine))
    node.adopt(task("c", own=mine))  # dropped: nobody says so
    np.testing.assert_array_equal(node.mass(task("d", own=mine)), before)
    assert files(tmp_path) == disk


def test_a_task_that_is_trained_again_sends_the_same_bytes(tmp_path: Path) -> None:
    node = Machine(tmp_path)
    node.do(task("a"))
    work = task("b", own=())
    node.train(work)
    first = node.records["b"]
    node.train(work)
    assert node.records["b"] == first
    node.adopt(work)
    node.restart()
    node.train(work)  # the record was lost with the daemon
    assert node.records["b"] == first


def deaths(root: Path, die_at: int) -> tuple[np.ndarray, set[str], int]:
    """Three tasks, the first of which comes to nothing; the daemon dies once, at the so-manyeth
    point. What is kept then, the files, and how many points there were."""
    node, count = Machine(root), 0

    def hook(name: str) -> None:
        nonlocal count
        count += 1
        if count == die_at:
            raise Killed(name)

    points.install(hook)
    try:
        for work in (task("a"), task("b"), task("c", own=(OwnWork("b", 1, True),))):
            while True:
                try:
                    node.do(work)
                    break
                except Killed:
                    node.restart()
    finally:
        points.install(None)
    own = (OwnWork("b", 1, True), OwnWork("c", 1, False))
    return node.mass(task("d", own=own)), files(root), count


def test_killed_at_any_point_a_daemon_leaves_the_same_to_the_next(tmp_path: Path) -> None:
    wanted, disk, count = deaths(tmp_path / "calm", 0)
    assert count >= 3 * 12
    for die_at in range(1, count + 1):
        found, left, _ = deaths(tmp_path / str(die_at), die_at)
        np.testing.assert_array_equal(found, wanted, err_msg=str(die_at))
        assert left == disk


@given(seed=st.integers(0, 2**16), codec=st.sampled_from(["int4", "int2"]))
@settings(max_examples=25, deadline=None)
def test_no_mass_is_lost_in_any_life(
    seed: int, codec: str, tmp_path_factory: pytest.TempPathFactory
) -> None:
    """Deltas are merged, late, refused or dropped, and the daemon dies, in any order."""
    chance, node = random.Random(seed), Machine(tmp_path_factory.mktemp("node"))
    fates: dict[str, bool | None] = {}
    merged: dict[str, np.ndarray] = {}
    counted: list[str] = []

    def told() -> tuple[OwnWork, ...]:
        return tuple(OwnWork(n, 1, f) for n, f in fates.items() if f is not None)

    for number in range(12):
        name = f"t{number}"
        work = task(name, codec, told())
        if chance.random() < 0.2:  # it never comes to a result
            node.train(work)
            node.adopt(work)
            del node.learned[name, 1]
        else:
            node.do(work)
            counted.append(name)
            merged[name] = sent(node.adopt(work))
            fates[name] = chance.choice([True, False, None])
        if chance.random() < 0.3:
            node.restart()
        for late in [n for n, f in fates.items() if f is False]:
            if chance.random() < 0.5:
                fates[late] = chance.choice([True, None])
    fates = {n: bool(f) for n, f in fates.items() if f is not None}
    kept = node.mass(task("end", codec, told()))
    there = sum((merged[n] for n in fates), np.zeros_like(kept))
    total = sum((node.learned[n, 1] for n in counted), np.zeros_like(kept))
    np.testing.assert_allclose(there + kept, total, rtol=1e-3, atol=1e-4)


def test_a_torn_residual_is_named_and_begins_anew(tmp_path: Path) -> None:
    node = Machine(tmp_path)
    node.do(task("a"))
    owed = node.store.prepare(task("b", own=(OwnWork("a", 1, True),)), 0)
    assert owed is not None
    Path(owed.kept).write_bytes(b"torn")
    assert not node.mass(task("b", own=(OwnWork("a", 1, True),))).any()


def test_a_torn_index_is_named_and_begins_anew(tmp_path: Path) -> None:
    node = Machine(tmp_path)
    node.do(task("a"))
    for path in (tmp_path / FOLDER).rglob(INDEX):
        path.write_bytes(path.read_bytes()[:-3])
    node.restart()
    assert not node.mass(task("b")).any()
    assert files(tmp_path) == {INDEX}


def test_devices_and_jobs_keep_apart_and_an_ended_job_is_forgotten(tmp_path: Path) -> None:
    node = Machine(tmp_path)
    node.do(task("a"))
    assert node.store.jobs() == ["job_a"]
    assert not node.mass(task("b", job_id="job_b")).any()
    owed = node.store.prepare(task("b"), 1)
    assert owed is not None
    assert owed.kept == ""
    node.train(task("c"))
    node.store.forget(["job_a", "job_unheard"])
    assert (node.store.jobs(), files(tmp_path)) == ([], set())
    assert node.adopt(task("c")).is_file()  # it was on its way when the job ended
    node.store.settle(task("c"), 0)
    assert files(tmp_path) == set()


def test_disk_is_bounded_and_the_longest_idle_job_goes_first(tmp_path: Path) -> None:
    node = Machine(tmp_path)
    need = 12 * MANIFEST.parameters
    for name in ("job_a", "job_b"):
        node.do(task(f"of_{name}", job_id=name))
    import os

    for place, folder in enumerate(sorted((tmp_path / FOLDER).iterdir())):
        os.utime(folder, (place, place))
    size = sum(p.stat().st_size for p in (tmp_path / FOLDER).rglob("*"))
    node.store = FeedbackStore(tmp_path, need + size // 2 + 8192)
    assert node.store.prepare(task("c", job_id="job_c"), 0) is not None
    assert node.store.jobs() == ["job_b"]
    node.store = FeedbackStore(tmp_path, need - 1)
    assert node.store.prepare(task("d", job_id="job_c"), 0) is None


def test_fates_beyond_all_bounds_count_as_merged() -> None:
    many = State(None, tuple(Sent(f"t{n}", 1, BlobRef("a" * 64, 1)) for n in range(MAX_OPEN + 5)))
    own = tuple(OwnWork(f"t{n}", 1, False) for n in range(MAX_OPEN + 5))
    left = judged(many, task("next", own=own)).sent
    assert [s.task_id for s in left] == [f"t{n}" for n in range(5, MAX_OPEN + 5)]


def test_a_fate_under_another_attempt_is_not_one_s_own() -> None:
    state = State(None, (Sent("a", 1, BlobRef("a" * 64, 1)),))
    (left,) = judged(state, task("next", own=(OwnWork("a", 2, True),))).sent
    assert left.lost
