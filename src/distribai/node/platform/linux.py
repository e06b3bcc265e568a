"""What only Linux offers."""

from __future__ import annotations

import ctypes
import os
import signal

_PR_SET_PDEATHSIG = 1  # <linux/prctl.h>


def die_with_parent(parent: int, how: str) -> None:
    """Have the kernel signal this process when the thread that started it ends (prctl(2)).

    A parent that is gone already sends no signal any more; then this process ends at once.

    Raises:
        OSError: the kernel refused.
    """
    wanted = signal.SIGKILL if how == "kill" else signal.SIGTERM
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.prctl(_PR_SET_PDEATHSIG, int(wanted), 0, 0, 0) != 0:
        raise OSError(ctypes.get_errno(), "prctl(PR_SET_PDEATHSIG) failed")
    if os.getppid() != parent:
        os._exit(0)
