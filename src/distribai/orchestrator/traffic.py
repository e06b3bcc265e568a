"""Bytes between nodes and orchestrator, counted in memory and written in batches."""

from __future__ import annotations

from distribai.orchestrator.context import Grid
from distribai.store.engine import Tx
from distribai.store.statements import records

WEIGHTS = frozenset({"weights", "update", "delta"})
"""Kinds that are the model on its way; ``data`` and ``other`` are not."""


def count(
    grid: Grid, job_id: str, node_id: str, kind: str, up: int, down: int, sha256: str = ""
) -> None:
    """Add bytes of one transfer.

    Args:
        grid: whose counters.
        job_id: the job that they are counted to; empty for none.
        node_id: the other side.
        kind: weights, update, delta, data or other; what the blobs' table knows about ``sha256``
            goes before it.
        up: bytes from the node.
        down: bytes to the node.
        sha256: the blob that moved, if its kind shall be looked up.
    """
    counter = grid.counted.setdefault((job_id, node_id, kind, sha256), [0, 0])
    counter[0] += up
    counter[1] += down


def take(grid: Grid) -> dict[tuple[str, str, str, str], tuple[int, int]]:
    """All counters, which start over at 0."""
    taken = {key: (up, down) for key, (up, down) in grid.counted.items()}
    grid.counted.clear()
    return taken


def put_back(grid: Grid, taken: dict[tuple[str, str, str, str], tuple[int, int]]) -> None:
    """Count again what could not be written."""
    for (job_id, node_id, kind, sha256), (up, down) in taken.items():
        count(grid, job_id, node_id, kind, up, down, sha256)


async def write(
    tx: Tx, counted: dict[tuple[str, str, str, str], tuple[int, int]]
) -> dict[tuple[str, str, str], tuple[int, int]]:
    """Add counters to the database, each under its blob's kind and job; bytes (up, down) by
    (job, node, kind)."""
    sums: dict[tuple[str, str, str], tuple[int, int]] = {}
    for (job_id, node_id, kind, sha256), (up, down) in counted.items():
        known = await records.blob(tx, sha256) if sha256 else None
        key = (job_id, node_id, kind)
        if known is not None:
            key = (job_id or known.job_id, node_id, known.kind)
        old_up, old_down = sums.get(key, (0, 0))
        sums[key] = (old_up + up, old_down + down)
    await records.add_traffic(tx, sums)
    return sums
