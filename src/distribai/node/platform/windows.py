"""Locks and child processes on Windows."""

from __future__ import annotations

import contextlib
import importlib
import subprocess
from typing import Any

import psutil


def lock(descriptor: int) -> bool:
    """Lock a file for this process alone; whether that worked."""
    msvcrt: Any = importlib.import_module("msvcrt")  # typed for Windows only
    try:
        msvcrt.locking(descriptor, msvcrt.LK_NBLCK, 1)
    except OSError:
        return False
    return True


def child_options() -> dict[str, Any]:
    """A process group of its own: no Ctrl-C."""
    return {"creationflags": getattr(subprocess, "CREATE_NEW_PROCESS_GROUP", 0)}


def kill_with_children(pid: int) -> None:
    """Kill ``pid`` and its descendants."""
    with contextlib.suppress(psutil.NoSuchProcess):
        first = psutil.Process(pid)
        for process in [*first.children(recursive=True), first]:
            with contextlib.suppress(psutil.NoSuchProcess):
                process.kill()
