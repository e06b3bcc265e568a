"""What virtual nodes share, and what of each outlives a crash."""

from __future__ import annotations

import asyncio
from collections import defaultdict
from dataclasses import dataclass, field

from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

from distribai.node.feedback import FeedbackStore
from distribai.orchestrator.context import Grid
from distribai.testing.simulation.hand import Hand
from distribai.testing.simulation.work import Workshop


@dataclass(frozen=True, slots=True)
class Payload:
    """Bytes that a real model of the simulated size would move: a delta, an encoded update, a
    snapshot."""

    delta: float = 25e6
    update: float = 25e6
    snapshot: float = 200e6


@dataclass
class Site:
    """What all virtual nodes share. ``obedient`` nodes heed ``finish``, others do not; ``defect``
    gets what went wrong in a task that nobody awaits."""

    grid: Grid
    invite: str
    workshop: Workshop
    payload: Payload
    origin: float
    seed: int
    defect: asyncio.Future[None]
    obedient: bool = True
    spent: dict[str, float] = field(default_factory=lambda: defaultdict(float))
    steps_computed: float = 0.0


@dataclass
class Disk:
    """What outlives a crash; ``feedback`` is the product's own, in a folder."""

    key: Ed25519PrivateKey
    feedback: FeedbackStore
    hands: dict[tuple[str, int], Hand] = field(default_factory=dict)
    held: dict[str, int] = field(default_factory=dict)
