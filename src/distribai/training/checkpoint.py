"""The running training task on disk, so that a new process goes on where this one was killed.

Two files in the task's own directory: the tensors (live weights, the inner optimizer's moments and
step counts, the losses so far), named after their step, and ``checkpoint.json``, which names them
with their hash, says whose they are, and is itself hashed. The index is written last and replaces
the one before at once: whoever looks finds the older checkpoint or the newer one, never a part.

What does not belong to the task, is torn, or was changed is not used, and the log says so. After a
resume the task ends in the same bytes as without (on a CPU): data order is positional, the rate
follows from the step number, and the micro-batch is kept too.
"""

from __future__ import annotations

import hashlib
import shutil
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from safetensors.torch import load_file
from torch import Tensor

from distribai import durable, points
from distribai.core.child import Checkpointed, Checkpoints, FromChild, LogLine
from distribai.core.plain import fingerprint, from_plain
from distribai.core.sealed import seal, unseal
from distribai.core.spec import BlobRef
from distribai.core.tasks import Assignment
from distribai.errors import Integrity
from distribai.merge.tensorfile import TensorWriter
from distribai.training.loop import Mark
from distribai.training.models import LiveModel
from distribai.training.optimizers import InnerOptimizer

INDEX = "checkpoint.json"
KIND = "distribai.checkpoint.v1"

GUESS_BYTES_S = 200e6
"""Bytes a second that the first checkpoint of a job is expected to be written and hashed with."""

SPARE_BYTES = 64 << 20
"""What a checkpoint leaves free on the disk: the delta and the daemon's records need room too."""

_DTYPES = {torch.float32: "F32", torch.bfloat16: "BF16", torch.int64: "I64"}
_LIVE, _OPTIMIZER, _LOSSES = "live/", "optimizer/", "losses"


@dataclass(frozen=True, slots=True)
class Owner:
    """Whose state it is; all of it must fit, or another task would go on from it."""

    job_id: str
    task_id: str
    attempt: int
    base_version: int
    base_hash: str
    spec: str

    @classmethod
    def of(cls, task: Assignment) -> Owner:
        """The owner's name for a task."""
        base = task.base
        spec = fingerprint(task.spec)
        return cls(task.job_id, task.task_id, task.attempt, base.version, base.weights_hash, spec)


@dataclass(frozen=True, slots=True)
class Index:
    """What ``checkpoint.json`` says. ``newcomer``: the task began with fresh moments among nodes
    that keep theirs."""

    kind: str
    owner: Owner
    mark: Mark
    newcomer: bool
    file: BlobRef


@dataclass(frozen=True, slots=True)
class Resumed:
    """What a task goes on from; the model and the optimizer hold it already."""

    mark: Mark
    losses: Tensor
    newcomer: bool


class Budget:
    """How much of a job's training time went into checkpoints; lives as long as its model."""

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._trained = self._spent = 0.0
        self._cost: float | None = None
        self._since = self._last = clock()

    def begin(self) -> None:
        """A task begins to train."""
        self._since = self._last = self._clock()

    def end(self) -> None:
        """It has ended."""
        self._trained += self._clock() - self._since

    def due(self, every_s: float) -> bool:
        """Whether the last one is long enough ago; 0: never."""
        return every_s > 0 and self._clock() - self._last >= every_s

    def affords(self, share: float, size: int) -> bool:
        """Whether one of ``size`` bytes keeps within ``share`` of the training time."""
        expected = size / GUESS_BYTES_S if self._cost is None else self._cost
        time = self._trained + self._clock() - self._since
        return self._spent + expected <= share * time

    def spent(self, since: float) -> None:
        """One was written, or tried, since then."""
        self._last = self._clock()
        self._cost = self._last - since
        self._spent += self._cost


class Checkpointer:
    """Writes and finds the checkpoints of one task; offered to the inner loop as its ``keep``.

    Args:
        folder: the task's own directory.
        live, optimizer: what is kept, and what a resume fills.
        tell: sends a line to the daemon.
    """

    def __init__(
        self,
        folder: Path,
        task: Assignment,
        limits: Checkpoints,
        live: LiveModel,
        optimizer: InnerOptimizer,
        budget: Budget,
        clock: Callable[[], float],
        tell: Callable[[FromChild], None],
    ) -> None:
        self._folder, self._owner, self._limits = folder, Owner.of(task), limits
        self._live, self._optimizer, self._budget = live, optimizer, budget
        self._clock, self._tell = clock, tell
        self._skipped = ""
        self.newcomer = False

    def __call__(self, mark: Mark, losses: Tensor) -> None:
        """Write a checkpoint if it is due; a full disk costs the checkpoint, not the task."""
        if not self._budget.due(self._limits.every_s):
            return
        size = self._size()
        if not self._budget.affords(self._limits.share, size):
            return
        since = self._clock()
        try:
            why_not = self._no_room(size)
            if not why_not:
                self._write(mark, losses)
        except OSError as problem:
            why_not = f"this machine's disk: {problem}"
        self._budget.spent(since)
        if not why_not:
            self._tell(Checkpointed(mark.steps))
        elif why_not != self._skipped:  # told once, not every few seconds
            self._tell(LogLine("warning", "checkpoint skipped", {"why": why_not}))
        self._skipped = why_not

    def resume(self) -> Resumed | None:
        """Load the checkpoint that fits, if there is one; without one nothing has changed."""
        for leftover in self._folder.glob(".*.part"):  # of a process that was killed
            leftover.unlink()
        try:
            index = self._read_index()
            found = None if index is None else self._load(index)
        except (Integrity, ValueError, KeyError, OSError) as problem:
            self._tell(LogLine("warning", "checkpoint not used", {"why": str(problem)}))
            return None
        if found is not None:
            self.newcomer = found.newcomer
            self._tell(Checkpointed(found.mark.steps, resumed=True))
        return found

    # -------------------------------------------------------------- writing

    def _tensors(self) -> dict[str, Tensor]:
        named = {_LIVE + name: tensor for name, tensor in self._live.tensors().items()}
        named |= {_OPTIMIZER + name: value for name, value in self._optimizer.state().items()}
        return named

    def _size(self) -> int:
        return sum(t.numel() * t.element_size() for t in self._tensors().values())

    def _no_room(self, size: int) -> str:
        if size > self._limits.max_bytes:
            return f"it takes {size} bytes, at most {self._limits.max_bytes} are allowed"
        free = shutil.disk_usage(self._folder).free
        if free < size + SPARE_BYTES:
            return f"{free} bytes are free on the disk, it takes {size}"
        return ""

    def _write(self, mark: Mark, losses: Tensor) -> None:
        tensors = {**self._tensors(), _LOSSES: losses}
        path = self._folder / _file_name(mark.steps)
        layout = {name: (_DTYPES[t.dtype], tuple(t.shape)) for name, t in tensors.items()}
        points.reach("child.checkpoint.tensors.before")
        with TensorWriter(path, layout, {"kind": KIND}) as writer:
            for name, tensor in tensors.items():
                writer.write(name, 0, _to_numpy(tensor))
            written = writer.commit()
        points.reach("child.checkpoint.tensors.durable")
        index = Index(KIND, self._owner, mark, self.newcomer, written.blob)
        durable.write(self._folder / INDEX, seal(index), point="child.checkpoint.index")
        for older in self._folder.glob(_file_name("*")):
            if older != path:
                older.unlink()
        points.reach("child.checkpoint.older.removed")

    # -------------------------------------------------------------- reading

    def _read_index(self) -> Index | None:
        path = self._folder / INDEX
        if not path.is_file():
            return None
        index = from_plain(Index, unseal(path.read_bytes()))
        if index.kind != KIND or index.owner != self._owner:
            raise ValueError("it belongs to another task, attempt, version or spec")
        return index

    def _load(self, index: Index) -> Resumed:
        path = self._folder / _file_name(index.mark.steps)
        with path.open("rb") as file:
            digest = hashlib.file_digest(file, "sha256").hexdigest()
        if digest != index.file.sha256:
            raise Integrity("blob.hash", f"{path.name} is torn or changed: its hash does not fit.")
        live = {_LIVE + name: t for name, t in self._live.tensors().items()}
        layout = {name: (_DTYPES[t.dtype], tuple(t.shape)) for name, t in live.items()}
        opened = load_file(path)
        for name, wanted in layout.items():
            if (found := opened.get(name)) is None or _shape_of(found) != wanted:
                raise ValueError(f"{name} is not as this model has it")
        moments = {
            name.removeprefix(_OPTIMIZER): tensor
            for name, tensor in opened.items()
            if name.startswith(_OPTIMIZER)
        }
        if len(moments) + len(live) + 1 != len(opened):
            raise ValueError("it holds other tensors than this version writes")
        losses = opened[_LOSSES]
        if losses.shape != (index.mark.steps,):
            raise ValueError("its losses are not those of its steps")
        self._optimizer.load_state(moments)  # refuses before it changes anything
        with torch.no_grad():
            for name, tensor in live.items():
                tensor.copy_(opened[name])
        return Resumed(index.mark, losses, index.newcomer)


def _file_name(steps: int | str) -> str:
    return f"checkpoint.{steps}.safetensors"


def _shape_of(tensor: Tensor) -> tuple[str, tuple[int, ...]]:
    return (_DTYPES[tensor.dtype], tuple(tensor.shape))


def _to_numpy(tensor: Tensor) -> np.ndarray:
    value = tensor.detach().cpu().contiguous()
    if value.dtype == torch.bfloat16:
        return value.view(torch.int16).numpy().view(np.uint16)
    found: np.ndarray = value.numpy()
    return found
