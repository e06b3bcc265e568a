"""What is only ever added: logs, blobs by kind, traffic."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from sqlalchemy import func, insert, select

from distribai.core.spec import BlobRef
from distribai.store.engine import AnyRow, Tx
from distribai.store.tables import blobs, logs, traffic


async def add_logs(tx: Tx, rows: Iterable[Mapping[str, Any]]) -> None:
    """Insert a batch of log lines, dated now."""
    await tx.run_many(insert(logs), [{"at": tx.now, **row} for row in rows])


async def logs_of(tx: Tx, job_id: str, after: int, limit: int) -> Sequence[AnyRow]:
    """Log lines of a job behind id ``after``."""
    return await tx.all(
        select(logs)
        .where(logs.c.job_id == job_id, logs.c.id > after)
        .order_by(logs.c.id)
        .limit(limit)
    )


async def add_blob(tx: Tx, ref: BlobRef, kind: str, job_id: str = "") -> None:
    """Remember what a blob is for; the first word stands. One that was let go is needed again."""
    await tx.run(
        tx.insert(blobs)
        .values(sha256=ref.sha256, size=ref.size, kind=kind, job_id=job_id, created_at=tx.now)
        .on_conflict_do_update(index_elements=[blobs.c.sha256], set_={"let_go_at": None})
    )


async def blob(tx: Tx, sha256: str) -> AnyRow | None:
    """What a blob is for."""
    return await tx.first(select(blobs).where(blobs.c.sha256 == sha256))


async def latest_blobs(tx: Tx, limit: int) -> Sequence[str]:
    """Names of the blobs that were added last."""
    rows = await tx.all(select(blobs.c.sha256).order_by(blobs.c.created_at.desc()).limit(limit))
    return [row.sha256 for row in rows]


async def add_traffic(tx: Tx, counted: Mapping[tuple[str, str, str], tuple[int, int]]) -> None:
    """Add bytes (up, down) by (job, node, kind)."""
    for (job_id, node_id, kind), (up, down) in sorted(counted.items()):
        statement = tx.insert(traffic).values(
            job_id=job_id, node_id=node_id, kind=kind, up=up, down=down
        )
        await tx.run(
            statement.on_conflict_do_update(
                index_elements=[traffic.c.job_id, traffic.c.node_id, traffic.c.kind],
                set_={"up": traffic.c.up + up, "down": traffic.c.down + down},
            )
        )


async def traffic_of(tx: Tx, job_id: str) -> dict[str, tuple[int, int]]:
    """Bytes (up, down) of a job by kind."""
    rows = await tx.all(
        select(traffic.c.kind, func.sum(traffic.c.up), func.sum(traffic.c.down))
        .where(traffic.c.job_id == job_id)
        .group_by(traffic.c.kind)
    )
    return {row[0]: (int(row[1]), int(row[2])) for row in rows}
