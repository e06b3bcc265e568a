"""What storms share: each blow is undone a while later."""

from __future__ import annotations

import random
import time
from collections.abc import Callable


class Undoing:
    """What is to be undone, and when."""

    def __init__(self, chance: random.Random) -> None:
        self._random = chance
        self._pending: list[tuple[float, Callable[[], None]]] = []

    def __bool__(self) -> bool:
        return bool(self._pending)

    def later(self, least: float, most: float, undo: Callable[[], None]) -> None:
        """Undo something in ``least`` to ``most`` seconds."""
        self._pending.append((time.monotonic() + self._random.uniform(least, most), undo))

    def wait(self, seconds: float, look: Callable[[], None], every: float) -> None:
        """Let time pass, undo what is due, and ``look`` after things ``every`` so many seconds."""
        end = time.monotonic() + seconds
        while True:
            look()
            due = [p for p in self._pending if p[0] <= time.monotonic()]
            self._pending = [p for p in self._pending if p not in due]
            for _, undo in due:
                undo()
            if time.monotonic() >= end:
                return
            time.sleep(every)
