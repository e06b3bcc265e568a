"""The transition tables say what design.md section 2 says."""

from __future__ import annotations

import itertools

import pytest

from distribai.core import states
from distribai.core.states import JobState as J
from distribai.core.states import RoundState as R
from distribai.core.states import TaskState as T
from distribai.errors import Conflict


@pytest.mark.parametrize("table", [states.JOB, states.TASK, states.ROUND])
def test_every_state_has_a_row_and_every_state_can_end(table: dict) -> None:
    kind = type(next(iter(table)))
    assert set(table) == set(kind)
    for start in kind:
        seen, todo = {start}, [start]
        while todo:
            for nxt in table[todo.pop()]:
                if nxt not in seen:
                    seen.add(nxt)
                    todo.append(nxt)
        assert any(states.is_terminal(table, s) for s in seen)


def test_every_state_is_explained_and_no_other() -> None:
    kinds = (
        *(J, T, R, states.Liveness, states.Standing, states.Intent),
        *(states.WebhookState, states.DeliveryState),
    )
    assert {k: list(m) for k, m in states.MEANINGS.items()} == {k: list(k) for k in kinds}


def test_every_open_job_and_task_can_be_cancelled() -> None:
    assert all(J.CANCELLED in nxt for s, nxt in states.JOB.items() if nxt)
    assert all(T.CANCELLED in nxt for s, nxt in states.TASK.items() if nxt)


def test_the_usual_paths_are_there() -> None:
    for path in (
        [J.SUBMITTED, J.QUEUED, J.RUNNING, J.PAUSED, J.RUNNING, J.COMPLETED],
        [J.SUBMITTED, J.DECLINED],
        [J.RUNNING, J.FAILED],
    ):
        for old, new in itertools.pairwise(path):
            states.check(states.JOB, old, new, "job")
    for path in (
        [T.QUEUED, T.LEASED, T.SUBMITTED, T.VERIFYING, T.ACCEPTED],
        [T.LEASED, T.QUEUED],
        [T.VERIFYING, T.REJECTED],
        [T.VERIFYING, T.SUPERSEDED],
        [T.LEASED, T.FAILED],
    ):
        for old, new in itertools.pairwise(path):
            states.check(states.TASK, old, new, "task")
    states.check(states.ROUND, R.OPEN, R.CLOSING, "round")
    states.check(states.ROUND, R.CLOSING, R.MERGED, "round")


def test_a_refused_transition_says_what_is_possible() -> None:
    with pytest.raises(Conflict, match="job x is completed: it cannot become running") as caught:
        states.check(states.JOB, J.COMPLETED, J.RUNNING, "job x")
    assert "it has ended" in caught.value.hint
    with pytest.raises(Conflict) as caught:
        states.check(states.TASK, T.ACCEPTED, T.QUEUED, "task y")
    assert caught.value.code == "state.transition"
