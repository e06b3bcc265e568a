"""Weights files that this process has made again for somebody and that stay for a while
(``orchestrator.rebuilding``): whose turn it is, and how many bytes they may be together.

In memory: a process that starts has lent nothing; what earlier ones have lent goes by its date.
"""

from __future__ import annotations

import asyncio
import math
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

from distribai.core.spec import BlobRef
from distribai.errors import TooMany

LENT_BYTES = 32 << 30
"""What is lent at a time, at most: four files of a model of 2 billion parameters."""

TURN_S = 5.0
"""When an account whose rebuild still waits or runs may ask for another one."""


@dataclass(frozen=True, slots=True)
class Loan:
    """A file, the account for which it was made, and when it goes (seconds on the grid's clock)."""

    ref: BlobRef
    account: str
    until: float


@dataclass
class Loans:
    """What is lent, by job and version. ``making`` is held by the one rebuild that runs."""

    files: dict[tuple[str, int], Loan] = field(default_factory=dict)
    making: asyncio.Lock = field(default_factory=asyncio.Lock)
    _asking: set[str] = field(default_factory=set)

    @contextmanager
    def turn(self, account: str) -> Iterator[None]:
        """One rebuild of an account waits or runs while the block does.

        Raises:
            TooMany: ``limit.rate``: another one does.
        """
        if account in self._asking:
            raise TooMany(
                "limit.rate",
                "Another version is being made again for this account, or waits for its turn.",
                "Ask again when that one has come; one at a time is made.",
                retry_after=TURN_S,
            )
        self._asking.add(account)
        try:
            yield
        finally:
            self._asking.discard(account)

    def check_room(self, key: tuple[str, int], account: str, size: int, now: float) -> None:
        """Refuse the file ``key`` of ``size`` bytes if there is no room for it beside the others.
        An account may have as much as it leaves free, so that none can take all; a file that
        would be the only one always has room.

        Raises:
            TooMany: ``limit.rate``; there is room when something goes.
        """
        self.files = {key: loan for key, loan in self.files.items() if loan.until > now}
        lent = [loan for other, loan in self.files.items() if other != key]
        own = sum(loan.ref.size for loan in lent if loan.account == account)
        free = LENT_BYTES - sum(loan.ref.size for loan in lent)
        if not lent or own + size <= free:
            return
        wait = max(1.0, min(loan.until for loan in lent) - now)
        raise TooMany(
            "limit.rate",
            f"There is no room for {size} bytes more of versions that were made again: "
            f"{own} bytes are there for this account, {max(free, 0)} are free.",
            f"What was asked for before goes after a while; try again in {math.ceil(wait)} s.",
            retry_after=wait,
        )
