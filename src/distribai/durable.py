"""Files that are whole after a crash or a power cut: written aside, flushed, renamed.

Each call reaches four points (:mod:`distribai.points`), named after ``point``: ``.written`` (the
bytes are in the new file, perhaps only in memory), ``.flushed`` (they are on disk under the other
name), ``.renamed`` (the name is right, perhaps only in memory) and ``.durable``.
"""

from __future__ import annotations

import os
from pathlib import Path

from distribai import points
from distribai.errors import UsageError


def state_directory(path: Path) -> None:
    """Make the directory in which a program keeps its state, if it is not there.

    Raises:
        UsageError: ``io.file``: it cannot be made, or nothing can be written into it.
    """
    try:
        path.mkdir(parents=True, exist_ok=True, mode=0o700)
        why = "" if os.access(path, os.W_OK | os.X_OK) else "nothing can be written into it"
    except OSError as problem:
        why = problem.strerror or str(problem)
    if why:
        raise UsageError(
            "io.file",
            f"The state directory {path} cannot be used: {why}.",
            "Give another one: --state-dir DIRECTORY; or change the rights on it.",
            field="state_dir",
        )


def write(path: Path, data: bytes, *, point: str, mode: int = 0o644) -> None:
    """Put ``data`` into ``path``: whoever reads it sees the old bytes or the new ones, never a
    part. The directory must exist.

    Raises:
        OSError: the disk is full or refuses; the old file is untouched.
    """
    partial = path.with_name(path.name + ".new")
    descriptor = os.open(partial, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, mode)
    try:
        with os.fdopen(descriptor, "wb") as file:
            file.write(data)
        promote(partial, path, point=point)
    except OSError:
        partial.unlink(missing_ok=True)
        raise


def promote(partial: Path, path: Path, *, point: str) -> None:
    """Flush a finished file and give it its name, replacing what has it; on one file system.

    Raises:
        OSError: the disk is full or refuses.
    """
    points.reach(f"{point}.written")
    with partial.open("rb+") as file:
        os.fsync(file.fileno())
    points.reach(f"{point}.flushed")
    os.replace(partial, path)
    points.reach(f"{point}.renamed")
    sync_directory(path.parent)
    points.reach(f"{point}.durable")


def sync_directory(path: Path) -> None:
    """Flush a directory, so that the names in it survive a power cut.

    Raises:
        OSError: the disk refuses.
    """
    if os.name == "posix":  # Windows has no handle of a directory to sync
        handle = os.open(path, os.O_RDONLY)
        try:
            os.fsync(handle)
        finally:
            os.close(handle)
