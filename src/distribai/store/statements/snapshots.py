"""Versions that have a snapshot, and blobs that nothing needs any more."""

from __future__ import annotations

from collections.abc import Collection, Sequence

from sqlalchemy import bindparam, select, update

from distribai.core.spec import BlobRef
from distribai.store.engine import Tx
from distribai.store.statements.work import OPEN_TASKS
from distribai.store.tables import blobs, tasks, uploads, versions


async def present(tx: Tx, job_id: str | None = None) -> dict[str, list[int]]:
    """Versions that have a snapshot, ascending, by job: of all jobs, or of one."""
    query = select(versions.c.job_id, versions.c.version).where(versions.c.weights_sha != "")
    if job_id is not None:
        query = query.where(versions.c.job_id == job_id)
    found: dict[str, list[int]] = {}
    for row in await tx.all(query.order_by(versions.c.job_id, versions.c.version)):
        found.setdefault(row.job_id, []).append(row.version)
    return found


async def bases(tx: Tx, job_id: str) -> set[int]:
    """The versions that a job's open tasks start from."""
    states = [state.value for state in OPEN_TASKS]
    query = select(tasks.c.round).where(tasks.c.job_id == job_id, tasks.c.state.in_(states))
    return {row.round for row in await tx.all(query.distinct())}


async def let_go(tx: Tx, job_id: str, numbers: Collection[int]) -> None:
    """The snapshots of these versions, and the outer state with them, are needed no more; the
    caller has locked the job."""
    for number in numbers:
        key = (versions.c.job_id == job_id, versions.c.version == number)
        row = await tx.first(select(versions).where(*key))
        assert row is not None, "a version is never deleted"
        await tx.run(
            update(versions)
            .where(*key)
            .values(
                weights_sha="",
                weights_size=0,
                outer_sha="",
                outer_size=0,
                residual_sha="",
                residual_size=0,
                manifest={**row.manifest, "snapshot": None},
            )
        )
        gone = [row.weights_sha, row.outer_sha, row.residual_sha]
        await tx.run(
            update(blobs)
            .where(blobs.c.sha256.in_(gone), blobs.c.let_go_at.is_(None))
            .values(let_go_at=tx.now)
        )


async def let_go_since(tx: Tx, after: float) -> Sequence[str]:
    """Blobs that were let go later than ``after``."""
    rows = await tx.all(select(blobs.c.sha256).where(blobs.c.let_go_at > after))
    return [row.sha256 for row in rows]


async def let_go_until(tx: Tx, before: float) -> Sequence[str]:
    """Blobs that were let go at ``before`` or earlier, and that nobody has sent."""
    sent = select(uploads.c.sha256)
    rows = await tx.all(
        select(blobs.c.sha256).where(blobs.c.let_go_at <= before, blobs.c.sha256.not_in(sent))
    )
    return [row.sha256 for row in rows]


async def lend(tx: Tx, ref: BlobRef, job_id: str) -> None:
    """A version's weights are there again for a while; nothing needs them."""
    values = {"sha256": ref.sha256, "size": ref.size, "kind": "weights", "job_id": job_id}
    await tx.run(
        tx.insert(blobs)
        .values(**values, created_at=tx.now, let_go_at=tx.now)
        .on_conflict_do_update(
            index_elements=[blobs.c.sha256],
            set_={"let_go_at": tx.now},
            where=blobs.c.let_go_at.is_not(None),
        )
    )


async def forget(tx: Tx, hashes: Collection[str], before: float) -> None:
    """These blobs were let go at ``before`` or earlier, and no row speaks of them any more."""
    rows = [{"gone": sha256} for sha256 in hashes]
    gone = blobs.c.sha256 == bindparam("gone")
    await tx.run_many(blobs.delete().where(gone, blobs.c.let_go_at <= before), rows)
