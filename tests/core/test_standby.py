"""The short list of free devices: the same matching as among all of them."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from distribai.core.needs import UNMEASURED, Capacity, Needs
from distribai.core.scheduling import FreeDevice, QueuedTask, match
from distribai.core.standby import Standby

NODES = [f"n{i}" for i in range(8)]
node = st.sampled_from(NODES)
some = st.frozensets(node, max_size=3)


@st.composite
def tasks(draw: st.DrawFn, number: int) -> QueuedTask:
    return QueuedTask(
        task_id=f"t{number}",
        job_id=draw(st.sampled_from(["a", "b"])),
        phase="train",
        priority=draw(st.sampled_from(["P0", "P1", "P3"])),
        queued_at=draw(st.sampled_from([0.0, 4000.0, 5000.0])),
        memory_mb=draw(st.sampled_from([0, 10, 20])),
        device=draw(st.sampled_from(["any", "cuda", "cpu"])),
        base_version=draw(st.integers(0, 3)),
        preferred=draw(st.none() | st.tuples(node, st.integers(0, 1))),
        last_failed_node=draw(st.just("") | node),
        excluded=draw(st.just(frozenset()) | some),
        only=draw(st.just("") | st.just("") | node),
        among=draw(st.none() | st.none() | some),
        needs=Needs(gflops=draw(st.sampled_from([0.0, 0.0, 5.0]))),
        organization=draw(st.sampled_from(["", "x"])),
    )


@st.composite
def free(draw: st.DrawFn) -> FreeDevice:
    return FreeDevice(
        draw(node),
        draw(st.integers(0, 1)),
        draw(st.sampled_from(["cuda", "mps", "cpu"])),
        draw(st.sampled_from([0, 10, 15, 30])),
        draw(st.dictionaries(st.sampled_from(["a", "b"]), st.integers(0, 4), max_size=2)),
        draw(st.sampled_from([UNMEASURED, Capacity(gflops=9.0)])),
    )


def standby(devices: list[FreeDevice]) -> Standby:
    made = Standby()
    for device in devices:
        made.put(device)
    return made


def by_key(devices: list[FreeDevice]) -> dict[tuple[str, int], FreeDevice]:
    return {(d.node_id, d.index): d for d in devices}


@given(st.data(), st.lists(free(), max_size=16), some)
def test_the_short_list_is_matched_as_all_devices_are(
    data: st.DataObject, devices: list[FreeDevice], but: frozenset[str]
) -> None:
    queued = [data.draw(tasks(i)) for i in range(data.draw(st.integers(1, 4)))]
    everything = [d for d in by_key(devices).values() if d.node_id not in but]
    short = standby(devices).shortlist(queued, but)
    assert match(queued, short, 5000.0)[0] == match(queued, everything, 5000.0)[0]
    assert {(d.node_id, d.index) for d in short} <= by_key(everything).keys()


def test_one_task_among_ten_thousand_devices_has_a_list_of_one() -> None:
    ready = standby([FreeDevice(f"n{i}", 0, "cpu", 0) for i in range(10_000)])
    assert len(ready.shortlist([QueuedTask("t", "a", "generate", "P0", 0.0)])) == 1


@given(st.lists(free(), max_size=30), st.lists(st.tuples(node, st.integers(0, 1)), max_size=30))
def test_what_was_put_and_dropped_is_as_if_it_had_never_been_otherwise(
    devices: list[FreeDevice], gone: list[tuple[str, int]]
) -> None:
    ready, left = standby(devices), by_key(devices)
    for key in gone:
        ready.drop(*key)
        left.pop(key, None)
    assert by_key(list(ready)) == left
    assert len(ready) == len(left)
    for name in NODES:
        assert ready.on(name) == [left[k] for k in sorted(left) if k[0] == name]
    queued = [QueuedTask(f"t{i}", "a", "train", "P1", 0.0, base_version=1) for i in range(3)]
    again = standby(list(left.values()))
    assert by_key(ready.shortlist(queued)) == by_key(again.shortlist(queued))
