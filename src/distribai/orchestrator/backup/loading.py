"""``distribai grid restore``: a backup into a grid that does not exist yet."""

from __future__ import annotations

import shutil
from collections.abc import AsyncIterator, Awaitable, Callable, Collection, Iterator
from contextlib import ExitStack, asynccontextmanager, contextmanager
from dataclasses import dataclass
from itertools import islice
from pathlib import Path

from sqlalchemy import Integer, MetaData, Table, func, insert, select, text, update
from sqlalchemy.exc import DBAPIError

from distribai import durable
from distribai.core.spec import BlobRef
from distribai.core.states import RoundState, TaskState
from distribai.errors import Conflict, Unavailable
from distribai.orchestrator import events
from distribai.orchestrator.backup.copying import NO_LIMIT, Copied, TargetRefuses, copy_blobs
from distribai.orchestrator.backup.format import (
    BLOB_LIST,
    REVISION_TABLE,
    STATE_FILES,
    BackupManifest,
    Layout,
    Progress,
    Told,
    check_part,
    damaged,
    from_line,
    read_lines,
    read_manifest,
    reflect,
    table_names,
    tables_of,
    upgrade,
)
from distribai.orchestrator.places import MOVED
from distribai.sections import OrchestratorSettings
from distribai.store import outbox
from distribai.store.blobs import BlobStore
from distribai.store.engine import Database, Tx
from distribai.store.lock import FileLock
from distribai.store.migrate import MIGRATION_LOCK
from distribai.store.statements import facts, sessions
from distribai.store.tables import duties, metadata, rounds, tasks

ROWS_AT_ONCE = 500


@dataclass(frozen=True, slots=True)
class Restored:
    """A grid that can be started. ``rows``: how many were inserted."""

    manifest: BackupManifest
    rows: int
    copied: Copied


async def check_backup(source: Path, told: Told = lambda _: None) -> BackupManifest:
    """Hash every part of a backup.

    Raises:
        NotFound: ``grid.backup``: there is no finished backup.
        Integrity: ``grid.backup``: a part is missing or not what was written; the message names it.
        Conflict: ``grid.schema``: a newer program made it.
        Unavailable: ``io.file``: a part cannot be read.
    """
    layout = Layout(source)
    manifest = read_manifest(layout)
    if tables_of(manifest.revision) != set(manifest.tables) or (
        set(manifest.tables) != set(manifest.columns)
    ):
        raise damaged(layout.manifest, "it does not list the tables of its schema")
    for name, part in manifest.tables.items():
        await check_part(layout.lines(manifest.snapshot, name), part)
    for name, part in manifest.files.items():
        await check_part(layout.file(manifest.snapshot, name), part)
    await check_part(layout.lines(manifest.snapshot, BLOB_LIST), manifest.blobs)
    done = 0
    for ref in _blobs(layout, manifest):
        await check_part(layout.blob(ref.sha256), ref)
        done += ref.size
        told(Progress("checked", done, manifest.blob_bytes))
    return manifest


async def restore(
    settings: OrchestratorSettings, source: Path, *, told: Told = lambda _: None
) -> Restored:
    """Make the grid that ``settings`` name from the backup in ``source``.

    Every part is hashed before anything is written. Then blobs come first and all rows last, in one
    transaction: interrupted, no grid is there, and the same command can be run again.

    What the restored grid knows of dead processes is put in order: sessions end, duties are free,
    leases and deadlines stand as far off as they did when the backup was made, and the events go on
    in a new epoch (``store.outbox``).

    Raises:
        Conflict: ``grid.not_empty``: there is a grid already; ``grid.locked``; ``grid.schema``.
        UsageError: ``io.file``: the state directory cannot be used.
        NotFound, Integrity, Unavailable: as :func:`check_backup`; ``grid.database`` and
            ``blob.store``: the new grid's stores cannot take it.
    """
    layout = Layout(source)
    async with empty_place(settings) as db:
        manifest = await check_backup(source, told)
        check_files(settings.state_dir, layout, manifest.snapshot, manifest.files)
        with staging_in(settings.state_dir) as staging:
            copied = await _copy_blobs(settings, layout, manifest, staging, told)
        put_files(settings.state_dir, layout, manifest)
        count = await fill(db, layout, manifest, told)
    return Restored(manifest, count, copied)


async def fill(
    db: Database,
    layout: Layout,
    manifest: BackupManifest,
    told: Told,
    before_commit: Callable[[], Awaitable[None]] | None = None,
) -> int:
    """Make an empty database the grid's, in one transaction; how many rows it got. Each table must
    end up with as many as the backup has. ``before_commit`` is called when nothing is left to do
    but to commit.

    Raises:
        Conflict: ``grid.not_empty``.
        Integrity: ``grid.backup``: the rows contradict each other, or some are missing.
        Unavailable: ``grid.database``.
    """
    db.not_before(manifest.taken_at)
    try:
        async with db.write() as tx:
            if tx.dialect == "postgresql":
                await tx.run(text("SELECT pg_advisory_xact_lock(:k)"), {"k": MIGRATION_LOCK})
            await check_empty(tx, tables_of(manifest.revision))
            count = await _insert(tx, layout, manifest, told)
            await _settle(tx, manifest)
            if before_commit is not None:
                await before_commit()
    except DBAPIError as problem:
        first = str(problem.orig).splitlines()[0]
        raise damaged(layout.snapshots / manifest.snapshot, first) from problem
    return count


# ------------------------------------------------------------------ the place


@asynccontextmanager
async def empty_place(settings: OrchestratorSettings) -> AsyncIterator[Database]:
    """The database to be, which nobody else uses and which holds no grid.

    Raises:
        Conflict: ``grid.not_empty`` or ``grid.locked``.
        UsageError: ``io.file``: the state directory cannot be used.
        Unavailable: ``grid.database``.
    """
    with writing_in(settings.state_dir):
        db = Database(settings.database_url)
        try:
            with ExitStack() as stack:
                if db.dialect == "sqlite":
                    stack.callback(FileLock(db.path).release)
                async with db.read() as tx:
                    await check_empty(tx, metadata.tables.keys())
                yield db
        finally:
            await db.close()


@contextmanager
def writing_in(state_dir: Path) -> Iterator[None]:
    """The state directory, made if it is not there.

    Raises:
        UsageError: ``io.file``: it cannot be used.
        Unavailable: ``io.file``: the disk is full or refuses in the block.
    """
    durable.state_directory(state_dir)
    try:
        yield
    except OSError as problem:
        raise _refused(state_dir, problem) from problem


async def check_empty(tx: Tx, names: Collection[str]) -> None:
    """Refuse a database that holds one of the tables ``names``, or a schema's revision.

    Raises:
        Conflict: ``grid.not_empty``.
    """
    found = await tx.conn.run_sync(table_names)
    if taken := sorted(found & {REVISION_TABLE, *names}):
        raise _not_empty(f"its database holds a table {taken[0]!r}")


def check_files(state_dir: Path, layout: Layout, snapshot: str, names: Collection[str]) -> None:
    """Refuse a state directory that is another grid's: an invite or token there opens it.

    Raises:
        Conflict: ``grid.not_empty``.
        Integrity: ``grid.backup``: the backup holds a file that no grid has.
    """
    for name in names:
        if name not in STATE_FILES:
            raise damaged(layout.manifest, f"it holds a file {name!r}, which no grid has")
        path = state_dir / name
        wanted = layout.file(snapshot, name).read_bytes()
        if path.exists() and path.read_bytes() != wanted:
            raise _not_empty(f"there is another grid's {path}")


def _not_empty(why: str) -> Conflict:
    return Conflict(
        "grid.not_empty",
        f"A grid is restored or moved only to where none is, and there is one: {why}.",
        "Give another --state-dir and --db (to move: --to-state-dir and --to-db), or put what is "
        "there away first.",
    )


def _refused(state_dir: Path, problem: OSError) -> Unavailable:
    return Unavailable(
        "io.file",
        f"The grid cannot be written to {problem.filename or state_dir}: "
        f"{problem.strerror or problem}.",
        "Free some space, check the rights of this user, and run the same command again.",
    )


def put_files(state_dir: Path, layout: Layout, manifest: BackupManifest) -> None:
    """Write what no database holds into the state directory."""
    for name in manifest.files:
        data = layout.file(manifest.snapshot, name).read_bytes()
        durable.write(state_dir / name, data, point="restore.file", mode=0o600)


@contextmanager
def staging_in(state_dir: Path) -> Iterator[Path]:
    """A directory for the time of the block."""
    path = state_dir / "restoring"
    shutil.rmtree(path, ignore_errors=True)
    try:
        yield path
    finally:
        shutil.rmtree(path, ignore_errors=True)


# ------------------------------------------------------------------ blobs and rows


def _blobs(layout: Layout, manifest: BackupManifest) -> Iterator[BlobRef]:
    path = layout.lines(manifest.snapshot, BLOB_LIST)
    for line in read_lines(path):
        match line:
            case [str(sha256), int(size)]:
                yield BlobRef(sha256, size)
            case _:
                raise damaged(path, "a line names no blob")


async def _copy_blobs(
    settings: OrchestratorSettings,
    layout: Layout,
    manifest: BackupManifest,
    staging: Path,
    told: Told,
) -> Copied:
    source = BlobStore.open(layout.blobs, staging / "source", max_bytes=NO_LIMIT)
    target = BlobStore.open(settings.blob_place, staging / "target", max_bytes=NO_LIMIT)
    wanted = {ref.sha256: ref.size for ref in _blobs(layout, manifest)}
    try:
        copied = await copy_blobs(source, target, wanted, told)
    except TargetRefuses as refusal:
        raise refusal.problem from refusal
    for sha256, why in copied.lost.items():
        raise damaged(layout.blob(sha256), f"it was whole a moment ago, and now {why}")
    return copied


async def _insert(tx: Tx, layout: Layout, manifest: BackupManifest, told: Told) -> int:
    """Make the schema that the rows fit, insert them, and bring both to this program's."""
    await tx.conn.run_sync(upgrade, manifest.revision)
    names = set(manifest.tables)
    found: MetaData = await tx.conn.run_sync(lambda c: reflect(c, names))
    total = sum(part.lines for part in manifest.tables.values())
    done = 0
    for table in found.sorted_tables:
        columns = manifest.columns[table.name]
        path = layout.lines(manifest.snapshot, table.name)
        if set(columns) != {c.name for c in table.columns}:
            raise damaged(layout.manifest, f"it does not list the columns of {table.name}")
        lines = read_lines(path)
        while batch := list(islice(lines, ROWS_AT_ONCE)):
            try:
                rows = [from_line(table, columns, line) for line in batch]
            except (ValueError, TypeError) as problem:
                raise damaged(path, str(problem)) from problem
            await tx.run_many(insert(table), rows)
            done += len(rows)
            told(Progress("rows", done, total))
        there = await tx.scalar(select(func.count()).select_from(table))
        if there != manifest.tables[table.name].lines:
            raise damaged(path, f"{there} rows instead of {manifest.tables[table.name].lines}")
    await tx.conn.run_sync(upgrade, "head")
    return done


async def _settle(tx: Tx, manifest: BackupManifest) -> None:
    """Let the rows speak of this database and of no process that is dead."""
    if tx.dialect == "postgresql":
        for table in metadata.tables.values():
            await _set_sequence(tx, table)
    await outbox.restored(tx)
    await facts.drop(tx, MOVED)  # wherever the rows come from, the grid is here now
    await sessions.end_sessions(tx, None)
    await tx.run(update(duties).values(lease_until=0.0))  # over, whatever the clock here says
    # As if time had stood still: whoever still has a task in hand has as long for it as before.
    slept = max(0.0, tx.now - manifest.taken_at)
    await tx.run(
        update(tasks)
        .where(tasks.c.state == TaskState.LEASED.value)
        .values(
            lease_until=tasks.c.lease_until + slept,
            deadline_at=tasks.c.deadline_at + slept,
            leased_at=tasks.c.leased_at + slept,
        )
    )
    await tx.run(
        update(rounds)
        .where(rounds.c.state.in_([RoundState.OPEN.value, RoundState.CLOSING.value]))
        .values(deadline_at=rounds.c.deadline_at + slept, opened_at=rounds.c.opened_at + slept)
    )
    await events.record(
        tx, "grid.restored", data={"taken_at": manifest.taken_at, "snapshot": manifest.snapshot}
    )


async def _set_sequence(tx: Tx, table: Table) -> None:
    """Let PostgreSQL count on behind the rows that were inserted with their numbers."""
    keys = list(table.primary_key.columns)
    if len(keys) != 1 or not isinstance(keys[0].type, Integer):
        return
    name = await tx.scalar(select(func.pg_get_serial_sequence(table.name, keys[0].name)))
    highest = await tx.scalar(select(func.max(keys[0])))
    if name is not None and highest is not None:
        await tx.run(select(func.setval(name, highest)))
