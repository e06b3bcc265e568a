from __future__ import annotations

from hypothesis import given, settings
from hypothesis import strategies as st

from distribai.core.snapshots import CHAIN, is_kept, stride, to_let_go
from distribai.core.spec import SnapshotSpec


def test_a_job_keeps_the_first_the_last_the_newest_of_its_cadence_and_one_of_sixty() -> None:
    kept = [v for v in range(134) if is_kept(v, 133, 10, 2)]
    assert kept == [0, 60, 120, 130, 133]


def test_what_open_tasks_were_told_to_fetch_stays() -> None:
    rule = SnapshotSpec(every=4, keep=1)
    assert to_let_go([0, 1, 2, 3, 4, 5, 6, 7, 8, 9], 9, rule, 100, ()) == (1, 2, 3, 4, 5, 6, 7)
    assert to_let_go([0, 1, 2, 3, 4, 5, 6, 7, 8, 9], 9, rule, 100, (6,)) == (1, 2, 3, 5, 7)
    assert to_let_go([0, 4, 8, 9], 9, rule, 100, (6,)) == (), "its way begins at 4"


def test_the_operator_keeps_fewer_than_a_job_wishes() -> None:
    present = [0, 1, 2, 3, 4]
    assert to_let_go(present, 4, SnapshotSpec(1, 4), 100, ()) == ()
    assert to_let_go(present, 4, SnapshotSpec(1, 4), 2, ()) == (1, 2)


@settings(deadline=None)
@given(every=st.integers(1, CHAIN), keep=st.integers(1, 50), newest=st.integers(0, 1000))
def test_no_version_is_further_from_a_kept_snapshot_than_a_reference_reaches(
    every: int, keep: int, newest: int
) -> None:
    assert 1 <= stride(every) <= CHAIN
    assert not stride(every) % every
    last = 0
    for version in range(newest + 1):
        if is_kept(version, newest, every, keep):
            last = version
        assert version - last < CHAIN


@settings(deadline=None)
@given(data=st.data(), every=st.integers(1, 12), keep=st.integers(1, 4))
def test_looks_at_any_moment_leave_every_open_task_its_way(
    data: st.DataObject, every: int, keep: int
) -> None:
    rule = SnapshotSpec(every, keep)
    present, told = [0], {}  # type: ignore[var-annotated]
    for newest in range(data.draw(st.integers(1, 40))):
        if newest:
            present.append(newest)
        if data.draw(st.booleans()):  # a task of this version, or a sample of an older one
            base = data.draw(st.sampled_from([newest, data.draw(st.integers(0, newest))]))
            told[base] = {
                max(v for v in present if v <= base),
                max(v for v in present if v <= base and not v % every),
            }
        if told and data.draw(st.booleans()):
            del told[data.draw(st.sampled_from(sorted(told)))]
        if data.draw(st.booleans()):
            gone = to_let_go(present, newest, rule, 100, told.keys())
            present = [v for v in present if v not in gone]
            assert to_let_go(present, newest, rule, 100, told.keys()) == ()
        assert {0, newest} <= set(present)
        for snapshots in told.values():
            assert snapshots <= set(present)
        known = [v for v in range(newest + 1) if is_kept(v, newest, every, keep)]
        assert set(known) <= set(present)
