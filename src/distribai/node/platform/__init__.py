"""What differs between operating systems; the rest of the node does not ask which one it is on."""

from __future__ import annotations

import os
import sys
from pathlib import Path
from types import TracebackType
from typing import Any, Protocol

from distribai import durable
from distribai.errors import Conflict

POSIX = os.name == "posix"


class _System(Protocol):
    def lock(self, descriptor: int) -> bool: ...

    def child_options(self) -> dict[str, Any]: ...

    def kill_with_children(self, pid: int) -> None: ...


def _system() -> _System:
    if sys.platform == "win32":
        from distribai.node.platform import windows

        return windows
    from distribai.node.platform import posix

    return posix


def child_options() -> dict[str, Any]:
    """Keyword arguments for the start of a child that Ctrl-C in a terminal must not reach.

    The daemon decides when its child stops; a terminal's Ctrl-C goes to the whole foreground group.
    """
    return _system().child_options()


def kill_with_children(pid: int) -> None:
    """Kill a child that was started with :func:`child_options`, and all that it started; one that
    is gone already is no error."""
    _system().kill_with_children(pid)


def die_with_parent(parent: int, how: str) -> None:
    """End this process when process ``parent`` ends, where the kernel offers that (Linux).

    Elsewhere a child notices by the end of its standard input. Called in the child, before anything
    else. ``how``: ``kill`` or ``terminate``.
    """
    if sys.platform == "linux":
        from distribai.node.platform import linux

        linux.die_with_parent(parent, how)


class DirectoryLock:
    """Exclusive use of a state directory, released by the kernel however the process ends.

    Raises:
        Conflict: ``node.locked``, on entering, when another process holds it.
        UsageError: ``io.file``, on entering: it cannot be made or written.
    """

    def __init__(self, directory: Path) -> None:
        self._path = directory / "lock"
        self._descriptor = -1

    def __enter__(self) -> DirectoryLock:
        durable.state_directory(self._path.parent)
        descriptor = os.open(self._path, os.O_RDWR | os.O_CREAT, 0o600)
        if not _system().lock(descriptor):
            os.close(descriptor)
            raise Conflict(
                "node.locked",
                f"Another node daemon already runs in {self._path.parent}.",
                "Stop it, or give this one a --state-dir of its own.",
            )
        self._descriptor = descriptor
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        problem: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        os.close(self._descriptor)
