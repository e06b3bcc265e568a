"""What a person may ask about the grid's machines."""

from __future__ import annotations

from distribai.orchestrator.context import Grid
from distribai.orchestrator.records import GridSummary, NodeRecord


async def list_nodes(grid: Grid) -> tuple[NodeRecord, ...]:
    """All nodes that ever joined, the live ones first."""
    raise NotImplementedError


async def summary(grid: Grid) -> GridSummary:
    """The grid's health."""
    raise NotImplementedError
