"""Bytes between nodes and orchestrator, counted in memory and written in batches."""

from __future__ import annotations

from distribai.orchestrator.context import Grid


def count(grid: Grid, job_id: str, node_id: str, kind: str, up: int, down: int) -> None:
    """Add bytes of one transfer; ``kind`` is weights, update, delta, data or other."""
    raise NotImplementedError
