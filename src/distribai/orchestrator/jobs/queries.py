"""What a person or a program may ask about jobs."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from distribai.core.spec import BlobRef
from distribai.core.states import TASK, TaskState, is_terminal
from distribai.errors import Ambiguous, NotFound, UsageError
from distribai.orchestrator import feed
from distribai.orchestrator.context import Grid
from distribai.orchestrator.jobs.rows import get_job
from distribai.orchestrator.jobs.show import show_job
from distribai.orchestrator.rebuilding import whole_weights
from distribai.orchestrator.records import (
    CauseRecord,
    EventRecord,
    JobSummary,
    LogRecord,
    MemberRecord,
    Page,
    RoundRecord,
    TaskRecord,
    VersionRecord,
)
from distribai.store.engine import AnyRow
from distribai.store.statements import jobs, records, submissions, work
from distribai.store.values import blob_or_none, ranges_from_json

__all__ = [
    "list_events",
    "list_jobs",
    "list_logs",
    "list_rounds",
    "list_tasks",
    "list_versions",
    "organization_of",
    "page_rounds",
    "page_versions",
    "resolve_job",
    "show_job",
    "show_task",
    "wait_for_task",
    "weights_blob",
]

MIN_PREFIX = 4
"""Characters of an id that may stand for all of it, the kind's prefix not counted."""


async def resolve_job(grid: Grid, ref: str, organizations: frozenset[str] | None = None) -> str:
    """The id that ``ref`` means: a full id, a unique beginning of one, or a unique name; among the
    jobs of some organizations, or of all. A job of others is as unknown as one that never was.

    A beginning has at least :data:`MIN_PREFIX` characters, with or without ``job_``. A full id goes
    before a name, a name before a beginning.

    Raises:
        NotFound: ``job.unknown``.
        Ambiguous: ``job.ambiguous``, with the candidates.
    """
    named: Sequence[AnyRow] = []
    async with grid.db.read() as tx:
        # No id or name has other characters, and PostgreSQL takes no zero.
        if ref.isprintable():
            exact = await jobs.get(tx, ref)
            if exact is not None and _seen(exact, organizations):
                return str(exact.id)
            named = [r for r in await jobs.named(tx, ref) if _seen(r, organizations)]
        if not named and ref.isprintable():
            short = ref.removeprefix("job_")
            found = await jobs.beginning(tx, f"job_{short}") if len(short) >= MIN_PREFIX else []
            named = [r for r in found if _seen(r, organizations)]
    if not named:
        raise NotFound(
            "job.unknown",
            f"No job has the id or name {ref[:80]!r}.",
            f"A part of an id needs at least {MIN_PREFIX} characters. `distribai job list` lists "
            "all jobs.",
        )
    if len(named) > 1:
        told = ", ".join(f"{r.id} ({r.name}, {r.state})" for r in named[:5])
        raise Ambiguous(
            "job.ambiguous",
            f"{len(named)} jobs go by {ref[:80]!r}: {told}{', ...' if len(named) > 5 else ''}.",
            "Give more of the id.",
        )
    return str(named[0].id)


def _seen(job: AnyRow, organizations: frozenset[str] | None) -> bool:
    return organizations is None or job.organization_id in organizations


async def organization_of(grid: Grid, job_id: str) -> str:
    """The organization that a job belongs to.

    Raises:
        NotFound: ``job.unknown``.
    """
    async with grid.db.read() as tx:
        job = await get_job(tx, job_id)
    return str(job.organization_id)


async def list_jobs(
    grid: Grid,
    state: str | None = None,
    limit: int = 50,
    cursor: str = "",
    organizations: frozenset[str] | None = None,
) -> Page[JobSummary]:
    """Jobs, newest first; of some organizations, or of all.

    Raises:
        UsageError: ``usage.invalid``: the cursor is not one of ours.
    """
    before = None
    if cursor:
        at, _, job_id = cursor.partition("~")
        before = (_number(at, float), job_id if job_id.isprintable() else "")
    async with grid.db.read() as tx:
        rows = await jobs.page(tx, state, limit + 1, before, organizations)
        working = await work.working_nodes(tx)
        losses = await jobs.latest_losses(tx, [r.id for r in rows])
    items = tuple(
        JobSummary(
            id=r.id,
            name=r.name,
            state=r.state,
            reason=r.reason,
            priority=r.priority,
            version=r.version,
            rounds_total=r.rounds_total,
            nodes_working=working.get(r.id, 0),
            created_at=r.created_at,
            created_by=r.created_by,
            started_at=r.started_at,
            ended_at=r.ended_at,
            held_out_loss=losses.get(r.id),
            organization_id=r.organization_id,
        )
        for r in rows[:limit]
    )
    more = len(rows) > limit
    return Page(items, f"{items[-1].created_at!r}~{items[-1].id}" if more else "")


async def list_rounds(grid: Grid, job_id: str) -> tuple[RoundRecord, ...]:
    """All rounds of a job, oldest first; one that was abandoned and opened again comes twice."""
    return await _rounds(grid, job_id, (-1, -1), None)


async def page_rounds(grid: Grid, job_id: str, limit: int, cursor: str = "") -> Page[RoundRecord]:
    """Rounds of a job, oldest first, page by page.

    Raises:
        UsageError: ``usage.invalid``: the cursor is not one of ours.
    """
    number, _, take = (cursor or "-1~-1").partition("~")
    after = (-1, -1) if not cursor else (_number(number, int), _number(take, int))
    found = await _rounds(grid, job_id, after, limit + 1)
    more = len(found) > limit
    return Page(found[:limit], f"{found[limit - 1].number}~{found[limit - 1].take}" if more else "")


async def _rounds(
    grid: Grid, job_id: str, after: tuple[int, int], limit: int | None
) -> tuple[RoundRecord, ...]:
    async with grid.db.read() as tx:
        rows = await work.rounds_of(tx, job_id, after, limit)
        accepted = await submissions.accepted_by_round(tx, job_id)
    return tuple(
        RoundRecord(
            number=r.number,
            take=r.take,
            state=r.state,
            reason=r.reason,
            opened_at=r.opened_at,
            deadline_at=r.deadline_at,
            closed_at=r.closed_at,
            members=tuple(MemberRecord(**m) for m in r.members),
            accepted=accepted.get((r.number, r.take), (0, 0))[0],
            tokens=accepted.get((r.number, r.take), (0, 0))[1],
        )
        for r in rows
    )


async def list_tasks(
    grid: Grid, job_id: str, limit: int = 1000, cursor: str = ""
) -> Page[TaskRecord]:
    """Tasks of a job, oldest first.

    Raises:
        UsageError: ``usage.invalid``: the cursor is not one of ours.
    """
    async with grid.db.read() as tx:
        rows = await work.tasks_page(tx, job_id, limit + 1, _number(cursor or "0", int))
    items = tuple(_task(grid, r) for r in rows[:limit])
    return Page(items, str(rows[limit - 1].seq) if len(rows) > limit else "")


def _task(grid: Grid, row: AnyRow) -> TaskRecord:
    outcome = row.outcome or {}
    stored = row.progress or {}
    live = grid.fleet.progress_of(row.id, row.node_id, row.attempt)
    leased = row.state == TaskState.LEASED
    done = bool(outcome)
    return TaskRecord(
        id=row.id,
        job_id=row.job_id,
        round=row.round,
        take=row.take,
        phase=row.phase,
        state=row.state,
        node_id=row.node_id,
        device=row.device,
        attempt=row.attempt,
        samples=ranges_from_json(row.samples),
        steps=row.steps,
        step=outcome.get("steps", 0) if done else (live.step if live else stored.get("step", 0)),
        loss=_loss(outcome, live.loss if live and leased else stored.get("loss")),
        tokens_per_s=(live.tokens_per_s if live else stored.get("tokens_per_s", 0.0))
        if leased
        else 0.0,
        tokens=outcome.get("tokens", 0),
        reason=row.reason,
        text=outcome.get("text", ""),
        metrics=outcome.get("metrics", {}),
        causes=tuple(CauseRecord(**c) for c in row.causes),
        created_at=row.created_at,
        leased_at=row.leased_at,
        ended_at=row.ended_at,
    )


def _loss(outcome: dict[str, Any], running: float | None) -> float | None:
    metrics = outcome.get("metrics", {})
    found = metrics.get("loss_last", metrics.get("held_out_loss", running))
    return found if found is not None and found == found else None


async def list_versions(grid: Grid, job_id: str) -> tuple[VersionRecord, ...]:
    """All versions of a job's weights, from 0."""
    return await _versions(grid, job_id, -1, None)


async def page_versions(
    grid: Grid, job_id: str, limit: int, cursor: str = ""
) -> Page[VersionRecord]:
    """Versions of a job's weights, from 0, page by page.

    Raises:
        UsageError: ``usage.invalid``: the cursor is not one of ours.
    """
    after = _number(cursor, int) if cursor else -1
    found = await _versions(grid, job_id, after, limit + 1)
    more = len(found) > limit
    return Page(found[:limit], str(found[limit - 1].version) if more else "")


async def _versions(
    grid: Grid, job_id: str, after: int, limit: int | None
) -> tuple[VersionRecord, ...]:
    async with grid.db.read() as tx:
        rows = await jobs.all_versions(tx, job_id, after, limit)
    return tuple(
        VersionRecord(
            version=r.version,
            weights_hash=r.weights_hash,
            weights=blob_or_none(r.weights_sha, r.weights_size),
            update=blob_or_none(r.update_sha, r.update_size),
            contributors=r.contributors,
            tokens=r.tokens,
            held_out_loss=r.held_out_loss,
            created_at=r.created_at,
        )
        for r in rows
    )


async def list_events(
    grid: Grid,
    job_id: str | None,
    after: str = "",
    limit: int = 200,
    *,
    node_id: str | None = None,
) -> tuple[EventRecord, ...]:
    """State changes behind the cursor ``after`` (empty: from the beginning), in commit order; of a
    job, and of a node and its tasks while it held them, where these are given.

    Raises:
        UsageError: ``usage.invalid``: the cursor is not one of ours.
    """
    return (await feed.read(grid, feed.Wanted(job_id, node_id), after, limit)).items


async def list_logs(
    grid: Grid, job_id: str, after: str = "", limit: int = 200
) -> tuple[LogRecord, ...]:
    """Log lines behind the cursor ``after``, oldest first.

    Raises:
        UsageError: ``usage.invalid``: the cursor is not one of ours.
    """
    async with grid.db.read() as tx:
        rows: Sequence[AnyRow] = await records.logs_of(
            tx, job_id, _number(after or "0", int), limit
        )
    return tuple(
        LogRecord(
            cursor=str(r.id),
            at=r.at,
            level=r.level,
            message=r.message,
            job_id=r.job_id,
            task_id=r.task_id,
            node_id=r.node_id,
            fields=r.fields,
        )
        for r in rows
    )


async def show_task(grid: Grid, task_id: str) -> TaskRecord:
    """One task.

    Raises:
        NotFound: ``task.unknown``.
    """
    async with grid.db.read() as tx:
        row = await work.get_task(tx, task_id)
    if row is None:
        raise NotFound("task.unknown", f"No task has the id {task_id[:80]!r}.")
    return _task(grid, row)


async def wait_for_task(grid: Grid, task_id: str, timeout_s: float) -> TaskRecord:
    """The task once it has ended; after ``timeout_s`` seconds, or when the process stops, as it
    stands then.

    Raises:
        NotFound: ``task.unknown``.
    """
    end = grid.clock() + timeout_s
    with grid.news.of_task(task_id) as news:
        while True:
            news.take()  # what is read below is newer
            task = await show_task(grid, task_id)
            left = end - grid.clock()
            stopping = grid.tail.closing.is_set()
            if is_terminal(TASK, TaskState(task.state)) or left <= 0 or stopping:
                return task
            await news.wait(min(left, grid.settings.liveness.tick_s))


async def weights_blob(
    grid: Grid, job_id: str, version: int | None, account: str = ""
) -> tuple[int, BlobRef]:
    """The version (None: the latest) and its safetensors blob, which may have to be made first, for
    ``account``.

    Raises:
        NotFound: ``job.unknown`` or ``job.no_weights``.
        DistribAIError: see :func:`whole_weights`.
    """
    async with grid.db.read() as tx:
        job = await get_job(tx, job_id)
        number = job.version if version is None else version
        row = await jobs.version(tx, job_id, number)
    if row is None:
        raise NotFound(
            "job.no_weights",
            f"Job {job.name} has no version {number}; its latest is {job.version}.",
            "Wait for it, or take an earlier version.",
        )
    return number, await whole_weights(grid, job, number, account)


def _number(text: str, kind: Callable[[str], Any]) -> Any:
    try:
        number = kind(text)
        if not 0 <= number <= 2**63 - 1:
            raise ValueError(text)
        return number
    except ValueError as problem:
        raise UsageError(
            "usage.invalid",
            f"{text[:60]!r} is not a cursor of this list.",
            "Give back a cursor as it was answered, or none to begin at the beginning.",
            field="cursor",
        ) from problem
