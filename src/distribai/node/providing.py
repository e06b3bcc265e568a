"""Bringing a child the blobs that it needs, and keeping what it has made, while somebody else
listens to it."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from pathlib import Path

import structlog

from distribai.core.child import Cancel, Done, Have, Kept, Need
from distribai.core.spec import BlobRef
from distribai.core.tasks import Assignment, KeptRef, Outcome
from distribai.errors import DistribAIError, Integrity, NotFound
from distribai.node.cache import Pins
from distribai.node.child import ChildProcess
from distribai.node.executors import Services, failed

log = structlog.get_logger("distribai.node")


class Provider:
    """Brings the blobs that a child needs, while the executor goes on listening to it."""

    def __init__(
        self, services: Services, child: ChildProcess, assignment: Assignment, pins: Pins
    ) -> None:
        self._services = services
        self._child = child
        base = assignment.base
        offered = [] if base.snapshot is None else [KeptRef(base.snapshot_version, base.snapshot)]
        self._offered = [*offered, *([] if base.kept is None else [base.kept])]
        self._begun = services.begun.of(assignment.job_id)
        self._assignment = assignment
        self._pins = pins
        self._task: asyncio.Task[None] | None = None
        self._keeping: asyncio.Task[None] | None = None
        self._problem: tuple[str, str] | None = None
        self._waited = 0.0

    @property
    def busy(self) -> bool:
        """Whether it still looks for what was asked for."""
        return self._task is not None and not self._task.done()

    def start(self, need: Need) -> None:
        """Bring these."""
        self._task = asyncio.create_task(self._provide(need))

    def keep(self, kept: Kept) -> None:
        """Put a file of the child's into the cache; the task goes on meanwhile."""
        self._keeping = asyncio.create_task(self._keep(kept))

    def judge(self, done: Done) -> Done:
        """The task's end: with the seconds in which the child waited for blobs, or with the true
        reason when it ended for want of one."""
        if self._problem is not None:
            return Done(failed(self._assignment, *self._problem))
        if done.outcome.delta is None:
            return done
        return replace(done, outcome=measured(done.outcome, download_seconds=self._waited))

    async def stop(self) -> None:
        """Bring nothing more; raise a defect of the bringing. What is being kept is kept."""
        if self._keeping is not None:
            await self._keeping
        if self._task is not None:
            self._task.cancel()
            await asyncio.wait({self._task})
            if not self._task.cancelled():
                self._task.result()

    async def _provide(self, need: Need) -> None:
        paths: dict[str, str] = {}
        began = self._services.clock.monotonic()
        try:
            for blob in need.blobs:
                path = await self._fetch(blob)
                if path is None:
                    await self._child.send(Have(paths, gone=(blob.sha256,)))
                    return
                paths[blob.sha256] = str(path)
        except DistribAIError as problem:
            await self._give_up(problem.code, problem.message)
        except OSError as problem:
            await self._give_up("io.file", f"This machine's disk: {problem}.")
        else:
            self._waited += self._services.clock.monotonic() - began
            await self._child.send(Have(paths))

    async def _fetch(self, blob: BlobRef) -> Path | None:
        """The file of a blob; None for a snapshot that was begun earlier and is gone."""
        job_id, begun = self._assignment.job_id, self._services.begun
        for snapshot in (*self._begun, *self._offered):
            if snapshot.blob == blob:
                begun.begin(job_id, snapshot)
        try:
            return await self._services.fetcher.fetch(blob, job_id, self._pins)
        except NotFound:
            if all(ref.blob != blob for ref in self._begun) or blob in self._assignment.base.blobs:
                raise
            begun.forget([job_id])
            return None

    async def _keep(self, kept: Kept) -> None:
        try:
            await asyncio.to_thread(self._services.cache.take, Path(kept.path), kept.blob)
        except (Integrity, OSError) as problem:
            log.warning("weights were not kept on disk", why=str(problem))

    async def _give_up(self, code: str, reason: str) -> None:
        self._problem = (code, reason)
        await self._child.send(Cancel(self._assignment.task_id, reason))


def measured(outcome: Outcome, **seconds: float) -> Outcome:
    """The outcome of training, with what the daemon has measured besides."""
    return replace(outcome, metrics={**outcome.metrics, **seconds})
