"""Jobs, their sample pools, versions and prepared data sets."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import Any

from sqlalchemy import and_, func, insert, or_, select, update

from distribai.core.ranges import SamplePool
from distribai.core.states import JobState
from distribai.store.engine import AnyRow, Tx
from distribai.store.tables import datasets, jobs, versions
from distribai.store.values import ranges_from_json, ranges_to_json


async def add(tx: Tx, **values: Any) -> None:
    """Insert a job's row."""
    await tx.run(insert(jobs).values(**values))


async def get(tx: Tx, job_id: str) -> AnyRow | None:
    """One job."""
    return await tx.first(select(jobs).where(jobs.c.id == job_id))


async def states(tx: Tx, job_ids: Collection[str]) -> dict[str, JobState]:
    """The states of those of ``job_ids`` that exist."""
    rows = await tx.all(select(jobs.c.id, jobs.c.state).where(jobs.c.id.in_(list(job_ids))))
    return {row.id: JobState(row.state) for row in rows}


async def lock(tx: Tx, job_id: str) -> AnyRow | None:
    """One job, its row locked until the end of the transaction.

    Whoever changes a job's rounds, tasks, versions or pool locks its row first, so that these
    transactions run one after the other and none waits for another in a circle.
    """
    return await tx.first(select(jobs).where(jobs.c.id == job_id).with_for_update())


async def hold(tx: Tx, job_id: str) -> None:
    """As :func:`lock`, for who needs nothing of the row: its spec and plan take longer to read than
    the lock takes."""
    await tx.run(select(jobs.c.id).where(jobs.c.id == job_id).with_for_update())


async def set_state(tx: Tx, job_id: str, new: JobState, **values: Any) -> None:
    """Write a state that the caller has checked, on a row that it has locked."""
    await tx.run(update(jobs).where(jobs.c.id == job_id).values(state=new.value, **values))


async def change(tx: Tx, job_id: str, **values: Any) -> None:
    """Write other columns of a locked row."""
    await tx.run(update(jobs).where(jobs.c.id == job_id).values(**values))


async def in_states(tx: Tx, states: Collection[JobState]) -> Sequence[AnyRow]:
    """Jobs in any of ``states``, by priority, then by age."""
    return await tx.all(
        select(jobs)
        .where(jobs.c.state.in_([s.value for s in states]))
        .order_by(jobs.c.priority, jobs.c.created_at, jobs.c.id)
    )


async def latest_with_rounds(tx: Tx, limit: int = 20) -> Sequence[AnyRow]:
    """Id, version, parameters and spec of the youngest jobs that have merged two rounds or more."""
    return await tx.all(
        select(jobs.c.id, jobs.c.version, jobs.c.parameters, jobs.c.spec)
        .where(jobs.c.version >= 2)
        .order_by(jobs.c.created_at.desc(), jobs.c.id)
        .limit(limit)
    )


async def page(
    tx: Tx,
    state: str | None,
    limit: int,
    before: tuple[float, str] | None,
    organizations: Collection[str] | None = None,
) -> Sequence[AnyRow]:
    """Jobs, newest first, those before ``(created_at, id)``; of some organizations, or of all."""
    query = select(jobs)
    if organizations is not None:
        query = query.where(jobs.c.organization_id.in_(list(organizations)))
    if state is not None:
        query = query.where(jobs.c.state == state)
    if before is not None:
        at, job_id = before
        older = or_(jobs.c.created_at < at, and_(jobs.c.created_at == at, jobs.c.id < job_id))
        query = query.where(older)
    return await tx.all(query.order_by(jobs.c.created_at.desc(), jobs.c.id.desc()).limit(limit))


async def named(tx: Tx, name: str) -> Sequence[AnyRow]:
    """Id, name, state and organization of the jobs of that name, newest first."""
    return await tx.all(
        select(jobs.c.id, jobs.c.name, jobs.c.state, jobs.c.organization_id)
        .where(jobs.c.name == name)
        .order_by(jobs.c.created_at.desc(), jobs.c.id)
    )


async def beginning(tx: Tx, prefix: str) -> Sequence[AnyRow]:
    """Id, name, state and organization of the jobs whose id begins like that, newest first."""
    return await tx.all(
        select(jobs.c.id, jobs.c.name, jobs.c.state, jobs.c.organization_id)
        .where(func.substr(jobs.c.id, 1, len(prefix)) == prefix)
        .order_by(jobs.c.created_at.desc(), jobs.c.id)
    )


async def latest_losses(tx: Tx, ids: Collection[str]) -> dict[str, float]:
    """The held-out loss of each job's newest version that has one."""
    if not ids:
        return {}
    rows = await tx.all(
        select(versions.c.job_id, versions.c.held_out_loss)
        .where(versions.c.job_id.in_(list(ids)), versions.c.held_out_loss.is_not(None))
        .order_by(versions.c.version)
    )
    return {row[0]: float(row[1]) for row in rows}


async def count_by_state(tx: Tx, organizations: Collection[str] | None = None) -> dict[str, int]:
    """Jobs by state; of some organizations, or of all."""
    query = select(jobs.c.state, func.count()).group_by(jobs.c.state)
    if organizations is not None:
        query = query.where(jobs.c.organization_id.in_(list(organizations)))
    rows = await tx.all(query)
    return {row[0]: row[1] for row in rows}


def pool_of(job: AnyRow) -> SamplePool:
    """The sample pool of a job's row."""
    return SamplePool(job.pool_cursor, ranges_from_json(job.pool_returned))


async def save_pool(tx: Tx, job_id: str, pool: SamplePool) -> None:
    """Write the pool of a locked job."""
    await change(tx, job_id, pool_cursor=pool.cursor, pool_returned=ranges_to_json(pool.returned))


async def add_version(tx: Tx, **values: Any) -> None:
    """Insert a version; its primary key lets no round be merged twice."""
    await tx.run(insert(versions).values(**values))


async def version(tx: Tx, job_id: str, number: int) -> AnyRow | None:
    """One version."""
    return await tx.first(
        select(versions).where(versions.c.job_id == job_id, versions.c.version == number)
    )


async def has_version(tx: Tx, job_id: str, number: int) -> bool:
    """Whether there is such a version."""
    query = select(versions.c.version).where(
        versions.c.job_id == job_id, versions.c.version == number
    )
    return await tx.first(query) is not None


async def weights_hash(tx: Tx, job_id: str, number: int) -> str:
    """The hash of a version's weights, for which a task was made."""
    found = await tx.scalar(
        select(versions.c.weights_hash).where(
            versions.c.job_id == job_id, versions.c.version == number
        )
    )
    assert found is not None, "a task is made for a version that exists"
    return str(found)


async def all_versions(
    tx: Tx, job_id: str, after: int = -1, limit: int | None = None
) -> Sequence[AnyRow]:
    """Versions from the one behind ``after`` on, without their manifests."""
    columns = [c for c in versions.c if c.name != "manifest"]
    return await tx.all(
        select(*columns)
        .where(versions.c.job_id == job_id, versions.c.version > after)
        .order_by(versions.c.version)
        .limit(limit)
    )


async def latest_versions(tx: Tx, job_id: str, number: int, count: int) -> Sequence[AnyRow]:
    """Version ``number`` and up to ``count - 1`` before it, newest first, without manifests."""
    columns = [c for c in versions.c if c.name != "manifest"]
    return await tx.all(
        select(*columns)
        .where(versions.c.job_id == job_id, versions.c.version <= number)
        .order_by(versions.c.version.desc())
        .limit(count)
    )


async def set_held_out(tx: Tx, job_id: str, number: int, loss: float) -> None:
    """Write the held-out loss of a version."""
    await tx.run(
        update(versions)
        .where(versions.c.job_id == job_id, versions.c.version == number)
        .values(held_out_loss=loss)
    )


async def dataset(tx: Tx, key: str) -> AnyRow | None:
    """A prepared data set."""
    return await tx.first(select(datasets).where(datasets.c.key == key))


async def add_dataset(tx: Tx, **values: Any) -> None:
    """Remember a prepared data set; one that is there already is left as it is."""
    await tx.run(tx.insert(datasets).values(**values).on_conflict_do_nothing())
