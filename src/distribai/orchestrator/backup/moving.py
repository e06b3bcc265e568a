"""``distribai grid migrate --to-...``: a resting grid onto another database and another blob store.

The same as a backup and a restore, without the copy of all blobs in between: the rows of one
snapshot go through files of the new state directory, the blobs straight from store to store::

    old database --rows--> <new state directory>/restoring --rows--> new database, last of all
    old blobs -----------------------blobs-------------------------> new blobs, read back and hashed

The new database gets its rows in one transaction when every blob has been found whole in its new
place: until then no grid is there, so that whatever interrupts it, the same command can be run
again, and goes on with the blobs that are missing. One thing is written to the old database, right
before that transaction is committed: where its grid goes. From then on no orchestrator starts on it
(``places.check_here``): killed between the two commits the grid is nowhere rather than twice, and
the same command, run again, brings it to the same place.
"""

from __future__ import annotations

import os
import tempfile
from collections.abc import Callable, Mapping
from contextlib import AsyncExitStack
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from distribai.errors import Conflict, Integrity, Unavailable, UsageError
from distribai.orchestrator import places
from distribai.orchestrator.backup.copying import (
    NO_LIMIT,
    Copied,
    TargetRefuses,
    find_damaged,
)
from distribai.orchestrator.backup.dumping import dump
from distribai.orchestrator.backup.existing import (
    check_resting,
    closed,
    existing,
    lock_resting,
)
from distribai.orchestrator.backup.format import BackupManifest, Layout, Told, table_names
from distribai.orchestrator.backup.loading import (
    check_empty,
    check_files,
    empty_place,
    fill,
    put_files,
    staging_in,
    writing_in,
)
from distribai.orchestrator.backup.naming import Named
from distribai.orchestrator.backup.saving import copy_named, describe, wanted_of, write_files
from distribai.sections import OrchestratorSettings
from distribai.store.blobs import BlobStore
from distribai.store.drivers import HIDDEN, shown
from distribai.store.engine import Database
from distribai.store.statements import facts
from distribai.store.tables import meta, metadata


@dataclass(frozen=True, slots=True)
class Moved:
    """A grid in its new place: what it is, the rows that its new database got (0: it keeps its
    database), and the blobs that had to be copied."""

    manifest: BackupManifest
    rows: int
    copied: Copied


async def move(
    source: OrchestratorSettings,
    target: OrchestratorSettings,
    *,
    secrets: Mapping[str, str] | None = None,
    incomplete: bool = False,
    told: Told = lambda _: None,
    entropy: Callable[[int], bytes] = os.urandom,
) -> Moved:
    """Make the grid that ``source`` names anew where ``target`` says.

    Args:
        source: the grid, on which no orchestrator runs.
        target: the same settings with another database, blob store or state directory, or several.
        secrets: further texts for the new state directory, by name, if it is another one.
        incomplete: go on even if the grid itself has lost blobs.
        told: hears of the progress.
        entropy: randomness for the snapshot's name.

    Raises:
        UsageError: ``usage.invalid``: the target is the source; ``io.file``: its state directory
            cannot be used.
        NotFound: ``grid.missing``: there is no grid at the source.
        Conflict: ``grid.locked``: an orchestrator runs on it; ``grid.not_empty``: there is a grid
            at the target already; ``grid.moved``: it has moved before; ``grid.schema``.
        Integrity: ``grid.damaged``: the grid has lost blobs, or the new store holds other bytes
            under the name of one.
        Unavailable: ``grid.database``, ``blob.store`` or ``io.file``.
    """
    _check_differ(source, target)
    name = f"s-{entropy(8).hex()}"
    secrets = secrets if secrets and target.state_dir != source.state_dir else {}
    same_database = target.database_url == source.database_url
    rows = 0
    async with existing(source) as old, AsyncExitStack() as stack:
        stack.enter_context(closed(old))
        await check_resting(old)
        await _check_here(old, target)
        stack.enter_context(writing_in(target.state_dir))
        new = None if same_database else await stack.enter_async_context(empty_place(target))
        layout = Layout(stack.enter_context(staging_in(target.state_dir)))
        snapshot, named = await dump(old, layout, name, told)
        files = write_files(layout, name, source.state_dir, secrets)
        check_files(target.state_dir, layout, name, files)
        wanted, copied = await _bring(source, target, layout, named, incomplete, told)
        manifest = describe(layout, name, snapshot, wanted, copied, files)
        if target.state_dir != source.state_dir:
            put_files(target.state_dir, layout, manifest)
        if new is not None:
            await check_resting(old)  # before all rows are inserted; what counts comes after
            leave = partial(_leave, old, shown(target.database_url), snapshot.taken_at)
            rows = await fill(new, layout, manifest, told, before_commit=leave)
        return Moved(manifest, rows, copied)


async def survey(
    source: OrchestratorSettings, target: OrchestratorSettings, *, told: Told = lambda _: None
) -> BackupManifest:
    """What :func:`move` would bring to the target; changes nothing on either side. The orchestrator
    may run meanwhile.

    Raises:
        UsageError, NotFound, Conflict, Unavailable: as :func:`move`.
    """
    _check_differ(source, target)
    async with existing(source) as old:
        await _check_here(old, target)
        if target.database_url != source.database_url:
            await _check_target_empty(target)
        with tempfile.TemporaryDirectory(prefix="distribai-") as directory:
            work = Path(directory)
            snapshot, named = await dump(old, Layout(work), "check", told)
            blobs = BlobStore.open(source.blob_place, work / "source", max_bytes=NO_LIMIT)
            wanted = await wanted_of(blobs, named)
            return describe(Layout(work), "check", snapshot, wanted, Copied(), {})


async def undo(source: OrchestratorSettings, new_db: str | None = None, check: bool = False) -> str:
    """Let orchestrators start again on a database from which the grid was moved away; where to.

    Where it went is looked at first, if it is still there: no orchestrator may run on it, or one
    grid would be two.

    Args:
        source: the settings from before the move.
        new_db: the new database's URL, needed if what was noted of it leaves a password out.
        check: only look.

    Raises:
        UsageError: ``usage.invalid``: the grid was not moved, or to another database than
            ``new_db``, or to one that only a password opens.
        NotFound: ``grid.missing``.
        Conflict: ``grid.locked``: an orchestrator runs in the new place, or starts on this one.
        Unavailable: ``grid.database``.
    """
    async with existing(source) as db:
        with closed(db):
            there = await _moved_to(db)
            if there is None:
                raise UsageError(
                    "usage.invalid",
                    "This grid was not moved away, so there is nothing to undo.",
                    "Give the --state-dir and --db that it had before it was moved.",
                )
            if shown(new_db or there) != there or (new_db is None and HIDDEN in there):
                raise UsageError(
                    "usage.invalid",
                    f"This grid was moved to {there}, which must be looked at first.",
                    "Give that place, with its password, as --to-db.",
                )
            await _check_left(new_db or there)
            if not check:
                async with db.write() as tx:
                    await facts.drop(tx, places.MOVED)
            return there


async def _check_left(url: str) -> None:
    """Refuse a new place on which an orchestrator runs. One that is lost is no obstacle.

    Raises:
        Conflict: ``grid.locked``.
    """
    try:
        new = Database(url)
    except Unavailable:
        return
    try:
        if new.dialect == "sqlite" and not new.path.exists():
            return
        with closed(new):
            await check_resting(new)
    except Unavailable:
        return
    except Conflict as problem:
        raise Conflict(
            "grid.locked",
            f"An orchestrator runs in the new place: {problem.message}",
            "Stop every orchestrator there first: one grid must not run twice.",
        ) from problem
    finally:
        await new.close()


async def _moved_to(db: Database) -> str | None:
    """Where the grid went; None also where the database has no tables, which others complain of."""
    async with db.read() as tx:
        if meta.name not in await tx.conn.run_sync(table_names):
            return None
    return await places.moved_to(db)


async def _leave(old: Database, there: str, since: float) -> None:
    """Write down that the grid goes ``there``, with the rows of the time ``since``.

    Raises:
        Conflict: ``grid.locked``: somebody has begun to work on the old database.
        Unavailable: ``grid.database``.
    """
    async with old.write() as tx:
        await lock_resting(tx, since)
        await facts.put(tx, places.MOVED, there)


async def _check_here(old: Database, target: OrchestratorSettings) -> None:
    """Refuse a grid that has moved already. A move that died between its two commits is finished by
    another one to the same place; one that died after the second was whole.

    Raises:
        Conflict: ``grid.moved``; ``grid.not_empty``: it did not get there, and another is there.
        Unavailable: ``grid.database``.
    """
    there = await _moved_to(old)
    if there is None:
        return
    if there != shown(target.database_url):
        raise places.gone(there)
    try:
        await _check_target_empty(target)
    except Conflict:
        if await _is_there(old, target):
            raise places.arrived(there) from None
        raise


async def _is_there(old: Database, target: OrchestratorSettings) -> bool:
    """Whether the target's database has this grid."""
    async with existing(target) as new:
        async with new.read() as tx:
            if meta.name not in await tx.conn.run_sync(table_names):
                return False
            found = await facts.get(tx, "grid_id")
        async with old.read() as tx:
            return found == await facts.get(tx, "grid_id")


async def _check_target_empty(target: OrchestratorSettings) -> None:
    """Look whether a grid could be moved to the target's database; makes no file.

    Raises:
        Conflict: ``grid.not_empty``.
        Unavailable: ``grid.database``.
    """
    if _is_new_file(target):
        return
    new = Database(target.database_url)
    try:
        async with new.read() as tx:
            await check_empty(tx, metadata.tables.keys())
    finally:
        await new.close()


def _is_new_file(target: OrchestratorSettings) -> bool:
    """Whether the new database is an SQLite file that is not there, so that nothing is in it."""
    if not target.db:
        return not target.database_file.exists()
    return target.db.startswith("sqlite") and not Database(target.db).path.exists()


def _check_differ(source: OrchestratorSettings, target: OrchestratorSettings) -> None:
    same_blobs = str(target.blob_place) == str(source.blob_place)
    if target.database_url == source.database_url and same_blobs:
        raise UsageError(
            "usage.invalid",
            "The grid is where it shall be moved to.",
            "Give another --to-db, --to-blobs or --to-state-dir.",
        )


async def _bring(
    source: OrchestratorSettings,
    target: OrchestratorSettings,
    layout: Layout,
    named: Named,
    incomplete: bool,
    told: Told,
) -> tuple[dict[str, int], Copied]:
    """Blobs into the new store, and read back; which (size in bytes by SHA-256)."""
    blobs = BlobStore.open(source.blob_place, layout.staging / "source", max_bytes=NO_LIMIT)
    store = BlobStore.open(target.blob_place, layout.staging / "target", max_bytes=NO_LIMIT)
    wanted = await wanted_of(blobs, named)
    try:
        copied = await copy_named(blobs, store, wanted, named, told, incomplete=incomplete)
    except TargetRefuses as refusal:
        raise refusal.problem from refusal
    if wrong := await find_damaged(store, wanted, told):
        shown = "; ".join(f"{sha256[:12]}: {why}" for sha256, why in sorted(wrong.items())[:3])
        raise Integrity(
            "grid.damaged",
            f"{len(wrong)} of the blobs in {target.blob_place} are not what they are named "
            f"({shown}).",
            "They were there before, or their disk is failing. Delete them there and run the same "
            "command again.",
        )
    return wanted, copied
