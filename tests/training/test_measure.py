"""Measuring a device."""

from __future__ import annotations

import itertools

import pytest

from distribai.core.child import Measure, Measured
from distribai.training.measure import BUDGET_S, COPY_BYTES, SIDES, measure
from tests.training.test_child import Daemon, Grid, daemon, grid

__all__ = ["daemon", "grid"]


def test_figures_are_work_over_the_shortest_time() -> None:
    ticks = itertools.count()
    found = measure("cpu", 1, lambda: next(ticks) * BUDGET_S)  # every look costs the whole budget
    assert found.gflops == pytest.approx(2 * SIDES["cpu"] ** 3 / BUDGET_S / 1e9)
    assert found.memory_gbps == pytest.approx(2 * COPY_BYTES / BUDGET_S / 1e9)


def test_a_child_measures_between_two_tasks(grid: Grid, daemon: Daemon) -> None:
    before = daemon.run(grid.task("a"))
    daemon.send(Measure("cpu", 1))
    answer = daemon.read()
    assert isinstance(answer, Measured)
    assert answer.gflops > 0
    assert answer.memory_gbps > 0
    daemon.send(Measure("cuda:9", 1))
    refused = daemon.read()
    assert isinstance(refused, Measured)
    assert "cuda:9" in refused.problem
    assert daemon.run(grid.task("a")).outcome.delta == before.outcome.delta
