"""Reasons are the matching's own."""

from __future__ import annotations

from dataclasses import replace

from hypothesis import given
from hypothesis import strategies as st

from distribai.core.scheduling import FreeDevice, QueuedTask, match
from distribai.core.states import Intent, Liveness, Standing
from distribai.core.why import (
    CODES,
    MAX_LISTED,
    Reason,
    cut,
    misfit,
    obstacles,
    passed_over,
    tasks_without_device,
)

TASK = QueuedTask("task_a", "job_a", "train", "P2", 0.0, memory_mb=1000)
SMALL = FreeDevice("node_s", 0, "cpu", 500)
LARGE = FreeDevice("node_l", 0, "cpu", 4000)

tasks = st.builds(
    QueuedTask,
    task_id=st.sampled_from([f"task_{i}" for i in range(8)]),
    job_id=st.sampled_from(["job_a", "job_b"]),
    phase=st.sampled_from(["train", "evaluate", "generate"]),
    priority=st.sampled_from(["P0", "P2"]),
    queued_at=st.floats(0, 100),
    memory_mb=st.integers(0, 4000),
    device=st.sampled_from(["any", "cpu", "cuda"]),
    last_failed_node=st.sampled_from(["", "node_0", "node_1"]),
    excluded=st.frozensets(st.sampled_from(["node_0", "node_1", "node_2"])),
    only=st.sampled_from(["", "", "node_0", "node_9"]),
)
devices = st.builds(
    FreeDevice,
    node_id=st.sampled_from([f"node_{i}" for i in range(3)]),
    index=st.integers(0, 1),
    type=st.sampled_from(["cpu", "cuda"]),
    memory_mb=st.sampled_from([0, 500, 2000, 5000]),
)


@given(
    st.lists(tasks, max_size=8, unique_by=lambda t: t.task_id),
    st.lists(devices, max_size=6, unique_by=lambda d: (d.node_id, d.index)),
)
def test_every_queued_task_of_a_job_is_matched_or_has_a_reason(
    queued: list[QueuedTask], free: list[FreeDevice]
) -> None:
    matches, _ = match(queued, free, 100.0)
    given_away = {m.task_id for m in matches}
    found = tasks_without_device(queued, free, 100.0, "job_a")
    assert {r.task_id for r in found} | given_away >= {
        t.task_id for t in queued if t.job_id == "job_a"
    }
    assert not {r.task_id for r in found} & given_away


@given(
    st.lists(tasks, max_size=8, unique_by=lambda t: t.task_id),
    st.lists(devices, max_size=6, unique_by=lambda d: (d.node_id, d.index)),
)
def test_what_comes_to_a_node_is_what_the_matching_gives_it(
    queued: list[QueuedTask], free: list[FreeDevice]
) -> None:
    matches, _ = match(queued, free, 100.0)
    found = passed_over(queued, free, 100.0, "node_0")
    assert {r.task_id for r in found if r.code == "turn"} == {
        m.task_id for m in matches if m.node_id == "node_0"
    }
    told = {(r.job_id, r.text) for r in found}
    assert len(told) == len(found) or any(r.code == "turn" for r in found)
    assert all(r.code in CODES for r in found)


def test_a_device_that_is_too_small_is_told_how_much_it_lacks() -> None:
    assert misfit(TASK, [LARGE], 0.0) == ""
    assert misfit(TASK, [SMALL], 0.0) == ("it needs 1000 MB, the largest free device has 500 MB")
    assert "cuda" in misfit(replace(TASK, device="cuda"), [LARGE], 0.0)


def test_each_way_in_which_a_task_passes_a_node_by_has_its_words() -> None:
    def why(task: QueuedTask, *free: FreeDevice) -> str:
        (reason,) = passed_over([task], free, 0.0, "node_l")
        return reason.text

    assert "about to be given to device 0" in why(TASK, LARGE)
    assert "needs 9000 MB" in why(replace(TASK, memory_mb=9000), LARGE)
    assert "kept for the node" in why(replace(TASK, only="node_x"), LARGE)
    assert "no device of this node is free" in why(TASK, SMALL)
    late = replace(TASK, among=frozenset({"node_s"}))
    assert "before its round merges" in why(late, LARGE)
    excluded = replace(TASK, excluded=frozenset({"node_l"}))
    assert "failed here" in why(replace(excluded, last_failed_node="node_l"), LARGE)
    nearer = FreeDevice("node_a", 0, "cpu", 1000)
    assert "another device suits it better" in why(TASK, LARGE, nearer)


def test_tasks_that_wait_behind_others_are_told_so_once_for_each_job() -> None:
    queue = [replace(TASK, task_id=f"task_{i}", queued_at=float(i)) for i in range(5)]
    first, waiting = passed_over(queue, [LARGE], 9.0, "node_l")
    assert first.code == "turn"
    assert "tasks before it take the devices" in waiting.text


def test_a_long_list_says_how_much_it_leaves_out() -> None:
    found = cut([Reason("task", f"{i}") for i in range(MAX_LISTED + 3)], "queued tasks")
    assert len(found) == MAX_LISTED + 1
    assert found[-1].text == "And 3 more queued tasks."


def test_a_silent_node_is_told_for_how_long() -> None:
    (reason,) = obstacles(Liveness.DEGRADED, Standing.TRUSTED, Intent.CONTRIBUTE, True, 34.4)
    assert reason.code == "degraded"
    assert "34 s ago" in reason.text


def test_a_node_that_rests_says_why_in_its_own_words() -> None:
    def text(**told: str) -> str:
        online = (Liveness.ONLINE, Standing.TRUSTED, Intent.PAUSE, True, 1.0)
        (reason,) = obstacles(*online, **told)
        return reason.text

    assert text() == "It is paused: its owner wants no work for now."
    assert text(rests="its month is used up.") == "It is paused: its month is used up."


def test_every_code_that_an_obstacle_can_have_is_explained() -> None:
    for liveness in Liveness:
        for standing in Standing:
            for intent in Intent:
                for connected in (True, False):
                    for reason in obstacles(liveness, standing, intent, connected, 1.0):
                        assert reason.code in CODES
