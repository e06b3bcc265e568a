"""Garbage collection in a process that keeps ten thousand sessions.

A full collection visits every object that there is, and nothing else runs meanwhile: 0.2 s of CPU
with 1,500 nodes, in proportion to them, and Python does it again whenever there is a quarter more.
Sessions live long and what they hold is freed by its reference counts. So what has survived a full
collection is left out of the next ones (``gc.freeze``), each of which visits what is new alone; and
now and then one visits everything, for rings among what is old.
"""

from __future__ import annotations

import gc
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

WHOLE_S = 3600.0
"""Seconds between two full collections of everything: nothing that is garbage stays longer, but by
the time to the next one."""

OLDEST = 2
"""The generation of a full collection."""


@contextmanager
def old_objects_left_alone(clock: Callable[[], float] = time.monotonic) -> Iterator[None]:
    """As long as the block lasts full collections of this process visit what is new, and each
    :data:`WHOLE_S` seconds on ``clock`` one visits everything."""
    whole_at = clock()

    def on_collection(phase: str, info: Mapping[str, Any]) -> None:
        nonlocal whole_at
        if phase != "stop" or info["generation"] != OLDEST:
            return
        if clock() - whole_at >= WHOLE_S:
            whole_at = clock()
            gc.unfreeze()  # the next one visits all of them
        else:
            gc.freeze()

    gc.callbacks.append(on_collection)
    try:
        yield
    finally:
        gc.callbacks.remove(on_collection)
        gc.unfreeze()
