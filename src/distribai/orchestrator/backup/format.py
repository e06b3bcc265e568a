"""What a backup looks like on disk, and how its parts are written, read and checked."""

from __future__ import annotations

import asyncio
import base64
import gzip
import json
import re
from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from alembic import command
from alembic.util.exc import CommandError
from sqlalchemy import JSON, Connection, LargeBinary, MetaData, Table, create_engine, inspect

from distribai import durable
from distribai.core.plain import fingerprint, from_plain, to_plain
from distribai.core.spec import BlobRef
from distribai.errors import Conflict, Integrity, NotFound, Unavailable
from distribai.orchestrator.certificates import CA_CERT, CA_KEY
from distribai.orchestrator.people.keys import UNTOLD
from distribai.orchestrator.webhooks.keys import WEBHOOK_KEY
from distribai.store.blobs import blob_key, hash_file
from distribai.store.migrate import alembic_config

FORMAT = 1
"""Grows whenever a program of today could not read the backups of tomorrow."""

MANIFEST = "backup.json"
REVISION_TABLE = "alembic_version"
BLOB_LIST = "named-blobs"
STATE_FILES = ("invite", UNTOLD, WEBHOOK_KEY, CA_KEY, CA_CERT)
"""Secrets of which the database knows the hash at most: files of the state directory. The CA is
among them unless it lies elsewhere (``orchestrator.keys``)."""

PLAIN_NAME = re.compile(r"[a-z][a-z0-9_-]{0,63}")
"""Tables, files and snapshots: nothing that could lead out of the backup's directory."""

Line = list[Any]
"""The plain values of one row, in the order of its table's columns."""


@dataclass(frozen=True, slots=True)
class Progress:
    """How far a long work is: ``done`` of ``total``, in bytes or rows as ``what`` says."""

    what: str
    done: int
    total: int


Told = Callable[[Progress], None]
"""Called now and then, never from two threads at once."""


@dataclass(frozen=True, slots=True)
class Part:
    """One file of a backup: SHA-256 and size in bytes, and the lines that it holds."""

    sha256: str
    size: int
    lines: int = 0


@dataclass(frozen=True, slots=True)
class BackupManifest:
    """``backup.json``.

    ``revision`` is the schema's, ``columns`` are each table's in the order of its lines.
    ``taken_at`` is database time of the snapshot. ``lost`` are blobs that the database names and
    the grid no longer had. ``seal`` is the fingerprint of everything else.
    """

    format: int
    software: str
    grid_id: str
    database: str
    revision: str
    taken_at: float
    snapshot: str
    columns: Mapping[str, tuple[str, ...]]
    tables: Mapping[str, Part]
    blobs: Part
    blob_bytes: int
    files: Mapping[str, Part]
    lost: tuple[str, ...] = ()
    seal: str = ""

    def sealed(self) -> BackupManifest:
        """With the seal that fits."""
        return replace(self, seal=fingerprint(replace(self, seal="")))


class Layout:
    """Where the parts of the backup in ``root`` lie."""

    def __init__(self, root: Path) -> None:
        self.root = root = root.absolute()
        self.manifest = root / MANIFEST
        self.snapshots = root / "snapshots"
        self.blobs = root / "blobs"
        self.staging = root / "staging"

    def lines(self, snapshot: str, table: str) -> Path:
        """The file with a table's rows."""
        return self.snapshots / snapshot / f"{table}.jsonl.gz"

    def file(self, snapshot: str, name: str) -> Path:
        """A file that no database holds."""
        return self.snapshots / snapshot / name

    def blob(self, sha256: str) -> Path:
        """A blob."""
        return self.blobs / blob_key(sha256)


def write_manifest(layout: Layout, manifest: BackupManifest) -> None:
    """The last step of a backup.

    Raises:
        OSError: the disk refuses; the manifest of an earlier backup is untouched.
    """
    text = json.dumps(to_plain(manifest.sealed()), indent=1, sort_keys=True) + "\n"
    durable.write(layout.manifest, text.encode(), point="backup.manifest", mode=0o600)


def read_manifest(layout: Layout) -> BackupManifest:
    """What the directory holds.

    Raises:
        NotFound: ``grid.backup``: there is no finished backup.
        Integrity: ``grid.backup``: the manifest is damaged.
        Conflict: ``grid.schema``: a newer program made the backup.
        Unavailable: ``io.file``: it cannot be read.
    """
    try:
        text = layout.manifest.read_text(encoding="utf-8")
    except (FileNotFoundError, NotADirectoryError) as problem:
        begun = layout.snapshots.is_dir()
        raise NotFound(
            "grid.backup",
            f"{layout.root} holds no finished backup: "
            + f"there is no {MANIFEST} in it"
            + (", so the one that was begun was interrupted." if begun else "."),
            "Run `distribai grid backup` into it (again); give the directory that you gave then.",
        ) from problem
    except UnicodeDecodeError as problem:
        raise damaged(layout.manifest, "it is not text") from problem
    except OSError as problem:
        raise unreadable(layout.manifest, problem) from problem
    try:
        value = json.loads(text)
        if isinstance(value, dict) and isinstance(value.get("format"), int):
            _check_format(value["format"])
        manifest = from_plain(BackupManifest, value)
    except ValueError as problem:
        raise damaged(layout.manifest, f"it is not a manifest: {problem}") from problem
    if manifest.sealed().seal != manifest.seal:
        raise damaged(layout.manifest, "its seal does not fit")
    names = (manifest.snapshot, *manifest.tables, *manifest.files, *manifest.columns)
    if any(PLAIN_NAME.fullmatch(name) is None for name in names):
        raise damaged(layout.manifest, "it has impossible names")
    return manifest


def _check_format(found: int) -> None:
    if found > FORMAT:
        raise Conflict(
            "grid.schema",
            f"The backup has format {found}; this program reads up to {FORMAT}.",
            "Restore it with the version of DistribAI that made it, or a newer one.",
        )


def damaged(path: Path, how: str) -> Integrity:
    """A part of a backup that is not what was written."""
    return Integrity(
        "grid.backup",
        f"The backup is damaged: {path} is not what was written ({how}).",
        "Use another copy of the backup. While its grid still exists, delete that file and run "
        "`distribai grid backup` into the same directory again.",
    )


def unreadable(path: Path, problem: OSError) -> Unavailable:
    """A file that the disk does not give."""
    return Unavailable(
        "io.file",
        f"{problem.filename or path} cannot be read: {problem.strerror or problem}.",
        "Check that the disk is there, and the rights of this user.",
    )


async def check_part(path: Path, part: Part | BlobRef) -> None:
    """Hash one file of a backup.

    Raises:
        Integrity: ``grid.backup``: it is missing, has another size or another hash.
        Unavailable: ``io.file``: it cannot be read.
    """
    try:
        found = await asyncio.to_thread(hash_file, path)
    except FileNotFoundError as problem:
        raise damaged(path, "it is missing") from problem
    except OSError as problem:
        raise unreadable(path, problem) from problem
    if found.size != part.size:
        raise damaged(path, f"{found.size} bytes instead of {part.size}")
    if found.sha256 != part.sha256:
        raise damaged(path, f"its SHA-256 is {found.sha256[:12]}, not {part.sha256[:12]}")


# ------------------------------------------------------------------ rows


def reflect(connection: Connection, names: Collection[str]) -> MetaData:
    """Tables as this database has them, whatever this program's would be."""
    found = MetaData()
    found.reflect(connection, only=sorted(names))
    for table in found.tables.values():
        for column in table.columns:
            if isinstance(column.type, JSON):
                # None is SQL's NULL where there may be one, else JSON's null.
                column.type = JSON(none_as_null=bool(column.nullable))
    return found


def table_names(connection: Connection) -> set[str]:
    """What is in the database at all."""
    return set(inspect(connection).get_table_names())


def upgrade(connection: Connection, revision: str) -> None:
    """Bring the schema to ``revision``.

    Raises:
        Conflict: ``grid.schema``: this program does not know it.
    """
    try:
        command.upgrade(alembic_config(connection), revision)
    except CommandError as problem:
        raise Conflict(
            "grid.schema",
            f"The grid's schema {revision[:40]!r} is newer than this program.",
            "Use the version of DistribAI that the grid was last used with, or a newer one.",
        ) from problem


def tables_of(revision: str) -> frozenset[str]:
    """The names of a grid's tables at a revision of its schema, found by making them in memory: a
    database may hold the tables of others too.

    Raises:
        Conflict: ``grid.schema``: this program does not know the revision.
    """
    engine = create_engine("sqlite://")
    try:
        with engine.begin() as connection:
            upgrade(connection, revision)
            return frozenset(table_names(connection) - {REVISION_TABLE})
    finally:
        engine.dispose()


def to_line(values: tuple[Any, ...]) -> Line:
    """A row as JSON values: bytes as Base64."""
    return [
        base64.b64encode(value).decode() if isinstance(value, (bytes, memoryview)) else value
        for value in values
    ]


def from_line(table: Table, columns: tuple[str, ...], line: Line) -> dict[str, Any]:
    """The row that :func:`to_line` wrote, for a table with (at least) these columns."""
    row = dict(zip(columns, line, strict=True))
    for name, value in row.items():
        if isinstance(table.columns[name].type, LargeBinary) and value is not None:
            row[name] = base64.b64decode(value)
    return row


class LineWriter:
    """Writes a compressed file of JSON lines, which appears when it is finished.

    Raises:
        OSError: the disk refuses; from every method.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        self._part = path.with_name(f"{path.name}.part")
        self._file = self._part.open("wb")
        # Time and name are left out, so that equal rows are equal files.
        self._zip = gzip.GzipFile(
            fileobj=self._file, mode="wb", compresslevel=5, mtime=0, filename=""
        )
        self.count = 0

    def write(self, line: Line) -> None:
        """Add a line."""
        # ASCII: half a surrogate pair in somebody's words has no UTF-8.
        self._zip.write(json.dumps(line).encode() + b"\n")
        self.count += 1

    def finish(self) -> Part:
        """Give the file its name; what to check it by."""
        self.close()
        durable.promote(self._part, self._path, point="backup.rows")
        found = hash_file(self._path)
        return Part(found.sha256, found.size, self.count)

    def close(self) -> None:
        """Let go of the file, finished or not; a second call does nothing."""
        if not self._file.closed:
            try:
                self._zip.close()
            finally:
                self._file.close()


def read_lines(path: Path) -> Iterator[Line]:
    """The lines of a file that has been checked.

    Raises:
        Integrity: ``grid.backup``: it holds something else, although its hash fits.
        Unavailable: ``io.file``: it cannot be read.
    """
    try:
        with gzip.open(path, "rt", encoding="utf-8", newline="\n") as file:
            for text in file:
                line = json.loads(text)
                if not isinstance(line, list):
                    raise damaged(path, "a line is no list")
                yield line
    except (gzip.BadGzipFile, EOFError, ValueError) as problem:
        raise damaged(path, str(problem)) from problem
    except OSError as problem:
        raise unreadable(path, problem) from problem
