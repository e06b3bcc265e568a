"""The figures of a bad link, pure: how long a chunk is held, when it arrives, when the line breaks.

::

    home = ShapedLink(
        up=Shape(bytes_per_s=1.25e6, latency_s=0.02, jitter_s=0.005),
        down=Shape(bytes_per_s=5e6, latency_s=0.02, resets=(1_000_000,)),
    )

One :class:`ShapedLink` is one machine's line; several proxies (:mod:`distribai.testing.proxy`) may
share it, as a node's stream and its blobs share a modem. Time and chance are arguments.
"""

from __future__ import annotations

import random
from dataclasses import dataclass, field
from typing import Literal

from distribai.core.limits import Flow, Rate

Direction = Literal["up", "down"]
"""From the machine, or to it."""


@dataclass(frozen=True, slots=True)
class Shape:
    """One direction of a link.

    Attributes:
        bytes_per_s: over any long time; 0 is unlimited.
        burst: bytes that pass at once after a pause.
        latency_s: what every chunk takes besides; it costs no rate.
        jitter_s: uniformly up to so much more, drawn for each chunk; order is kept, as TCP does.
        resets: totals of bytes, rising: where one is reached the connection that reaches it breaks,
            and what was in it on its way is lost.
    """

    bytes_per_s: float = 0.0
    burst: float = 16_384.0
    latency_s: float = 0.0
    jitter_s: float = 0.0
    resets: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True)
class Passage:
    """What becomes of a chunk: its sender is held up for ``hold_s``; ``size`` bytes of it pass and
    arrive ``delay_s`` after that; then the connection breaks if ``reset``."""

    hold_s: float
    delay_s: float
    size: int
    reset: bool


class Lane:
    """One direction of a link at work; ``passed`` counts the bytes that it has let through.

    Args:
        shape: its figures; may be changed at any time.
        rng: jitter.
    """

    def __init__(self, shape: Shape, rng: random.Random) -> None:
        self._flow = Flow(Rate(0.0, 1.0))
        self._rng = rng
        self._resets: list[int] = []
        self.passed = 0
        self.shape = shape

    @property
    def shape(self) -> Shape:
        """Its figures."""
        return self._shape

    @shape.setter
    def shape(self, shape: Shape) -> None:
        self._shape = shape
        self._flow.rate = Rate(shape.bytes_per_s, shape.burst)
        self._resets = sorted(at for at in shape.resets if at > self.passed)

    def admit(self, size: int, now: float) -> Passage:
        """Let a chunk of ``size`` bytes in at ``now`` (seconds, monotonic)."""
        reset = bool(self._resets) and self.passed + size >= self._resets[0]
        if reset:
            size = self._resets.pop(0) - self.passed
        self.passed += size
        delay = self.shape.latency_s
        if self.shape.jitter_s:
            delay += self._rng.uniform(0.0, self.shape.jitter_s)
        return Passage(self._flow.take(size, now), delay, size, reset)


@dataclass
class ShapedLink:
    """One machine's line: two lanes that know nothing of each other.

    Args:
        up, down: the figures of each direction.
        rng: jitter of both.
    """

    up: Shape = Shape()
    down: Shape = Shape()
    rng: random.Random = field(default_factory=lambda: random.Random(0))

    def __post_init__(self) -> None:
        self.lanes: dict[Direction, Lane] = {
            "up": Lane(self.up, self.rng),
            "down": Lane(self.down, self.rng),
        }

    def reshape(self, up: Shape, down: Shape) -> None:
        """Change the figures; what was counted stays."""
        self.up, self.down = up, down
        self.lanes["up"].shape, self.lanes["down"].shape = up, down

    @property
    def bytes_up(self) -> int:
        """Bytes that have passed from the machine."""
        return self.lanes["up"].passed

    @property
    def bytes_down(self) -> int:
        """Bytes that have passed to the machine."""
        return self.lanes["down"].passed
