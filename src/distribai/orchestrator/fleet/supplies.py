"""What a node may fetch, and what it may bring: what its work needs, and nothing else.

A node works for a job while a task of it is in its hands, and goes on doing so between two rounds:
as long as the job runs and its own work was accepted in the last round, or its task ended of late
because the round did, it may fetch ahead what the next task will need. Of such a job it gets every
version's weights and update, and the prepared data with its tokenizer. What it knows the hash of
beyond that is as unknown to it as what never was.

It may bring results of training that is in its hands: it may begin :data:`PER_ATTEMPT` uploads for
each, none larger than any codec makes of the job's model. Only what it has brought itself it need
not bring again: "that is here already" would tell what others have.
"""

from __future__ import annotations

import asyncio
import json

from distribai.core.plain import from_plain
from distribai.core.spec import BlobRef
from distribai.core.states import TaskState
from distribai.data.shards import DatasetManifest
from distribai.errors import Integrity, NotAllowed, NotFound, TooMany
from distribai.orchestrator.context import Grid
from distribai.orchestrator.rounds.late import may_come_back
from distribai.orchestrator.rounds.slow import WINDOW
from distribai.store.engine import AnyRow
from distribai.store.statements import holdings

BYTES_PER_PARAMETER = 8
"""No codec stores more for a parameter: a 4-byte value, and 4 bytes to say where it belongs."""

HEADER_BYTES = 4 << 20
"""What the names of tensors and the file's own figures may take besides."""

PER_ATTEMPT = 16
"""An honest node begins one upload of an attempt, and again when its own disk, or this process's,
has lost what came so far."""

RETRY_S = 60.0
"""When a node that has brought too much may ask again: its task has ended by then, or is judged."""


async def may_fetch(grid: Grid, node_id: str, sha256: str, job_id: str) -> bool:
    """Whether the node's work for a job needs a blob; without ``job_id``, whether the tasks in its
    hands do.

    One statement for data, one more for weights, each by index.

    Raises:
        Unavailable: ``blob.store`` or ``grid.database``.
    """
    jobs = await _works_for(grid, node_id, job_id)
    for manifest in set(jobs.values()):
        if sha256 == manifest.sha256 or sha256 in await _data(grid, manifest):
            return True
    if not jobs:
        return False
    async with grid.db.read() as tx:
        return await holdings.is_version_of(tx, sha256, jobs)


async def job_of(grid: Grid, node_id: str, job_id: str) -> str:
    """``job_id``, if the node works for that job; else nothing: what a node moves is counted to no
    other job."""
    return job_id if job_id in await _works_for(grid, node_id, job_id) else ""


async def _works_for(grid: Grid, node_id: str, job_id: str) -> dict[str, BlobRef]:
    """The jobs that the node works for, or which of them is ``job_id``, each with the manifest of
    its data."""
    async with grid.db.read() as tx:
        held = [row for row in await holdings.in_hand(tx, node_id) if _is_its_own(row)]
        rows = [row for row in held if job_id in ("", row.job_id)]
        if job_id and not rows:
            ahead = await holdings.worked_for(tx, node_id, job_id, WINDOW)
            rows = [] if ahead is None else [ahead]
    return {row.job_id: BlobRef(row.manifest_sha, row.manifest_size) for row in rows}


def _is_its_own(row: AnyRow) -> bool:
    """Whether a task that was leased to the node last is still in its hands: one that waits for its
    turn is, if the node fell silent with it."""
    return row.state != TaskState.QUEUED or may_come_back(row)


async def _data(grid: Grid, ref: BlobRef) -> frozenset[str]:
    """Hashes of the shards and the tokenizer of a prepared data set; none while its manifest is
    missing or damaged, which the node finds out by fetching that."""
    known = grid.stock.data(ref.sha256)
    if known is not None:
        return known
    try:
        async with grid.blobs.local(ref) as path:
            text = await asyncio.to_thread(path.read_text, encoding="utf-8")
    except (NotFound, Integrity):
        return frozenset()
    manifest = from_plain(DatasetManifest, json.loads(text))
    tokenizer = [manifest.tokenizer_blob] if manifest.tokenizer_blob is not None else []
    blobs = (*tokenizer, *(shard.blob for shard in manifest.shards))
    known = frozenset(blob.sha256 for blob in blobs)
    grid.stock.keep(ref.sha256, known)
    return known


async def check_upload(grid: Grid, node_id: str, ref: BlobRef) -> None:
    """Refuse an upload that no task in the node's hands is to bring.

    Raises:
        NotAllowed: ``auth.forbidden``: it holds no training.
        Integrity: ``blob.size``: larger than any result of what it holds.
        TooMany: ``limit.rate``: it has begun too many for what it holds already.
    """
    async with grid.db.read() as tx:
        held = [row for row in await holdings.in_hand(tx, node_id) if _is_its_own(row)]
    training = [row for row in held if row.phase == "train"]
    if not training:
        raise NotAllowed(
            "auth.forbidden",
            "This node has no task in its hands that brings a blob.",
            "The task has ended meanwhile, or another node has it; nothing is to be done.",
        )
    most = max(row.parameters for row in training) * BYTES_PER_PARAMETER + HEADER_BYTES
    if ref.size > most:
        raise Integrity(
            "blob.size",
            f"A blob of {ref.size} bytes is larger than any result of the node's tasks "
            f"({most} bytes).",
            "Check that the file is the task's delta.",
        )
    begun = grid.stock.begin(node_id, frozenset((r.id, r.attempt) for r in training))
    if begun > PER_ATTEMPT * len(training):
        raise TooMany(
            "limit.rate",
            f"This node has begun {begun - 1} uploads for the {len(training)} tasks in its hands; "
            "one each is due.",
            "Report the task, or let it go.",
            retry_after=RETRY_S,
        )
