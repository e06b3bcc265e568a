"""What of the tasks in hand outlives the daemon.

::

    <state>/hands/<name>.hand   one record per task and attempt, from its acceptance until the
                                orchestrator has acknowledged its result, or does not want it
    <state>/work/<name>/        that task's own directory: checkpoints, the delta until it is
                                uploaded; whatever belongs to no record is wiped at the start

A record is hashed and replaced as a whole, so a daemon that was killed finds the older one or the
newer one. A record that is torn or changed all the same is named in the log and dropped: the grid
then gives the task to somebody else. Each write and removal happens in one thread, in the order in
which they were asked for.
"""

from __future__ import annotations

import asyncio
import base64
import hashlib
import re
import shutil
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import structlog
from google.protobuf.message import DecodeError

from distribai import durable, points
from distribai.core.plain import from_plain
from distribai.core.sealed import seal, unseal
from distribai.core.spec import BlobRef
from distribai.core.tasks import Assignment, Outcome
from distribai.errors import DistribAIError
from distribai.wire import convert
from distribai.wire.v1 import distribai_pb2 as pb

log = structlog.get_logger("distribai.node")

HANDS, WORK, SUFFIX = "hands", "work", ".hand"


@dataclass(frozen=True, slots=True)
class Record:
    """One task in hand as it lies on disk.

    ``assign`` and ``result`` are serialized ``TaskAssign`` (as it was received) and ``TaskResult``
    (signed, as it is sent) in base64. ``outcome`` is what the training came to, with its ``delta``
    file's name, from then on, and with error feedback the ``residual`` that it leaves; ``upload``
    names the upload that was begun for it.
    """

    assign: str
    outcome: Outcome | None = None
    delta: str = ""
    residual: BlobRef | None = None
    upload: str = ""
    result: str = ""


class Keeper:
    """The durable side of one task in hand; made by :class:`HandFiles`.

    ``merges_at`` (monotonic seconds; None: nobody has said) is when the task's round merges at the
    latest. It is told anew after every start and not kept.
    """

    def __init__(self, files: HandFiles, name: str, record: Record) -> None:
        self._files, self._name = files, name
        self.record = record
        self.merges_at: float | None = None

    @property
    def folder(self) -> Path:
        """The task's own directory; it may not exist yet."""
        return self._files.work / self._name

    async def keep(self, point: str, **changes: Any) -> None:
        """Change the record, on disk when this returns.

        Args:
            point: what has happened, for ``node.hand.<point>``.

        Raises:
            OSError: the disk is full or refuses; in memory the change holds, on disk the older
                record.
        """
        self.record = replace(self.record, **changes)
        await self._files.in_order(self._files.write, self._name, self.record, point)

    async def note(self, point: str, **changes: Any) -> None:
        """The same, where going on without is better than failing: a daemon that is killed then
        knows less, and does more again."""
        try:
            await self.keep(point, **changes)
        except OSError as problem:
            log.warning("not kept on disk", what=point, task=self._name, why=str(problem))

    def empty_folder(self) -> None:
        """Free the disk of what only unfinished work needs; soon."""
        self._files.soon(self._files.remove_folder, self._name)

    def forget(self) -> None:
        """Remove all of it; soon."""
        self._files.soon(self._files.remove, self._name)


@dataclass(frozen=True, slots=True)
class Kept:
    """A task in hand of an earlier daemon."""

    assignment: Assignment
    device: int
    keeper: Keeper
    result: pb.TaskResult | None


class HandFiles:
    """The records of one state directory.

    Args:
        state: the node's state directory, whose lock is held.
    """

    def __init__(self, state: Path) -> None:
        self._hands, self.work = state / HANDS, state / WORK
        self._thread = ThreadPoolExecutor(1, "hands")

    def new(self, message: pb.TaskAssign) -> Keeper:
        """The keeper of a task that was just assigned; nothing is on disk yet."""
        record = Record(base64.b64encode(message.SerializeToString()).decode())
        return Keeper(self, file_name(message.task_id, message.attempt), record)

    async def load(self) -> list[Kept]:
        """The tasks of the daemon before this one, the newest attempt of each; the rest is
        wiped. Never fails: what cannot be read is named in the log and dropped."""
        found: list[Kept] = await self.in_order(self._load)
        return found

    async def close(self) -> None:
        """Return when all is written and removed."""
        await asyncio.to_thread(self._thread.shutdown)

    # -------------------------------------------------------------- in the thread

    async def in_order(self, work: Callable[..., Any], *arguments: Any) -> Any:
        """Do ``work`` after what was asked for before."""
        loop = asyncio.get_running_loop()
        return await loop.run_in_executor(self._thread, work, *arguments)

    def soon(self, work: Callable[[str], None], name: str) -> None:
        """Do ``work``, which does not fail, after what was asked for before."""
        self._thread.submit(work, name)

    def write(self, name: str, record: Record, point: str) -> None:
        """Write a record. Blocking."""
        self._hands.mkdir(parents=True, exist_ok=True)
        durable.write(self._hands / f"{name}{SUFFIX}", seal(record), point=f"node.hand.{point}")

    def remove(self, name: str) -> None:
        """Remove a record, then its directory. Blocking."""
        points.reach("node.hand.removed.before")
        try:
            (self._hands / f"{name}{SUFFIX}").unlink(missing_ok=True)
        except OSError as problem:
            # It is presented again after the next start, and the grid says that it is over.
            log.warning("a record cannot be removed", task=name, why=str(problem))
        points.reach("node.hand.removed.after")
        self.remove_folder(name)

    def remove_folder(self, name: str) -> None:
        """Remove a task's directory. Blocking."""
        shutil.rmtree(self.work / name, ignore_errors=True)

    def _load(self) -> list[Kept]:
        found: dict[str, Kept] = {}
        for path in sorted(self._hands.iterdir()) if self._hands.is_dir() else ():
            kept = self._read(path)
            if kept is None:
                continue
            task = kept.assignment
            other = found.get(task.task_id)
            if other is None or other.assignment.attempt < task.attempt:
                found[task.task_id] = kept
        names = {kept.keeper.folder.name for kept in found.values()}
        self._wipe(self._hands, {name + SUFFIX for name in names})
        self._wipe(self.work, names)
        return list(found.values())

    def _read(self, path: Path) -> Kept | None:
        if path.suffix != SUFFIX:
            return None  # a write that was cut off
        try:
            record = from_plain(Record, unseal(path.read_bytes()))
            message = pb.TaskAssign.FromString(base64.b64decode(record.assign))
            assignment, device = convert.assignment_from_wire(message)
            result = None
            if record.result:
                result = pb.TaskResult.FromString(base64.b64decode(record.result))
        except (DistribAIError, DecodeError, ValueError, OSError) as problem:
            why = problem.message if isinstance(problem, DistribAIError) else str(problem)
            log.warning("a task in hand cannot be read; dropped", file=str(path), why=why)
            return None
        keeper = Keeper(self, path.stem, record)
        return Kept(assignment, device, keeper, result)

    def _wipe(self, folder: Path, keep: Iterable[str]) -> None:
        for path in list(folder.iterdir()) if folder.is_dir() else ():
            if path.name in keep:
                continue
            if path.is_dir():
                shutil.rmtree(path, ignore_errors=True)
                continue
            try:
                path.unlink()
            except OSError as problem:
                log.warning("a leftover cannot be removed", file=str(path), why=str(problem))


def file_name(name: str, number: int) -> str:
    """A file name that no id can lead astray, and that people can still read."""
    digest = hashlib.sha256(f"{name}\0{number}".encode()).hexdigest()[:16]
    return f"{re.sub(r'[^A-Za-z0-9_-]', '_', name)[:60]}-{number}-{digest}"
