"""What a node remembers of its line: bytes by month, and how fast each direction was."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Final

FILE: Final = "traffic"
"""In the state directory: what the month has taken, how fast the link was."""

MBPS: Final = 125_000.0
"""Bytes a second that are 10^6 bits a second."""

KNOWN_BYTES: Final = 1 << 20
"""Bytes that must have moved one way to say anything about the link."""

MEMORY_BYTES: Final = float(64 << 20)
"""After so many bytes what was seen before counts half."""


@dataclass(frozen=True, slots=True)
class Seen:
    """What one direction moved while it was at work: ``size`` bytes in ``seconds``, both fading."""

    size: float = 0.0
    seconds: float = 0.0

    def after(self, size: int, seconds: float) -> Seen:
        """With ``size`` more bytes in ``seconds``."""
        keep = 0.5 ** (size / MEMORY_BYTES)
        return Seen(keep * self.size + size, keep * self.seconds + seconds)

    @property
    def mbps(self) -> float:
        """10^6 bits a second; 0: too little was seen."""
        if self.size < KNOWN_BYTES or self.seconds <= 0:
            return 0.0
        return self.size / self.seconds / MBPS


def within(mbps: float, limit_mbps: float) -> float:
    """A rate under its owner's limit (0: none). What is measured may be above it: small transfers
    pass at once."""
    return min(mbps, limit_mbps) if limit_mbps else mbps


@dataclass(frozen=True, slots=True)
class Kept:
    """What is kept on disk: bytes by month (``2026-11``), how fast each direction was, and the
    largest blob that was sent. ``month_bytes`` is the owner's limit (0: none), ``why`` the reason
    that no tasks are taken for it. ``up_mbps`` and ``down_mbps`` are the owner's limits of the line
    (0: none)."""

    months: Mapping[str, int] = field(default_factory=dict)
    up: Seen = Seen()
    down: Seen = Seen()
    largest_up: int = 0
    month_bytes: int = 0
    why: str = ""
    up_mbps: float = 0.0
    down_mbps: float = 0.0
