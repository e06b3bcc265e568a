"""What every part of the orchestrator is handed: stores, settings, clock and chance."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from pathlib import Path

from distribai.core.ids import RANDOM_BYTES, Kind, make_id
from distribai.orchestrator.certificates import Authority
from distribai.orchestrator.feed import Tail
from distribai.orchestrator.fleet.passes import Ring
from distribai.orchestrator.fleet.registry import Registry
from distribai.orchestrator.fleet.stock import Stock
from distribai.orchestrator.limits import Limits
from distribai.orchestrator.metrics import Metrics
from distribai.orchestrator.news import News
from distribai.sections import OrchestratorSettings
from distribai.store.blobs import BlobStore
from distribai.store.engine import Database
from distribai.store.presigning import Presigner

Counted = dict[tuple[str, str, str, str], list[int]]
"""Bytes [up, down] by (job, node, kind, blob's SHA-256)."""


class Wake:
    """A hint that something happened which duties may want to look at.

    Any number of hints between two looks are one. Duties look every tick anyway, so a lost hint
    costs time, never work. Several may wait: each remembers up to which ``count`` it has looked.
    """

    def __init__(self) -> None:
        self._event = asyncio.Event()
        self.count = 0
        self.own = 0
        """Hints of this process, not of others."""

    def set(self) -> None:
        """This process has changed something: let whoever waits look as soon as they can."""
        self.own += 1
        self.hint()

    def hint(self) -> None:
        """Another process has changed something."""
        self.count += 1
        self._event.set()
        self._event = asyncio.Event()

    async def wait(self, looked: int, timeout_s: float) -> None:
        """Return at once when there was a hint after ``looked``, else at the next one, and after
        ``timeout_s`` seconds in any case."""
        if self.count != looked:
            return
        try:
            await asyncio.wait_for(self._event.wait(), timeout_s)
        except TimeoutError:
            return


@dataclass
class Grid:
    """One orchestrator process's view of its grid.

    ``clock`` is monotonic seconds and decides nothing that is stored; ``entropy(n)`` gives n random
    bytes. ``holder`` names this process in leased rows, ``replica`` for people: host and port.
    ``stock`` is what it knows of blobs that nodes move. ``tail`` is where readers of events wait,
    ``news`` where those who act on them do. ``counted`` are bytes that wait to be written
    (``orchestrator.traffic``), ``metrics`` this process's figures. ``started_at`` and
    ``not_before`` (database time): when this process started, and until when it waits for nodes
    that were at work before. ``ring`` are the keys of nodes' tokens, ``limits`` how often one may
    ask; ``sleep`` slows who asks too often. ``ca_pem`` is the CA that this process's certificate is
    signed by; empty without TLS, or with a certificate that everybody trusts. ``authority`` signs
    nodes' certificates; None: they show none. ``join_link`` is what contributors paste, with the
    grid's standing invite; empty until this process listens.
    ``troubles`` are why duties of this process cannot go on at present, by duty.
    ``presigner`` sends who asks for a blob on to the object store; None: all passes through here.
    """

    db: Database
    blobs: BlobStore
    settings: OrchestratorSettings
    clock: Callable[[], float]
    entropy: Callable[[int], bytes]
    grid_id: str
    fleet: Registry = field(default_factory=Registry)
    stock: Stock = field(default_factory=Stock)
    wake: Wake = field(default_factory=Wake)
    tail: Tail = field(default_factory=Tail)
    news: News = field(default_factory=News)
    holder: str = "orchestrator"
    replica: str = "orchestrator"
    counted: Counted = field(default_factory=dict)
    metrics: Metrics = field(default_factory=Metrics)
    join_link: str = ""
    started_at: float = 0.0
    not_before: float = 0.0
    ring: Ring = field(default_factory=Ring)
    limits: Limits = field(init=False)
    sleep: Callable[[float], Awaitable[None]] = asyncio.sleep
    ca_pem: str = ""
    authority: Authority | None = None
    presigner: Presigner | None = None
    troubles: dict[str, str] = field(default_factory=dict)

    def __post_init__(self) -> None:
        """Set up what follows from the settings."""
        self.limits = Limits(self.settings.limits, self.clock)

    @property
    def scratch(self) -> Path:
        """Where files are made before they become blobs; emptied at every start."""
        path = self.settings.state_dir / "scratch"
        path.mkdir(parents=True, exist_ok=True)
        return path

    def new_id(self, kind: Kind) -> str:
        """A fresh id of ``kind``."""
        return make_id(kind, self.entropy(RANDOM_BYTES))
