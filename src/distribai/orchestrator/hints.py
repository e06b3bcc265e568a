"""What replicas on one PostgreSQL tell each other, so that none has to ask all the time.

Who has changed something says so, with no more than its name: whoever holds a duty reads the outbox
then. The one that leads reads every row at once; it *relays* to the others what it has read of
nodes and of tasks that have an end, whichever replica they belong to. So the others need not read
the outbox for it, but each :data:`WALK_S` seconds: a message may be lost, and costs time then,
never work. A message is the sender's name, then a line of JSON if it relays.

PostgreSQL lets every role that may connect to the database send such a message. So what is heard is
read as a stranger's: it can have this process look where nothing is, and never keep it from
anything (``orchestrator.news``).
"""

from __future__ import annotations

import asyncio
import json
from collections import deque
from collections.abc import Awaitable, Callable
from contextlib import suppress
from typing import TYPE_CHECKING, Final

import structlog

from distribai.errors import Unavailable
from distribai.orchestrator.news import Told, tells
from distribai.store.outbox import Cursor

if TYPE_CHECKING:
    from distribai.orchestrator.context import Grid

log = structlog.get_logger(__name__)

HINT_S = 0.02
"""Seconds between two messages to other replicas at least."""

LEAD_S = 1.0
"""Who leads looks so often whether it still does when there is nothing to relay."""

WALK_S = 1.0
"""Seconds between two looks at the outbox of a replica that is told what is in it."""

MAX_BYTES: Final = 7500
"""Bytes of a message: PostgreSQL takes less than 8000."""

MAX_WAITING = 200
"""Rows that wait to be relayed; when there are more, the others read for themselves."""


class Hints:
    """This process's half. ``leads`` says whether it relays, ``shares`` whether others hold duties
    that it does not."""

    def __init__(self, grid: Grid, leads: Callable[[], bool], shares: Callable[[], bool]) -> None:
        self._grid, self._leads, self._shares = grid, leads, shares
        self._waiting: deque[str] = deque()
        self._missed = self._hinted = self._stopping = False
        self._due, self._hurry = asyncio.Event(), asyncio.Event()
        self.connected = False
        """Whether others are heard at present."""
        grid.news.listener = self.note

    def note(self, key: Cursor, told: Told) -> None:
        """This process has read a row of the outbox for the first time."""
        if not (self.connected and self._leads()):
            return
        if not tells(told):
            self._hinted |= self._shares()
        elif len(self._waiting) < MAX_WAITING and not self._missed:
            self._waiting.append(json.dumps([*key, *told], separators=(",", ":")))
        else:
            self._missed = True
            self._waiting.clear()
        self._due.set()

    def next_message(self) -> str:
        """What is to be told now to whoever does not lead; empty when there is nothing."""
        holder = self._grid.holder
        self._due.clear()
        if self._missed:
            self._missed = self._hinted = False
            return f"{holder}\nnull"
        rows: list[str] = []
        room = MAX_BYTES - len(holder) - 3
        while self._waiting and (room := room - len(self._waiting[0]) - 1) >= 0:
            rows.append(self._waiting.popleft())
        if self._waiting:
            self._due.set()
        hinted, self._hinted = self._hinted, False
        if rows:
            return f"{holder}\n[{','.join(rows)}]"
        return holder if hinted else ""

    def heard(self, message: str) -> None:
        """A process of the grid has told something; what this one cannot read is a hint."""
        sender, _, relayed = message.partition("\n")
        if sender == self._grid.holder:
            return
        if relayed:
            self._take(relayed)
        self._grid.wake.hint()

    def _take(self, relayed: str) -> None:
        try:
            rows = [_row(*row) for row in json.loads(relayed)]
        except (TypeError, ValueError, RecursionError):
            # More than a message holds, another version's, or nobody's of this grid.
            self._hurry.set()
            return
        for key, told in rows:
            self._grid.news.relayed(key, told)

    async def pause(self, least_s: float) -> None:
        """Rest until it is time to read the outbox again, for a replica that is told what is in
        it; not less than ``least_s`` seconds."""
        with suppress(TimeoutError):
            await asyncio.wait_for(self._hurry.wait(), WALK_S)
        self._hurry.clear()
        await asyncio.sleep(least_s)

    def stop(self) -> None:
        """Let :meth:`run` and :meth:`pause` end."""
        self._stopping = True
        self._hurry.set()
        self._due.set()

    async def run(self) -> None:
        """Tell and heed until :meth:`stop`."""
        wake, tick = self._grid.wake, self._grid.settings.liveness.tick_s
        while not self._stopping:
            try:
                async with self._grid.db.hints(self.heard) as tell:
                    self.connected = True
                    self._hurry.set()  # something may have been told before
                    wake.hint()
                    await self._tell(tell)
            except Unavailable as problem:
                log.debug("hints.unavailable", problem=str(problem))  # every tick there is a look
                self.connected = False
                self._hurry.set()
                await wake.wait(wake.count, tick)
            finally:
                self.connected = False

    async def _tell(self, tell: Callable[[str], Awaitable[None]]) -> None:
        grid, tick = self._grid, self._grid.settings.liveness.tick_s
        told, told_at = -1, grid.clock()
        while not self._stopping:
            looked, own, now, leads = grid.wake.count, grid.wake.own, grid.clock(), self._leads()
            message = self.next_message()
            # Every tick in any case: only who speaks notices that nobody listens.
            if now - told_at >= tick or told < 0 or (own != told and not leads):
                message = message or grid.holder
            told = own
            if message:
                told_at = now
                await tell(message)
                await asyncio.sleep(HINT_S)
            if leads:
                with suppress(TimeoutError):
                    await asyncio.wait_for(self._due.wait(), min(LEAD_S, tick))
            else:
                await grid.wake.wait(looked, tick)


def _row(epoch: object, xid: object, row_id: object, *about: object) -> tuple[Cursor, Told]:
    """One relayed row.

    Raises:
        TypeError: it is none.
        ValueError: a text that no database can be asked for.
    """
    if not (isinstance(epoch, int) and isinstance(xid, int) and isinstance(row_id, int)):
        raise TypeError("a row's key is three whole numbers")
    texts = [text for text in about if isinstance(text, str)]
    if len(texts) != len(about):
        raise TypeError("what a row is about is text")
    if not all(text.isascii() and "\0" not in text for text in texts):
        raise ValueError("kinds and ids are ASCII")
    return (epoch, xid, row_id), Told(*texts)
