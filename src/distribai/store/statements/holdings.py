"""What accounts and organizations have and did: uploads, blobs, jobs, work."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import Any

from sqlalchemy import (
    Select,
    bindparam,
    exists,
    func,
    or_,
    select,
    union,
    union_all,
)

from distribai.core.states import JOB, JobState, TaskState, is_terminal
from distribai.store.engine import AnyRow, Tx
from distribai.store.tables import (
    blobs,
    datasets,
    jobs,
    memberships,
    nodes,
    submissions,
    tasks,
    uploads,
    versions,
)

ENDED = [state.value for state in JobState if is_terminal(JOB, state)]


async def add_upload(tx: Tx, account_id: str, sha256: str, size: int) -> None:
    """Remember that an account has sent the bytes of a blob."""
    await tx.run(
        tx.insert(uploads)
        .values(account_id=account_id, sha256=sha256, size=size, created_at=tx.now)
        .on_conflict_do_nothing()
    )


async def forget_uploads(tx: Tx, hashes: Collection[str]) -> None:
    """Nobody has sent these blobs any more: they are deleted."""
    rows = [{"gone": sha256} for sha256 in hashes]
    await tx.run_many(uploads.delete().where(uploads.c.sha256 == bindparam("gone")), rows)


async def has_uploaded(tx: Tx, account_id: str, hashes: Collection[str]) -> set[str]:
    """Which of these blobs the account has sent."""
    rows = await tx.all(
        select(uploads.c.sha256).where(
            uploads.c.account_id == account_id, uploads.c.sha256.in_(list(hashes))
        )
    )
    return {row.sha256 for row in rows}


async def blob_of_jobs(tx: Tx, sha256: str, organization_ids: Collection[str]) -> bool:
    """Whether a job of these organizations has made this blob."""
    made = union_all(
        *_versions_with(sha256),
        select(submissions.c.job_id).where(submissions.c.delta_sha == sha256),
    ).subquery()
    query = (
        select(jobs.c.id)
        .join(made, made.c.job_id == jobs.c.id)
        .where(jobs.c.organization_id.in_(list(organization_ids)))
    )
    return await tx.first(query.limit(1)) is not None


def _versions_with(sha256: str) -> tuple[Select[Any], ...]:
    """Jobs that have a version with this blob, or whose version's weights it was until it was let
    go, or is again for a while: each part goes by an index of its own."""
    was = (blobs.c.sha256 == sha256, blobs.c.kind == "weights", blobs.c.let_go_at.is_not(None))
    return (
        select(versions.c.job_id).where(versions.c.weights_sha == sha256),
        select(versions.c.job_id).where(versions.c.update_sha == sha256),
        select(blobs.c.job_id).where(*was),
    )


async def is_version_of(tx: Tx, sha256: str, job_ids: Collection[str]) -> bool:
    """Whether the blob is the weights or the update of a version of one of these jobs."""
    made = union_all(*_versions_with(sha256)).subquery()
    query = select(made.c.job_id).where(made.c.job_id.in_(list(job_ids)))
    return await tx.first(query.limit(1)) is not None


IN_HAND = [
    state.value
    for state in (TaskState.QUEUED, TaskState.LEASED, TaskState.SUBMITTED, TaskState.VERIFYING)
]

_DATA = (datasets.c.manifest_sha, datasets.c.manifest_size)


async def in_hand(tx: Tx, node_id: str) -> Sequence[AnyRow]:
    """Tasks that were leased to a node last and have not ended, each with its job's number of
    parameters and prepared data. A queued one may be on its way to another node."""
    columns = (tasks.c.id, tasks.c.attempt, tasks.c.state, tasks.c.phase, tasks.c.causes)
    return await tx.all(
        select(*columns, tasks.c.job_id, jobs.c.parameters, *_DATA)
        .join(jobs, jobs.c.id == tasks.c.job_id)
        .join(datasets, datasets.c.key == jobs.c.dataset_key)
        .where(tasks.c.node_id == node_id, tasks.c.state.in_(IN_HAND))
    )


async def worked_for(tx: Tx, node_id: str, job_id: str, fetching: int) -> AnyRow | None:
    """A running job and its prepared data, if in its last round the node's work was accepted, or if
    in its last ``fetching`` rounds the node has lost a task of it to the round's end."""
    worked = exists().where(
        submissions.c.job_id == job_id,
        submissions.c.round >= jobs.c.version - 1,
        submissions.c.node_id == node_id,
    )
    too_late = exists().where(
        tasks.c.job_id == job_id,
        tasks.c.round >= jobs.c.version - fetching,
        tasks.c.phase == "train",
        tasks.c.state == TaskState.CANCELLED.value,
        tasks.c.node_id == node_id,
    )
    running = (jobs.c.id == job_id, jobs.c.state == JobState.RUNNING.value)
    return await tx.first(
        select(jobs.c.id.label("job_id"), *_DATA)
        .join(datasets, datasets.c.key == jobs.c.dataset_key)
        .where(*running, or_(worked, too_late))
    )


async def jobs_among(
    tx: Tx, job_ids: Collection[str], organization_ids: Collection[str]
) -> set[str]:
    """Which of these jobs belong to one of these organizations."""
    rows = await tx.all(
        select(jobs.c.id).where(
            jobs.c.id.in_(list(job_ids)), jobs.c.organization_id.in_(list(organization_ids))
        )
    )
    return {row.id for row in rows}


async def nodes_among(tx: Tx, node_ids: Collection[str], account_id: str) -> set[str]:
    """Which of these nodes belong to an account."""
    rows = await tx.all(
        select(nodes.c.id).where(nodes.c.id.in_(list(node_ids)), nodes.c.account_id == account_id)
    )
    return {row.id for row in rows}


async def open_jobs(tx: Tx, organization_id: str) -> int:
    """Jobs of an organization that have not ended."""
    query = select(func.count()).where(
        jobs.c.organization_id == organization_id,
        jobs.c.state.not_in(ENDED),
    )
    return int(await tx.scalar(query) or 0)


async def stored_bytes(tx: Tx, organization_id: str) -> int:
    """Bytes of the blobs that an organization's members have sent or its jobs have stored, each
    counted once."""
    sent = (
        select(uploads.c.sha256, uploads.c.size)
        .join(memberships, memberships.c.account_id == uploads.c.account_id)
        .where(memberships.c.organization_id == organization_id)
    )
    made = (
        select(blobs.c.sha256, blobs.c.size)
        .join(jobs, jobs.c.id == blobs.c.job_id)
        .where(jobs.c.organization_id == organization_id)
    )
    both = union(sent, made).subquery()
    return int(await tx.scalar(select(func.coalesce(func.sum(both.c.size), 0))) or 0)


_NODE = (
    nodes.c.id,
    nodes.c.name,
    nodes.c.liveness,
    nodes.c.standing,
    nodes.c.joined_at,
    nodes.c.last_heard_at,
    nodes.c.bytes_up,
    nodes.c.bytes_down,
)


async def work_of_nodes(tx: Tx, account_id: str) -> Sequence[AnyRow]:
    """What each node of an account did: accepted tasks and tokens of it, bytes it moved."""
    return await tx.all(
        select(
            *_NODE,
            func.count(submissions.c.task_id).label("tasks"),
            func.coalesce(func.sum(submissions.c.tokens), 0).label("tokens"),
        )
        .join(submissions, submissions.c.node_id == nodes.c.id, isouter=True)
        .where(nodes.c.account_id == account_id)
        .group_by(*_NODE)
        .order_by(nodes.c.joined_at, nodes.c.id)
    )
