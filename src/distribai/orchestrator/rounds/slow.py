"""Devices whose downloads take longer than a job's rounds: a task each round would never come to a
step, take the line from what is fetched ahead, and keep the round waiting.

A training task that its node has lost to the next rounds before its first step says so in its
causes (:data:`UNBEGUN`). After several of them in a row the device is left out of rounds, of more
each time, while its node goes on fetching (``fleet.supplies`` lets it); unless a round cannot open
without it. Anything that it hands in ends the row.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Final

from distribai.core.states import TaskState
from distribai.store.engine import AnyRow, Tx
from distribai.store.statements import work

UNBEGUN: Final = "task.unbegun"
"""The cause of a task that ended with its round, before its first step."""

SLOW: Final = 2
"""Tasks in a row that make a device slow: the first one has the data and the first weights to
fetch, which is once."""

MOST: Final = 16
"""Rounds that a device is left out of at most: its line, or the rounds, may have changed."""

WINDOW: Final = 32
"""Rounds that are looked back at: more than the longest pause, and the two tasks before it."""


@dataclass(frozen=True, slots=True)
class Slow:
    """``tasks`` in a row that ended before their first step, the last one in round ``last``."""

    tasks: int
    last: int

    @property
    def next(self) -> int:
        """The first round in which the device gets a task again."""
        return self.last + 1 + pause(self.tasks)


def pause(tasks: int) -> int:
    """Rounds that a device is left out of after so many tasks in a row that ended unbegun."""
    return 0 if tasks < SLOW else int(min(MOST, 2 ** min(tasks - SLOW + 1, 8)))


def slow_among(
    ended: Iterable[tuple[str, int, int]], delivered: Mapping[tuple[str, int], int]
) -> dict[tuple[str, int], Slow]:
    """The slow devices.

    Args:
        ended: node, device and round of each task that ended unbegun.
        delivered: by (node, device) the last round for which it handed something in.
    """
    rows: dict[tuple[str, int], list[int]] = {}
    for node, device, number in ended:
        if number > delivered.get((node, device), -1):
            rows.setdefault((node, device), []).append(number)
    return {key: Slow(len(r), max(r)) for key, r in rows.items() if len(r) >= SLOW}


async def slow_devices(
    tx: Tx, job_id: str, number: int, staleness: int
) -> dict[tuple[str, int], Slow]:
    """The devices that are slow for a job before its round ``number``, by (node, device). Round
    ``number`` takes work on versions that are at most ``staleness`` older: what is still leased for
    an older one and has no step counts as ended, though its node has yet to be told."""
    since = number - WINDOW
    rows = await work.ended_late(tx, job_id, since, number - staleness)
    ended = [(str(r.node_id), int(r.device), int(r.round)) for r in rows if _is_unbegun(r)]
    if not ended:
        return {}
    delivered = await work.last_delivered(tx, job_id, since, {node for node, _, _ in ended})
    return slow_among(ended, delivered)


async def resting_devices(tx: Tx, job_id: str, number: int, staleness: int) -> set[tuple[str, int]]:
    """The devices, by (node, device), that round ``number`` of a job does without because they are
    slow."""
    slow = await slow_devices(tx, job_id, number, staleness)
    return {key for key, found in slow.items() if number < found.next}


def _is_unbegun(task: AnyRow) -> bool:
    if task.state == TaskState.LEASED:
        return task.progress is None
    return bool(task.causes) and task.causes[-1]["code"] == UNBEGUN
