"""Whose turn it is: tiers with ageing, fair shares between organizations, then votes and age.

**Level.** A task waits at the level of its tier, P0 first. For each :data:`AGEING_S` that it has
waited it rises by one, up to P0's, so that nothing starves behind a busy tier: linear ageing.

**Between organizations** of a level the devices' time is shared in proportion to their weights by
start-time fair queuing (Goyal, Vin, Cheng: Start-time Fair Queuing, SIGCOMM 1996). With ``F`` the
finish tag of an organization's last served task and ``v`` the start tag of the level's last served
task, its next task has the start tag ``S = max(v, F)``; the least ``S`` is served next, and then
``v = S`` and ``F = S + cost / weight``. While two organizations f and g both wait, what they have
got differs by at most ``c_f / w_f + c_g / w_g`` of their largest costs (theorem 1 there), however
many tasks each of them queues; who waited for nothing saves nothing up. The cost of a task is what
it is expected to take, in seconds of a device. An organization weighs as much as the heaviest of
its jobs that wait: to split a job into many gains nothing.

**Within an organization** the task goes first whose *arrival* is earliest: when it was queued, less
:data:`AGEING_S` for each tier above P3, for each doubling of its job's vote weight, and for its
phase (a sample that a person waits for before training, training before evaluation: a loss may
come later, while a round waits for its slowest slot). So a vote counts like age. Ties go by id:
equal inputs, equal turns.

**Overdue.** Whoever has waited for :data:`OVERDUE_S` stands, beside its organization's queue, in
one of all that are overdue, the oldest first: to the first level it is one more organization, with
:data:`OVERDUE_SHARE` of the time. So nothing starves: a task is served after those that are older
than it, at that share of the devices' time at least, whatever arrives meanwhile.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from heapq import heapify, heappop, heappush
from typing import Final, Generic, Protocol, TypeVar

from distribai.core.spec import Priority
from distribai.core.tasks import Phase

TIERS: Final[tuple[Priority, ...]] = ("P0", "P1", "P2", "P3")

AGEING_S: Final = 900.0
"""Seconds of waiting that lift a task by one tier: from P3 to P0 in three quarters of an hour."""

OVERDUE_S: Final = len(TIERS) * AGEING_S
"""Who has waited that long is overdue, and also stands back no longer for tasks that were meant for
certain devices."""

OVERDUE: Final = "*"
"""Stands for an organization in the accounts: the queue of all that are overdue."""

OVERDUE_SHARE: Final = 0.2
"""Share of the first level's time that goes to the oldest, as long as somebody is overdue."""

LEAST_WEIGHT, MOST_WEIGHT = 1 / 16, 16.0
"""Bounds of a job's vote weight: four doublings, an hour of head start, either way from 1."""

PHASE_HEADS: Final[Mapping[Phase, int]] = {"generate": 2, "train": 1, "evaluate": 0}
"""Head starts of the phases, in :data:`AGEING_S`."""


class Waiting(Protocol):
    """Something that waits for its turn: a task for a device, or a job for a round."""

    @property
    def key(self) -> str:
        """Decides ties."""
        ...

    @property
    def organization(self) -> str:
        """Whose it is; empty: the operator's own."""
        ...

    @property
    def priority(self) -> Priority:
        """Its tier."""
        ...

    @property
    def phase(self) -> Phase:
        """What of a job it is."""
        ...

    @property
    def queued_at(self) -> float:
        """Since when it waits, seconds."""
        ...

    @property
    def weight(self) -> float:
        """Its job's vote weight; 1 is usual."""
        ...

    @property
    def cost(self) -> float:
        """What it is expected to take, in seconds of a device."""
        ...


W = TypeVar("W", bound=Waiting)


@dataclass(frozen=True, slots=True)
class Tag:
    """An organization's last turn at a level: the start and the finish tag of the task served."""

    start: float
    finish: float


Tags = Mapping[tuple[str, int], Tag]
"""By organization and level (0 is P0's)."""


def level_of(task: Waiting, now: float) -> int:
    """The level at which a task waits: its tier, or a better one by age."""
    risen = int(max(0.0, now - task.queued_at) // AGEING_S)
    return max(0, TIERS.index(task.priority) - risen)


def arrival_of(task: Waiting) -> float:
    """When the task would have to be queued to go where it goes, were all tasks alike."""
    weight = min(MOST_WEIGHT, max(LEAST_WEIGHT, task.weight))
    tiers = len(TIERS) - 1 - TIERS.index(task.priority)
    return task.queued_at - AGEING_S * (tiers + math.log2(weight) + PHASE_HEADS[task.phase])


def standing_of(task: Waiting, now: float) -> str:
    """How long a task has waited, and what that makes of its tier, for people."""
    words = f"it has waited {max(0.0, now - task.queued_at):.0f} s"
    level = level_of(task, now)
    if TIERS[level] != task.priority:
        words += f", and counts as {TIERS[level]} by now"
    return words


def is_overdue(task: Waiting, now: float) -> bool:
    """Whether a task has waited so long that its age alone gets it a share."""
    return now - task.queued_at >= OVERDUE_S


def by_level(tasks: Iterable[W], now: float) -> list[tuple[int, list[W]]]:
    """Tasks by level, the first level first."""
    found: dict[int, list[W]] = defaultdict(list)
    for task in tasks:
        found[level_of(task, now)].append(task)
    return sorted(found.items())


@dataclass
class Accounts:
    """The organizations' tags while turns are given; ``moved`` are those that changed."""

    tags: dict[tuple[str, int], Tag]
    virtual: dict[int, float] = field(default_factory=dict)

    @classmethod
    def of(cls, tags: Tags) -> Accounts:
        """The accounts as the last turns left them."""
        made = cls(dict(tags))
        for (_, level), tag in tags.items():
            made.virtual[level] = max(made.virtual.get(level, 0.0), tag.start)
        return made

    def start(self, organization: str, level: int) -> float:
        """The start tag of the organization's next task."""
        tag = self.tags.get((organization, level))
        now = self.virtual.get(level, 0.0)
        return now if tag is None else max(now, tag.finish)

    def charge(self, organization: str, level: int, cost: float, weight: float) -> Tag:
        """Serve a task of the organization."""
        start = self.start(organization, level)
        tag = Tag(start, start + max(0.0, cost) / weight)
        self.tags[organization, level] = tag
        self.virtual[level] = max(self.virtual.get(level, 0.0), start)
        return tag


class Turns(Generic[W]):
    """The order in which one level's tasks are asked what they take.

    Iterate, and call :meth:`served` for each task that took something before asking for the next.
    One that is overdue and took nothing is asked a second time, in its organization's turn.
    """

    def __init__(self, tasks: Sequence[W], level: int, now: float, accounts: Accounts) -> None:
        self._level, self._accounts = level, accounts
        self._queues: dict[str, list[W]] = defaultdict(list)
        for task in tasks:
            self._queues[task.organization].append(task)
        self._weights: dict[str, float] = {}
        for organization, queue in self._queues.items():
            heaviest = max(task.weight for task in queue)
            self._weights[organization] = min(MOST_WEIGHT, max(LEAST_WEIGHT, heaviest))
            # The last one is the next one.
            queue.sort(key=lambda t: (arrival_of(t), t.key), reverse=True)
        overdue = [t for t in tasks if is_overdue(t, now)]
        if overdue:
            others = sum(self._weights.values())
            self._weights[OVERDUE] = others * OVERDUE_SHARE / (1 - OVERDUE_SHARE)
            self._queues[OVERDUE] = sorted(
                overdue, key=lambda t: (t.queued_at, t.key), reverse=True
            )
        self._served: set[str] = set()
        self._turn = ""

    def __iter__(self) -> Iterator[W]:
        heap = [self._entry(queue) for queue in self._queues]
        heapify(heap)
        while heap:
            self._turn = heappop(heap)[-1]
            task = self._queues[self._turn].pop()
            if task.key not in self._served:
                yield task
            if self._queues[self._turn]:
                heappush(heap, self._entry(self._turn))

    def _entry(self, queue: str) -> tuple[float, float, str, str]:
        head = self._queues[queue][-1]
        start = self._accounts.start(queue, self._level)
        return start, arrival_of(head), head.key, queue

    def served(self, task: W) -> tuple[str, Tag]:
        """``task``, the one asked last, has taken something; whose account it went to."""
        self._served.add(task.key)
        weight = self._weights[self._turn]
        return self._turn, self._accounts.charge(self._turn, self._level, task.cost, weight)


def in_turn(waiting: Iterable[W], now: float, tags: Tags) -> list[W]:
    """Everything that waits, in the order in which it would be served if each took something."""
    accounts, found = Accounts.of(tags), list[W]()
    for level, group in by_level(waiting, now):
        turns = Turns(group, level, now, accounts)
        for one in turns:
            turns.served(one)
            found.append(one)
    return found
