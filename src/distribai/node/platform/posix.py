"""Locks and child processes on Linux, macOS and other POSIX systems."""

from __future__ import annotations

import contextlib
import fcntl
import os
import signal
from typing import Any


def lock(descriptor: int) -> bool:
    """Lock a file for this process alone; whether that worked."""
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


def child_options() -> dict[str, Any]:
    """A session of its own: no terminal, no Ctrl-C."""
    return {"start_new_session": True}


def kill_with_children(pid: int) -> None:
    """Kill the session that ``pid`` leads."""
    with contextlib.suppress(ProcessLookupError):
        os.killpg(pid, signal.SIGKILL)
