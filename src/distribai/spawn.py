"""How this program starts children of itself, in a checkout, an install and a frozen build alike.

No fork, no ``python -m``: a child is a fresh interpreter that imports one entry point by name.
Entry points are a closed table; nothing from the network can name a module.
"""

from __future__ import annotations

import importlib
import os
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

FROZEN_FLAG = "--distribai-child"
PARENT = "DISTRIBAI_PARENT_PID"
"""Environment variable with the process id of the parent that a child must not outlive."""


@dataclass(frozen=True, slots=True)
class Entry:
    """An entry point.

    ``target`` is ``module:function``. ``dies`` is how it ends when its parent is gone: ``kill`` at
    once, or ``terminate`` so that it can put things in order.
    """

    target: str
    dies: str


ENTRIES: dict[str, Entry] = {
    "training-child": Entry("distribai.training.child:main", "kill"),
    "cli": Entry("distribai.cli.main:main", "terminate"),
}


def command(entry: str, *arguments: str) -> list[str]:
    """The command line that starts ``entry`` with ``arguments``.

    ``-P`` keeps the working directory off the child's import path: a file ``torch.py`` that lies
    there must not run.

    Raises:
        KeyError: no such entry.
    """
    if entry not in ENTRIES:
        raise KeyError(entry)
    if getattr(sys, "frozen", False):
        return [sys.executable, FROZEN_FLAG, entry, *arguments]
    code = "from distribai.spawn import child; child()"
    return [sys.executable, "-P", "-c", code, entry, *arguments]


def environment() -> dict[str, str]:
    """The environment of a child that must not outlive this process.

    The child learns its parent's id from here, so that a parent that died before the child could
    arrange anything is noticed.
    """
    return {**os.environ, PARENT: str(os.getpid())}


def is_child(argv: Sequence[str]) -> bool:
    """Whether a frozen program was started as a child; then it calls :func:`child` and no more."""
    return len(argv) > 2 and argv[1] == FROZEN_FLAG


def child() -> None:
    """Run the entry that the command line names, and exit with its status."""
    arguments = sys.argv[2:] if is_child(sys.argv) else sys.argv[1:]
    entry = ENTRIES[arguments[0]]
    sys.argv = arguments
    _die_with_parent(entry.dies)
    sys.exit(_load(entry.target)())


def _die_with_parent(how: str) -> None:
    parent = os.environ.pop(PARENT, "")
    if parent:
        _load("distribai.node.platform:die_with_parent")(int(parent), how)


def _load(target: str) -> Callable[..., Any]:
    module, name = target.split(":")
    found: Callable[..., Any] = getattr(importlib.import_module(module), name)
    return found
