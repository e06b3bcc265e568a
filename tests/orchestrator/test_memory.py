"""Full garbage collections of a process that keeps much for long."""

from __future__ import annotations

import gc
import weakref

from distribai.orchestrator.memory import WHOLE_S, old_objects_left_alone


class Thing:
    """Something that a ring can be made of."""

    def __init__(self) -> None:
        self.other: object = None


def ring() -> weakref.ref[Thing]:
    """Two things that hold each other and are garbage."""
    one, two = Thing(), Thing()
    one.other, two.other = two, one
    return weakref.ref(one)


def visited() -> int:
    """How many objects the next full collection visits."""
    return len(gc.get_objects())


def test_a_full_collection_visits_what_is_new_alone() -> None:
    kept = [Thing() for _ in range(20_000)]
    with old_objects_left_alone():
        before = visited()
        gc.collect()
        assert visited() < before - len(kept)
        more = [Thing() for _ in range(1000)]
        assert visited() < len(kept), "however much there is that is old"
        gc.collect()
        assert len(more) == 1000
    assert visited() > len(kept), "afterwards it is as it was"


def test_new_rings_are_freed_at_once_and_old_ones_now_and_then() -> None:
    now = 0.0
    with old_objects_left_alone(lambda: now):
        fresh = ring()
        gc.collect()
        assert fresh() is None

        kept = Thing()
        kept.other = Thing()
        kept.other.other = kept  # type: ignore[attr-defined]
        old = weakref.ref(kept)
        gc.collect()
        del kept
        gc.collect()
        assert old() is not None, "it was spared"
        now = WHOLE_S
        gc.collect()
        gc.collect()
        assert old() is None
