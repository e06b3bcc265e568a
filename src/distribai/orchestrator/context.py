"""What every part of the orchestrator is handed: its stores, its settings, its clock and its chance."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import dataclass, field

from distribai.config import OrchestratorSettings
from distribai.core.ids import RANDOM_BYTES, Kind, make_id
from distribai.orchestrator.fleet.registry import Registry
from distribai.store.blobs import BlobStore
from distribai.store.engine import Database


class Wake:
    """A hint that something happened which duties may want to look at.

    Any number of hints between two looks are one. Duties look every tick anyway, so a lost hint
    costs time, never work.
    """

    def __init__(self) -> None:
        self._event = asyncio.Event()

    def set(self) -> None:
        """Let the duties look as soon as they can."""
        self._event.set()

    async def wait(self, timeout_s: float) -> bool:
        """Wait for a hint, at most ``timeout_s`` seconds, and take it; whether there was one."""
        try:
            await asyncio.wait_for(self._event.wait(), timeout_s)
        except TimeoutError:
            return False
        self._event.clear()
        return True


@dataclass
class Grid:
    """One orchestrator process's view of its grid.

    ``clock`` is monotonic seconds and decides nothing that is stored; ``entropy(n)`` gives n random
    bytes. ``holder`` names this process in leased rows.
    """

    db: Database
    blobs: BlobStore
    settings: OrchestratorSettings
    clock: Callable[[], float]
    entropy: Callable[[int], bytes]
    grid_id: str
    fleet: Registry = field(default_factory=Registry)
    wake: Wake = field(default_factory=Wake)
    holder: str = "orchestrator"

    def new_id(self, kind: Kind) -> str:
        """A fresh id of ``kind``."""
        return make_id(kind, self.entropy(RANDOM_BYTES))
