"""Error feedback on disk: what this node's deltas left unsent, by job and device (A3).

::

    <state>/feedback/<job>/index.json            what counts, hashed and replaced as a whole
                           <sha256>.safetensors  the residual, and deltas whose fate is open

A task goes through here in this order; each step is one durable write of the index, and whatever
dies in between leaves the state before or after it:

- :meth:`FeedbackStore.prepare`, before it is trained: what became of earlier deltas is taken from
  the assignment. A merged one is forgotten. One that came to nothing is *lost*: the child adds it
  back. As long as nobody can say, it counts as sent.
- :meth:`FeedbackStore.adopt`, when its delta and its residual are whole on disk: they count from
  now on, the state before is kept beside them.
- :meth:`FeedbackStore.settle`, when its result is about to be sent; the state before goes. If it
  comes to no result, :meth:`FeedbackStore.undo`, or the next ``prepare``, goes back to that state:
  an attempt that fails, or is trained again from its checkpoint, has changed nothing.

Disk: 8 bytes per parameter and job while a delta is uploaded, else 4, and the deltas themselves,
of which only those count that are not merged yet. Beyond ``limit`` bytes the jobs that were not
worked for longest are forgotten; a job that alone needs more goes without error feedback.

All methods block, and may be called from any thread.
"""

from __future__ import annotations

import os
import shutil
import threading
from collections.abc import Iterable
from dataclasses import dataclass, replace
from pathlib import Path

import structlog

from distribai import durable
from distribai.core.architectures import manifest_of
from distribai.core.child import RESIDUAL, Owed
from distribai.core.codecs import feeds_back
from distribai.core.plain import from_plain
from distribai.core.sealed import seal, unseal
from distribai.core.spec import BlobRef
from distribai.core.tasks import Assignment, OwnWork
from distribai.errors import Integrity
from distribai.node.cache import sha256_of
from distribai.node.keeping import file_name

log = structlog.get_logger("distribai.node")

FOLDER, INDEX, KIND = "feedback", "index.json", "distribai.feedback.v1"

MAX_OPEN = 16
"""Deltas of a job whose fate may be open at once; it is two or three in fact, since late work is
merged three versions later at most. Beyond that the oldest count as merged."""


@dataclass(frozen=True, slots=True)
class Sent:
    """A delta that was sent, or is about to be. ``lost``: it came to nothing."""

    task_id: str
    attempt: int
    delta: BlobRef
    lost: bool = False

    @property
    def key(self) -> tuple[str, int]:
        """Task and attempt."""
        return self.task_id, self.attempt


@dataclass(frozen=True, slots=True)
class State:
    """The residual (None: nothing is kept), and the deltas whose fate is open or that are lost."""

    kept: BlobRef | None = None
    sent: tuple[Sent, ...] = ()

    @property
    def files(self) -> set[str]:
        """SHA-256 of every file that it needs."""
        kept = () if self.kept is None else (self.kept.sha256,)
        return {*kept, *(s.delta.sha256 for s in self.sent)}


@dataclass(frozen=True, slots=True)
class Index:
    """What ``index.json`` says. ``before``: the state to go back to, as long as the newest delta
    has come to no result."""

    kind: str
    job_id: str
    device: int
    now: State = State()
    before: State | None = None


def has_feedback(task: Assignment) -> bool:
    """Whether a task's delta has error feedback."""
    return task.phase == "train" and feeds_back(task.spec.rounds.codec_up)


class FeedbackStore:
    """The error feedback of one node.

    Args:
        state: the node's state directory, whose lock is held.
        limit: bytes of all jobs together.
    """

    def __init__(self, state: Path, limit: int) -> None:
        self._root, self._limit = state / FOLDER, limit
        self._lock = threading.RLock()
        self._over: set[str] = set()
        self._jobs = {index.job_id for index in self._all()}

    def jobs(self) -> list[str]:
        """Jobs of which something is kept."""
        return sorted(self._jobs)

    def prepare(self, task: Assignment, device: int) -> Owed | None:
        """What the task's delta owes; None: it goes without error feedback, for want of room.

        Raises:
            OSError: the disk is full or refuses.
        """
        with self._lock:
            if not self._make_room(task, device):
                return None
            index = self._read(task.job_id, device)
            state = index.now if index.before is None else index.before
            state = self._intact(task, device, judged(state, task))
            if (state, None) != (index.now, index.before):
                self._write(replace(index, now=state, before=None), "judged")
            self._sweep(replace(index, now=state, before=None))
            lost = tuple(str(self._path(index, s.delta)) for s in state.sent if s.lost)
            return Owed("" if state.kept is None else str(self._path(index, state.kept)), lost)

    def find(self, task: Assignment, device: int, blob: BlobRef) -> Path | None:
        """A file of the task's job, whole; None when it is not here."""
        path = self._path(Index(KIND, task.job_id, device), blob)
        whole = path.is_file() and path.stat().st_size == blob.size
        return path if whole and sha256_of(path) == blob.sha256 else None

    def adopt(
        self, task: Assignment, device: int, folder: Path, path: Path, delta: BlobRef, rest: BlobRef
    ) -> Path:
        """Let a delta at ``path`` and the residual in ``folder`` count; where the delta lies now.

        The same again changes nothing.

        Raises:
            OSError: the disk is full or refuses; the state before holds.
        """
        with self._lock:
            if task.job_id in self._over:
                return path
            index = self._read(task.job_id, device)
            new = Sent(task.task_id, task.attempt, delta)
            place = self._path(index, delta)
            if new in index.now.sent:
                return place
            self._folder(index).mkdir(parents=True, exist_ok=True)
            for found, ref in ((folder / RESIDUAL, rest), (path, delta)):
                if found.is_file():  # else it was moved before this daemon's predecessor died
                    durable.promote(found, self._path(index, ref), point="node.feedback.file")
            open_ones = tuple(s for s in index.now.sent if not s.lost)
            self._write(
                replace(index, now=State(rest, (*open_ones, new)), before=index.now), "adopted"
            )
            self._jobs.add(task.job_id)
            return place

    def settle(self, task: Assignment, device: int) -> None:
        """The task's result is about to be sent: there is no way back.

        Raises:
            OSError: the disk is full or refuses.
        """
        with self._lock:
            index = self._read(task.job_id, device)
            if index.before is not None:
                index = replace(index, before=None)
                self._write(index, "settled")
                self._sweep(index)

    def undo(self, task: Assignment, device: int) -> None:
        """The task comes to no result: nothing has changed.

        Raises:
            OSError: the disk is full or refuses; the next :meth:`prepare` does it then.
        """
        with self._lock:
            index = self._read(task.job_id, device)
            if index.before is not None:
                index = replace(index, now=index.before, before=None)
                self._write(index, "undone")
                self._sweep(index)

    def forget(self, job_ids: Iterable[str]) -> None:
        """These jobs have ended."""
        with self._lock:
            gone = set(job_ids)
            self._over |= gone
            for index in self._all():
                if index.job_id in gone:
                    self._remove(index)

    # -------------------------------------------------------------- files

    def _folder(self, index: Index) -> Path:
        return self._root / file_name(index.job_id, index.device)

    def _path(self, index: Index, blob: BlobRef) -> Path:
        return self._folder(index) / f"{blob.sha256}.safetensors"

    def _read(self, job_id: str, device: int) -> Index:
        nothing = Index(KIND, job_id, device)
        found = self._load(self._folder(nothing) / INDEX)
        return found if found is not None and found.job_id == job_id else nothing

    def _load(self, path: Path) -> Index | None:
        try:
            index = from_plain(Index, unseal(path.read_bytes()))
        except FileNotFoundError:
            return None
        except (Integrity, ValueError, OSError) as problem:
            log.warning(
                "error feedback cannot be read; it begins anew", file=str(path), why=str(problem)
            )
            return None
        return index if index.kind == KIND else None

    def _all(self) -> list[Index]:
        folders = sorted(self._root.iterdir()) if self._root.is_dir() else []
        return [i for f in folders if (i := self._load(f / INDEX)) is not None]

    def _write(self, index: Index, point: str) -> None:
        folder = self._folder(index)
        folder.mkdir(parents=True, exist_ok=True)
        durable.write(folder / INDEX, seal(index), point=f"node.feedback.{point}")
        os.utime(folder)  # worked for now, see _make_room

    def _sweep(self, index: Index) -> None:
        """Free the disk of what the index does not need."""
        needed = index.now.files | (set() if index.before is None else index.before.files)
        folder = self._folder(index)
        for path in folder.iterdir() if folder.is_dir() else ():
            if path.name != INDEX and path.stem not in needed:
                try:
                    path.unlink(missing_ok=True)
                except OSError as problem:  # Windows: somebody reads it; it goes the next time
                    log.info("not removed yet", file=str(path), why=str(problem))

    def _remove(self, index: Index) -> None:
        folder = self._folder(index)
        (folder / INDEX).unlink(missing_ok=True)  # first: without it nothing else counts
        shutil.rmtree(folder, ignore_errors=True)
        self._jobs.discard(index.job_id)

    def _intact(self, task: Assignment, device: int, state: State) -> State:
        """The state without files that are torn or gone, which are named in the log."""
        kept, sent = state.kept, []
        if kept is not None and self.find(task, device, kept) is None:
            log.warning("error feedback is torn; it begins anew", job=task.job_id)
            kept = None
        for one in state.sent:
            if one.lost and self.find(task, device, one.delta) is None:
                log.warning("a delta is torn and cannot be added back", task=one.task_id)
            else:
                sent.append(one)
        return State(kept, tuple(sent))

    def _make_room(self, task: Assignment, device: int) -> bool:
        """Forget other jobs until what this one may need fits; False: it never does."""
        manifest = manifest_of(task.spec.model.family, task.spec.model.config)
        need = 3 * 4 * sum(t.size for t in manifest.travelling)  # two residuals, open deltas
        if need > self._limit:
            log.warning("no room for error feedback", job=task.job_id, bytes=need)
            return False
        own = self._folder(Index(KIND, task.job_id, device))
        others = [f for f in self._root.iterdir() if f != own] if self._root.is_dir() else []
        sizes = {f: sum(p.stat().st_size for p in f.iterdir()) for f in others if f.is_dir()}
        for folder in sorted(sizes, key=lambda f: f.stat().st_mtime):
            if need + sum(sizes.values()) <= self._limit:
                break
            log.warning(
                "error feedback of another job is forgotten for want of room", of=folder.name
            )
            del sizes[folder]
            index = self._load(folder / INDEX)
            if index is not None:
                self._remove(index)
            else:
                shutil.rmtree(folder, ignore_errors=True)
        return True


def judged(state: State, task: Assignment) -> State:
    """What is left of a state once a new task's assignment has said what became of its deltas.

    The task's own, of a result that never came about, is not among them any more.
    """
    fates = {(w.task_id, w.attempt): w for w in task.own}
    sent = [_judge(s, fates.get(s.key)) for s in state.sent]
    left = [s for s in sent if s is not None and s.key != (task.task_id, task.attempt)]
    open_ones = [s for s in left if not s.lost][-MAX_OPEN:]
    return replace(state, sent=tuple(s for s in left if s.lost or s in open_ones))


def _judge(sent: Sent, fate: OwnWork | None) -> Sent | None:
    if sent.lost:
        return sent
    if fate is None:
        return replace(sent, lost=True)
    return None if fate.merged else sent
