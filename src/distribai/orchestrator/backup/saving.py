"""``distribai grid backup``: a running or stopped grid into a directory."""

from __future__ import annotations

import errno
import os
import shutil
import sqlite3
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from distribai import __version__, durable
from distribai.errors import Conflict, Integrity, NotFound, Unavailable
from distribai.orchestrator.backup.copying import NO_LIMIT, Copied, TargetRefuses, copy_blobs
from distribai.orchestrator.backup.dumping import Snapshot, dump
from distribai.orchestrator.backup.existing import existing
from distribai.orchestrator.backup.format import (
    BLOB_LIST,
    FORMAT,
    STATE_FILES,
    BackupManifest,
    Layout,
    LineWriter,
    Part,
    Told,
    write_manifest,
)
from distribai.orchestrator.backup.naming import Named
from distribai.sections import OrchestratorSettings
from distribai.store.blobs import BlobStore, hash_file
from distribai.store.engine import Database
from distribai.store.lock import FileLock

LOOKS = 3
"""How often the rows are read anew where blobs that they name are gone: a grid that runs lets go of
snapshots, and of none that its newest rows name. Each time nearly everything is there already."""


@dataclass(frozen=True, slots=True)
class Saved:
    """A finished backup: what it is, and the blobs that were not yet there from an earlier one."""

    manifest: BackupManifest
    copied: Copied


async def back_up(
    settings: OrchestratorSettings,
    out: Path,
    *,
    secrets: Mapping[str, str] | None = None,
    incomplete: bool = False,
    told: Told = lambda _: None,
    entropy: Callable[[int], bytes] = os.urandom,
) -> Saved:
    """Save the grid that ``settings`` name into ``out``, while it runs or stands still.

    A second backup into the same directory copies only the blobs that it lacks, and takes the
    first one's place when it is finished. Interrupted, it can simply be run again.

    Args:
        secrets: further texts to keep, by name, readable by their owner alone.
        incomplete: finish even if the grid itself has lost blobs; the backup lists them.
        told: hears of the progress.
        entropy: randomness for the snapshot's name.

    Raises:
        NotFound: ``grid.missing``: there is no grid where the settings say.
        Conflict: ``grid.schema``; ``grid.locked``: another backup writes into ``out``.
        Integrity: ``grid.damaged``: the grid has lost blobs. Everything else has been copied.
        Unavailable: ``io.file``: ``out`` cannot be written; ``grid.database`` or ``blob.store``.
    """
    layout = Layout(out)
    async with existing(settings) as db:
        with _writing(layout):
            name = f"s-{entropy(8).hex()}"
            return await _save(settings, db, layout, name, secrets or {}, incomplete, told)


async def _save(
    settings: OrchestratorSettings,
    db: Database,
    layout: Layout,
    name: str,
    secrets: Mapping[str, str],
    incomplete: bool,
    told: Told,
) -> Saved:
    snapshot, wanted, copied = await _copy(settings, db, layout, name, incomplete, told)
    files = write_files(layout, name, settings.state_dir, secrets)
    manifest = describe(layout, name, snapshot, wanted, copied, files)
    write_manifest(layout, manifest)
    _forget_others(layout, name)
    return Saved(manifest.sealed(), copied)


async def _copy(
    settings: OrchestratorSettings,
    db: Database,
    layout: Layout,
    name: str,
    incomplete: bool,
    told: Told,
) -> tuple[Snapshot, dict[str, int], Copied]:
    """The rows of one moment, and the blobs that they name."""
    source = BlobStore.open(settings.blob_place, layout.staging / "source", max_bytes=NO_LIMIT)
    target = BlobStore.open(layout.blobs, layout.staging / "target", max_bytes=NO_LIMIT)
    blobs = size_of_all = look = 0
    while True:
        look += 1
        shutil.rmtree(layout.snapshots / name, ignore_errors=True)
        snapshot, named = await dump(db, layout, name, told)
        wanted = await wanted_of(source, named)
        for sha256, size in wanted.items():
            path = layout.blob(sha256)
            if path.exists() and path.stat().st_size != size:
                path.unlink()  # not ours: a blob appears whole
        again = look < LOOKS
        try:
            copied = await copy_named(
                source, target, wanted, named, told, incomplete=incomplete or again
            )
        except TargetRefuses as refusal:
            raise _refused(layout.root, refusal.problem.message) from refusal
        blobs, size_of_all = blobs + copied.blobs, size_of_all + copied.bytes
        if not copied.lost or not again:
            copied.blobs, copied.bytes = blobs, size_of_all
            return snapshot, wanted, copied


def describe(
    layout: Layout,
    name: str,
    snapshot: Snapshot,
    wanted: Mapping[str, int],
    copied: Copied,
    files: Mapping[str, Part],
) -> BackupManifest:
    """Write the list of blobs beside the snapshot's rows, and say what there is.

    Raises:
        OSError: the disk refuses.
    """
    return BackupManifest(
        format=FORMAT,
        software=__version__,
        grid_id=snapshot.grid_id,
        database=snapshot.database,
        revision=snapshot.revision,
        taken_at=snapshot.taken_at,
        snapshot=name,
        columns=snapshot.columns,
        tables=snapshot.tables,
        blobs=_write_list(layout, name, wanted),
        blob_bytes=sum(wanted.values()),
        files=files,
        lost=tuple(sorted(copied.lost)),
    )


# ------------------------------------------------------------------ blobs and files


async def wanted_of(source: BlobStore, named: Named) -> dict[str, int]:
    """The blobs to copy, with their sizes in bytes: all that rows need, and what they claim as far
    as it is there."""
    return {**await _there(source, named), **named.needed}


async def copy_named(
    source: BlobStore,
    target: BlobStore,
    wanted: dict[str, int],
    named: Named,
    told: Told,
    *,
    incomplete: bool,
) -> Copied:
    """Copy ``wanted``, and take out of it what is lost.

    Raises:
        Integrity: ``grid.damaged``: the source has lost a blob that a row needs, and the copy is
            not to be ``incomplete``. Everything else has been copied.
        TargetRefuses: the target cannot take them.
    """
    copied = await copy_blobs(source, target, wanted, told)
    for sha256 in list(copied.lost):
        del wanted[sha256]
        if sha256 not in named.needed:
            del copied.lost[sha256]  # whoever looks at the claim will find it wanting
    if copied.lost and not incomplete:
        raise _damaged(copied.lost, named)
    return copied


async def _there(source: BlobStore, named: Named) -> dict[str, int]:
    """Those of the claimed blobs that exist as they were claimed."""
    found: dict[str, int] = {}
    for sha256, size in named.claimed.items():
        if sha256 in named.needed:
            continue
        try:
            if await source.size(sha256) == size:
                found[sha256] = size
        except NotFound:
            continue
    return found


def _write_list(layout: Layout, name: str, wanted: Mapping[str, int]) -> Part:
    writer = LineWriter(layout.lines(name, BLOB_LIST))
    try:
        for sha256, size in sorted(wanted.items()):
            writer.write([sha256, size])
        return writer.finish()
    finally:
        writer.close()


def write_files(
    layout: Layout, name: str, state_dir: Path, secrets: Mapping[str, str]
) -> dict[str, Part]:
    """Keep the secrets of which the database knows the hash at most, and ``secrets``.

    Raises:
        OSError: the disk refuses.
    """
    texts = dict(secrets)
    for key in STATE_FILES:
        if (state_dir / key).exists():
            texts[key] = (state_dir / key).read_text(encoding="ascii")
    parts: dict[str, Part] = {}
    for key, text in texts.items():
        path = layout.file(name, key)
        durable.write(path, text.encode(), point="backup.file", mode=0o600)
        found = hash_file(path)
        parts[key] = Part(found.sha256, found.size)
    return parts


def _forget_others(layout: Layout, name: str) -> None:
    """Remove the rows of earlier and of interrupted backups; blobs stay."""
    for other in layout.snapshots.iterdir():
        if other.name != name:
            shutil.rmtree(other)


# ------------------------------------------------------------------ the directory


@contextmanager
def _writing(layout: Layout) -> Iterator[None]:
    """The backup's directory, closed to others, for one backup at a time.

    Raises:
        Conflict: ``grid.locked``.
        Unavailable: ``io.file``: the disk is full or refuses, now or in the block.
    """
    try:
        layout.root.mkdir(parents=True, exist_ok=True, mode=0o700)
        lock = FileLock(layout.root / "backup")
    except OSError as problem:
        why = problem.strerror or str(problem)
        raise _refused(layout.root, why, problem.errno) from problem
    except sqlite3.OperationalError as problem:  # the lock's own file: the directory is there
        raise _refused(layout.root, str(problem), errno.EACCES) from problem
    except Conflict as problem:
        raise Conflict(
            "grid.locked",
            f"Another backup is being written into {layout.root}.",
            "Wait for its end, or give another directory.",
        ) from problem
    try:
        shutil.rmtree(layout.staging, ignore_errors=True)
        yield
    except OSError as problem:
        where = problem.filename or layout.root
        raise _refused(where, problem.strerror or str(problem), problem.errno) from problem
    finally:
        shutil.rmtree(layout.staging, ignore_errors=True)
        lock.release()


def _refused(where: Path | str, why: str, number: int | None = None) -> Unavailable:
    """The backup's place does not take it; ``number`` is the system's, if it said one."""
    again = (
        "then run it again into the same directory: it goes on with the blobs that are still "
        "missing."
    )
    hint = f"Free some space or give another disk, {again}"
    if number in _NOT_A_PLACE:
        hint = "Give a directory that exists, or can be made, and that this user may write to."
    return Unavailable(
        "io.file", f"The backup cannot be written to {where}: {why.rstrip('.')}.", hint
    )


_NOT_A_PLACE = frozenset(
    {
        *(errno.EACCES, errno.EPERM, errno.EROFS, errno.ENOENT, errno.ENOTDIR, errno.EEXIST),
        *(errno.EISDIR, errno.ELOOP, errno.ENAMETOOLONG, errno.EINVAL),
    }
)
"""What a system says of a path, not of a disk that is full or fails."""


def _damaged(lost: Mapping[str, str], named: Named) -> Integrity:
    shown = "; ".join(
        f"{sha256[:12]} of the table {named.where[sha256]}: {why.rstrip('.')}"
        for sha256, why in sorted(lost.items())[:3]
    )
    return Integrity(
        "grid.damaged",
        f"The grid has lost {len(lost)} of the blobs that its database names ({shown}).",
        "Bring them back from an older backup: a file under its `blobs` goes to the same place "
        "under the grid's. Or finish the backup without them: --incomplete.",
    )
