"""Snapshots that this node has begun to fetch, so that a slow line brings one to its end.

A round is over before a slow line has brought a snapshot, and the next task starts from a newer
version, whose own snapshot would begin at the first byte again. So the node remembers which
version's weights it has begun: the encoded updates since lead from there to any later version, and
what is on disk need not be fetched (``core.ways``). The grid deletes a snapshot some time after the
last task that started from it (``orchestrator.let_go_s``); what is gone is forgotten.

Kept on disk, like the parts themselves. Blocking, for microseconds.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final

import structlog

from distribai import durable
from distribai.core.plain import from_plain
from distribai.core.sealed import seal, unseal
from distribai.core.spec import BlobRef
from distribai.core.tasks import KeptRef
from distribai.errors import DistribAIError
from distribai.node.cache import BlobCache

log = structlog.get_logger("distribai.node")

FILE: Final = "begun"
"""In the state directory."""

MOST: Final = 16
"""Jobs whose snapshot is remembered."""


@dataclass(frozen=True, slots=True)
class _Kept:
    """What is on disk: the latest snapshot by job, the job that was worked for last at the end."""

    jobs: dict[str, KeptRef] = field(default_factory=dict)


class Begun:
    """One snapshot of each job: the one whose download was begun last.

    Args:
        state: the node's state directory.
        cache: where the parts are.
    """

    def __init__(self, state: Path, cache: BlobCache) -> None:
        self._path = state / FILE
        self._cache = cache
        self._jobs = self._load()

    def of(self, job_id: str) -> tuple[KeptRef, ...]:
        """The snapshot of a job that is here, in part at least; nothing when there is none."""
        found = self._jobs.get(job_id)
        return (found,) if found is not None and self._cache.held_of([found.blob]) else ()

    def begin(self, job_id: str, snapshot: KeptRef) -> None:
        """A download of ``snapshot`` begins. What was begun of the job before is of no use then,
        since this one takes fewer bytes."""
        before = self._jobs.pop(job_id, None)
        self._jobs[job_id] = snapshot
        if before == snapshot:
            return
        if before is not None:
            self._drop(before.blob)
        while len(self._jobs) > MOST:
            self._drop(self._jobs.pop(next(iter(self._jobs))).blob)
        self._write()

    def forget(self, job_ids: Collection[str]) -> None:
        """These jobs have ended, or the grid does not have the snapshot any more."""
        gone = [found for job_id in job_ids if (found := self._jobs.pop(job_id, None)) is not None]
        for snapshot in gone:
            self._drop(snapshot.blob)
        if gone:
            self._write()

    def _drop(self, blob: BlobRef) -> None:
        self._cache.partial(blob).unlink(missing_ok=True)

    def _write(self) -> None:
        try:
            durable.write(self._path, seal(_Kept(self._jobs)), point="node.begun")
        except OSError as problem:  # after a restart it begins with another one, at worst
            log.warning("what was begun to fetch cannot be noted", why=str(problem))

    def _load(self) -> dict[str, KeptRef]:
        try:
            return from_plain(_Kept, unseal(self._path.read_bytes())).jobs
        except FileNotFoundError:
            return {}
        except (DistribAIError, ValueError, OSError) as problem:
            log.warning("what was begun to fetch cannot be read", why=str(problem))
            return {}
