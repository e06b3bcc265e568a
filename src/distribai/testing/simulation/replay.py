"""From the outbox of a real grid to machines that come, go and work as its nodes did.

What the log knows: when each node joined, went silent, came back, and how long each of its training
tasks took from the lease to the submission. What it does not know is assumed: a node that came back
had kept its disk, and one that stayed away is gone for good (if it came back as a stranger, the log
has it as another node).
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace

from distribai.testing.simulation.events import Event
from distribai.testing.simulation.machines import Machine, Outage


@dataclass
class _Seen:
    """What the log says of one node. ``silent`` and ``back`` in seconds from the log's start."""

    name: str
    joined: float
    silent: list[float] = field(default_factory=list)
    back: list[float] = field(default_factory=list)
    seconds: list[float] = field(default_factory=list)


def machines_of(
    events: Sequence[Event],
    inner_steps: int,
    like: Machine,
    silence_s: float = 50.0,
) -> tuple[Machine, ...]:
    """The machines that a log shows.

    Args:
        events: a grid's outbox, in order, with at least one node in it.
        inner_steps: steps of a whole training task in that grid.
        like: gives every machine what the log does not tell: link, checkpoints, and the speed of
            those that never finished a task (scaled to the log's median where there is one).
        silence_s: how long that grid waited until it counted a node as offline.

    Raises:
        ValueError: there is no node in the log.
    """
    seen = _look(events, silence_s)
    if not seen:
        raise ValueError("no node joins in this log")
    speeds = {n: statistics.median(s.seconds) / inner_steps for n, s in seen.items() if s.seconds}
    typical = statistics.median(speeds.values()) if speeds else like.step_s
    return tuple(
        _machine(s, replace(like, step_s=speeds.get(node, typical))) for node, s in seen.items()
    )


def _look(events: Iterable[Event], silence_s: float) -> dict[str, _Seen]:
    seen: dict[str, _Seen] = {}
    leased: dict[tuple[str, str], float] = {}
    origin: float | None = None
    for event in events:
        if event.kind == "node.joined":
            origin = event.at if origin is None else origin
            seen[event.node_id] = _Seen(f"node-{len(seen):04d}", event.at - origin)
        node = seen.get(event.node_id)
        if node is None or origin is None:
            continue
        now = event.at - origin
        training = event.data.get("phase") == "train"
        if event.kind == "node.offline":
            # It died when it was last heard, and not when that was noticed.
            last = node.back[-1] if node.back else node.joined
            node.silent.append(max(now - silence_s, last))
        elif event.kind == "node.online" and len(node.silent) > len(node.back):
            node.back.append(now)
        elif event.kind == "task.leased" and training:
            leased[event.node_id, event.task_id] = now
        elif event.kind == "task.submitted" and training:
            began = leased.pop((event.node_id, event.task_id), None)
            whole = not node.silent or began is None or began > node.silent[-1]
            if began is not None and whole:
                node.seconds.append(now - began)
    return seen


def _machine(seen: _Seen, like: Machine) -> Machine:
    outages = tuple(Outage(at, back - at) for at, back in zip(seen.silent, seen.back, strict=False))
    gone = seen.silent[-1] if len(seen.silent) > len(seen.back) else math.inf
    return replace(like, name=seen.name, joins_at=seen.joined, leaves_at=gone, outages=outages)
