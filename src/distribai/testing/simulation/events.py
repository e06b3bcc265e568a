"""A grid's outbox as a log that can be kept, read and replayed."""

from __future__ import annotations

import json
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from distribai.core.plain import canonical_json
from distribai.store import outbox
from distribai.store.engine import Database

PAGE = 1000


@dataclass(frozen=True, slots=True)
class Event:
    """One change, as its transaction wrote it; ``at`` is database time in seconds."""

    at: float
    kind: str
    job_id: str = ""
    task_id: str = ""
    node_id: str = ""
    data: dict[str, Any] = field(default_factory=dict)


async def read_events(db: Database) -> list[Event]:
    """All settled events of a grid, in the order of their commits.

    Raises:
        Unavailable: ``grid.database``.
    """
    found: list[Event] = []
    cursor = outbox.BEGINNING
    while True:
        async with db.read() as tx:
            rows = await outbox.read(tx, cursor, PAGE)
        if not rows:
            return found
        found += [Event(r.at, r.kind, r.job_id, r.task_id, r.node_id, dict(r.data)) for r in rows]
        cursor = (rows[-1].epoch, rows[-1].xid, rows[-1].id)


def write_log(events: Iterable[Event], path: Path) -> None:
    """Keep a log as JSON lines.

    Raises:
        OSError: the file cannot be written.
    """
    with path.open("w", encoding="utf-8") as file:
        for e in events:
            file.write(
                canonical_json(
                    {
                        "at": e.at,
                        "kind": e.kind,
                        "job_id": e.job_id,
                        "task_id": e.task_id,
                        "node_id": e.node_id,
                        "data": e.data,
                    }
                )
                + "\n"
            )


def read_log(path: Path) -> list[Event]:
    """A log that :func:`write_log` kept.

    Raises:
        OSError: the file cannot be read.
        ValueError: it is no such log.
    """
    with path.open(encoding="utf-8") as file:
        try:
            return [Event(**json.loads(line)) for line in file if line.strip()]
        except TypeError as problem:
            raise ValueError(f"{path} is not a log of a grid's events: {problem}") from problem
