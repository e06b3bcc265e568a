"""Matching of tasks and devices."""

import random
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from distribai.core.scheduling import FreeDevice, Match, QueuedTask, match


def task(name: str, **fields: Any) -> QueuedTask:
    defaults: dict[str, Any] = {
        "job_id": "job",
        "phase": "train",
        "priority": "P2",
        "queued_at": 0.0,
    }
    return QueuedTask(name, **{**defaults, **fields})


def cpu(node: str, memory_mb: int = 1000, **warm: int) -> FreeDevice:
    return FreeDevice(node, 0, "cpu", memory_mb, warm)


def matched(tasks: list[QueuedTask], devices: list[FreeDevice]) -> dict[str, str]:
    return {m.task_id: m.node_id for m in match(tasks, devices, 10.0)[0]}


def test_tiers_come_before_phases_and_phases_before_age() -> None:
    tasks = [
        task("old-evaluate", phase="evaluate", queued_at=1),
        task("train", queued_at=5),
        task("generate", phase="generate", queued_at=9),
        task("urgent", priority="P0", phase="evaluate", queued_at=9),
        task("older-train", queued_at=4),
        task("late", priority="P3", queued_at=0),
    ]
    devices = [cpu(f"n{i}") for i in range(6)]
    order = [m.task_id for m in match(tasks, devices, 10.0)[0]]
    assert order == ["urgent", "generate", "older-train", "train", "old-evaluate", "late"]
    assert set(matched(tasks, devices[:2])) == {"urgent", "generate"}


def test_a_slot_goes_to_its_member_even_if_an_older_task_has_no_wish() -> None:
    tasks = [task("free", queued_at=0), task("slot", queued_at=5, preferred=("n0", 0))]
    assert matched(tasks, [cpu("n0"), cpu("n1")]) == {"slot": "n0", "free": "n1"}
    assert matched(tasks[1:], [cpu("n1")]) == {"slot": "n1"}, "a wish, not a condition"


def test_a_device_of_the_member_is_meant_not_only_its_node() -> None:
    devices = [FreeDevice("n0", i, "cuda", 1000) for i in range(3)]
    assert match([task("a", preferred=("n0", 2))], devices, 0.0)[0] == [Match("a", "n0", 2)]


def test_warm_devices_come_first_with_the_newest_version_that_is_not_too_new() -> None:
    devices = [cpu("a", job=3), cpu("b", job=5), cpu("c", job=7), cpu("d"), cpu("e", other=5)]
    tasks = [task(f"t{i}", base_version=6) for i in range(5)]
    assert matched(tasks, devices) == {"t0": "b", "t1": "a", "t2": "c", "t3": "d", "t4": "e"}


def test_cold_tasks_take_accelerators_first_and_the_least_memory_that_fits() -> None:
    devices = [
        cpu("small", 500),
        cpu("unknown", 0),
        cpu("middle", 2000),
        FreeDevice("gpu", 0, "cuda", 9000),
    ]
    tasks = [task(f"t{i}", memory_mb=600) for i in range(4)]
    assert matched(tasks, devices) == {"t0": "gpu", "t1": "middle", "t2": "unknown"}


def test_a_device_of_the_wrong_type_or_size_is_not_taken_however_warm() -> None:
    devices = [cpu("warm", 500, job=1), FreeDevice("gpu", 0, "cuda", 500)]
    assert matched([task("t", device="cuda", base_version=1)], devices) == {"t": "gpu"}
    assert matched([task("t", memory_mb=501)], devices) == {}


def test_a_task_does_not_go_straight_back_to_where_it_failed() -> None:
    back = task("t", last_failed_node="a", preferred=("a", 0))
    assert matched([back], [cpu("a", job=0), cpu("b")]) == {"t": "b"}
    assert matched([back], [cpu("a", job=0)]) == {"t": "a"}, "nobody else could"


def test_a_task_for_one_node_alone_waits_for_it() -> None:
    own = task("t", only="b", preferred=("b", 0))
    assert match([own], [cpu("a")], 0.0)[0] == []
    assert "meant for" in match([own], [cpu("a")], 0.0)[1]["t"]
    assert matched([own], [cpu("a"), cpu("b")]) == {"t": "b"}
    other_device = [cpu("a"), FreeDevice("b", 1, "cpu", 1000)]
    assert match([own], other_device, 0.0)[0] == [Match("t", "b", 1)]
    assert matched([task("u", only="b", memory_mb=2000)], [cpu("b")]) == {}


def test_an_excluded_node_never_gets_the_task() -> None:
    barred = task("t", excluded=frozenset({"a"}), preferred=("a", 0), last_failed_node="a")
    assert matched([barred], [cpu("a", job=0)]) == {}
    assert matched([barred], [cpu("a", job=0), cpu("b")]) == {"t": "b"}


@pytest.mark.parametrize(
    ("waiting", "devices", "why"),
    [
        (task("t"), [], "no device is free"),
        (task("t", device="cuda"), [cpu("a")], "no cuda device is free"),
        (
            task("t", memory_mb=5000),
            [cpu("a"), cpu("b", 900)],
            "it needs 5000 MB, the largest free device has 1000 MB",
        ),
        (
            task("t", excluded=frozenset({"a", "gone"})),
            [cpu("a")],
            "it must not go to any node whose device is free",
        ),
    ],
)
def test_a_waiting_task_says_why(waiting: QueuedTask, devices: list[FreeDevice], why: str) -> None:
    assert match([waiting], devices, 30.0) == ([], {"t": f"{why}; it has waited 30 s"})


def test_a_task_that_others_were_before_says_so() -> None:
    _, reasons = match([task("a"), task("b")], [cpu("n")], 3.0)
    assert reasons == {"b": "tasks before it take all free devices that fit (1); it has waited 3 s"}


NODES = st.sampled_from("abcd")
TASKS = st.builds(
    task,
    st.uuids().map(str),
    job_id=st.sampled_from(["j", "k"]),
    phase=st.sampled_from(["train", "evaluate", "generate"]),
    priority=st.sampled_from(["P0", "P1"]),
    queued_at=st.integers(0, 3),
    memory_mb=st.sampled_from([0, 100, 200]),
    device=st.sampled_from(["any", "cpu", "cuda"]),
    base_version=st.integers(0, 3),
    preferred=st.none() | st.tuples(NODES, st.integers(0, 1)),
    last_failed_node=st.just("") | NODES,
    excluded=st.frozensets(NODES, max_size=2),
)
DEVICES = st.builds(
    FreeDevice,
    NODES,
    st.integers(0, 2),
    st.sampled_from(["cpu", "cuda", "mps"]),
    st.sampled_from([0, 50, 150, 250]),
    st.dictionaries(st.sampled_from(["j", "k"]), st.integers(0, 4)),
)


@settings(max_examples=150, deadline=None)
@given(
    tasks=st.lists(TASKS, max_size=12),
    devices=st.lists(DEVICES, max_size=8, unique_by=lambda d: (d.node_id, d.index)),
    seed=st.integers(0, 3),
)
def test_matches_are_possible_and_nobody_waits_for_nothing(
    tasks: list[QueuedTask], devices: list[FreeDevice], seed: int
) -> None:
    matches, reasons = match(tasks, devices, 5.0)
    by_id = {t.task_id: t for t in tasks}
    free = {(d.node_id, d.index): d for d in devices}

    def possible(t: QueuedTask, d: FreeDevice) -> bool:
        return (
            t.device in ("any", d.type)
            and (not d.memory_mb or d.memory_mb >= t.memory_mb)
            and d.node_id not in t.excluded
        )

    assert {m.task_id for m in matches} | set(reasons) == set(by_id)
    assert len(matches) + len(reasons) == len(tasks)
    for m in matches:
        assert possible(by_id[m.task_id], free.pop((m.node_id, m.device)))
    for name in reasons:
        assert not any(possible(by_id[name], d) for d in free.values())
    rng = random.Random(seed)
    rng.shuffle(tasks)
    rng.shuffle(devices)
    assert match(tasks, devices, 5.0) == (matches, reasons)


def test_each_task_passes_over_a_taken_device_only_once() -> None:
    """Near-linear: ten times more tasks and devices read about ten times more."""

    def looks(count: int) -> int:
        taken: list[int] = []

        class Node(str):
            def __hash__(self) -> int:
                taken.append(1)
                return str.__hash__(self)

        devices = [FreeDevice(Node(f"n{i:05}"), 0, "cpu", 1000 + i % 7) for i in range(count)]
        tasks = [task(f"t{i:05}", memory_mb=900) for i in range(count)]
        assert len(match(tasks, devices, 0.0)[0]) == count
        return len(taken)

    assert looks(2000) < 15 * looks(200)
