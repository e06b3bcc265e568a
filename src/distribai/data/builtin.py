"""Data sets that need no file, found by name.

``stdlib`` is the source text of the running Python's standard library: about nine megabytes of
real text on every machine that can run an orchestrator. It is the same for the same Python on the
same system, and only prepared once, by the orchestrator; nodes get its shards.
"""

from __future__ import annotations

import os
import sysconfig
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Final

from distribai.core.datasets import BUILT_IN, check_built_in
from distribai.data.formats import Piece
from distribai.errors import InvalidData

STDLIB_MAX_BYTES: Final = BUILT_IN["stdlib"]
"""Where ``stdlib`` stops reading; today's Pythons stay below."""

_LEFT_OUT: Final = frozenset(
    {
        "__pycache__",
        "dist-packages",
        "encodings",  # character tables, hardly text
        "ensurepip",
        "idlelib",
        "lib2to3",
        "lib-dynload",
        "pydoc_data",  # one string of documentation markup
        "site-packages",
        "test",
        "tests",
        "turtledemo",
    }
)
_LEFT_OUT_PREFIXES: Final = ("config-", "_sysconfigdata", "__phello__")


def documents(name: str) -> Iterator[Piece]:
    """The documents of a built-in data set.

    Raises:
        InvalidData: ``data.missing``; no such data set, or this Python does not carry it.
    """
    check_built_in(name)
    return SETS[name]()


def stdlib_paths(root: Path) -> list[Path]:
    """The modules below ``root`` that ``stdlib`` reads, sorted by their relative POSIX path."""
    found: list[str] = []
    for folder, folders, files in os.walk(root):
        folders[:] = [f for f in folders if _is_wanted(f)]
        below = Path(folder).relative_to(root)
        found += [(below / f).as_posix() for f in files if f.endswith(".py") and _is_wanted(f)]
    return [root / name for name in sorted(found)]


def _is_wanted(name: str) -> bool:
    return name not in _LEFT_OUT and not name.startswith(_LEFT_OUT_PREFIXES)


def _stdlib() -> Iterator[Piece]:
    return read_modules(Path(sysconfig.get_path("stdlib")))


def read_modules(root: Path, max_bytes: int = STDLIB_MAX_BYTES) -> Iterator[Piece]:
    """One document per module below ``root``, until ``max_bytes`` are read.

    Modules that are not UTF-8 are left out.

    Raises:
        InvalidData: ``data.missing``; there is no module (a frozen Python, say).
    """
    left, found = max_bytes, False
    for path in stdlib_paths(root):
        raw = path.read_bytes()
        if len(raw) > left:
            break
        try:
            text = raw.decode()
        except UnicodeDecodeError:
            continue
        left, found = left - len(raw), True
        yield Piece(text, last=True)
    if not found:
        raise InvalidData(
            "data.missing",
            f"This Python carries no standard library source below {root}.",
            "Give files of your own in `data.files`.",
            field="data.source",
        )


SETS: Final[Mapping[str, Callable[[], Iterator[Piece]]]] = {"stdlib": _stdlib}
"""What reads each built-in data set."""
