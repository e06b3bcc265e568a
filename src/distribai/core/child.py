"""Messages between the node's daemon and its training child: one JSON object per line.

The child is started by the daemon with its standard input and output as the channel; it moves its
own ``print`` output to standard error first. It stays alive between tasks, keeps the model and the
canonical copy of its jobs in memory, and runs one task at a time. Either side closing its end ends
the child.

::

    daemon                              child
      |                  <-- Ready        |   once, after torch is imported
      |  Measure -->                      |   between two tasks
      |                  <-- Measured     |   exactly one per Measure
      |  Run -->                          |
      |                  <-- Need         |   blobs it wants, any number of times
      |  Have -->                         |   local paths; or Cancel
      |                  <-- Kept         |   weights worth keeping, once they are reached
      |                  <-- ProgressLine |   at most every 2 s
      |                  <-- Checkpointed |   the task is on disk, or went on from there
      |  Gate -->                         |   at any time: limits, pause, finish
      |  Finish -->                       |   at any time after Run: the task's round merges soon
      |                  <-- Done         |   exactly one per Run, also after Cancel

Unreadable lines are an error of the other side, never skipped.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal

from distribai.core.plain import from_plain, to_plain
from distribai.core.spec import BlobRef
from distribai.core.tasks import Assignment, KeptRef, Outcome, Progress


@dataclass(frozen=True, slots=True)
class Checkpoints:
    """How a running training task is kept on disk.

    At least ``every_s`` seconds apart (0: never), with at most ``share`` of the training time spent
    on it, and never one of more than ``max_bytes`` bytes.
    """

    every_s: float = 0.0
    share: float = 0.03
    max_bytes: int = 0


RESIDUAL = "residual.safetensors"
"""The file in ``Run.out_dir`` of what a delta's codec did not send."""


@dataclass(frozen=True, slots=True)
class Owed:
    """What earlier deltas of the job on this device owe, as paths: the residual (empty: none yet),
    and deltas that were sent and not merged."""

    kept: str = ""
    lost: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class Run:
    """Do this task. ``out_dir`` is where a delta may be written (the file is the daemon's then),
    and where checkpoints go and an earlier one of the same attempt is looked for. With ``owed``
    the delta has error feedback, and leaves :data:`RESIDUAL` beside itself. ``here`` says how many
    bytes of the blobs that lead to the base are on disk, by SHA-256; ``begun`` are earlier
    snapshots that were begun to fetch; ``room`` bytes of the disk may go to weights that are worth
    keeping (``Kept``). Progress is told every ``progress_s`` at most."""

    assignment: Assignment
    out_dir: str
    device: str
    threads: int
    checkpoints: Checkpoints = Checkpoints()
    owed: Owed | None = None
    here: Mapping[str, int] = field(default_factory=dict)
    begun: tuple[KeptRef, ...] = ()
    room: int = 0
    progress_s: float = 2.0
    type: Literal["run"] = "run"


@dataclass(frozen=True, slots=True)
class Measure:
    """Measure this device, between two tasks; answered by ``Measured``."""

    device: str
    threads: int
    type: Literal["measure"] = "measure"


@dataclass(frozen=True, slots=True)
class Have:
    """Local, verified, read-only paths by SHA-256, for the last ``Need``. ``gone``: snapshots that
    were begun earlier and are on offer no more; the child goes another way."""

    paths: Mapping[str, str]
    gone: tuple[str, ...] = ()
    type: Literal["have"] = "have"


@dataclass(frozen=True, slots=True)
class Gate:
    """What ``governor.gate()`` obeys from now on.

    ``share`` in (0, 1] is the duty cycle: after a step of t seconds the child sleeps
    ``t (1 / share - 1)``. ``pause`` blocks before the next step. ``finish`` ends the task after the
    present step with what was really done.
    """

    share: float = 1.0
    pause: bool = False
    finish: bool = False
    type: Literal["gate"] = "gate"


@dataclass(frozen=True, slots=True)
class Finish:
    """The task's round merges in ``within_s`` seconds, less what delivering the result takes.

    The child goes on to the end if the remaining steps fit, as it measures them; else it ends after
    the present step with what was really done, at least one step.
    """

    task_id: str
    within_s: float
    type: Literal["finish"] = "finish"


@dataclass(frozen=True, slots=True)
class Cancel:
    """Drop the running task; it answers ``Done`` with status failed and code ``task.failed``."""

    task_id: str
    reason: str
    type: Literal["cancel"] = "cancel"


@dataclass(frozen=True, slots=True)
class Ready:
    """The child is up: torch's version, and the device types it can use (cuda, mps, cpu).

    ``names`` and ``memory_mb`` (MiB) describe accelerators by device type, where torch can tell.
    """

    torch: str
    devices: tuple[str, ...]
    names: Mapping[str, str] = field(default_factory=dict)
    memory_mb: Mapping[str, int] = field(default_factory=dict)
    type: Literal["ready"] = "ready"


@dataclass(frozen=True, slots=True)
class Measured:
    """What a device does: single-precision matrix products in 10^9 operations a second, copying in
    10^9 bytes a second. Both 0: it could not be measured, and ``problem`` says why."""

    gflops: float
    memory_gbps: float
    problem: str = ""
    type: Literal["measured"] = "measured"


@dataclass(frozen=True, slots=True)
class Need:
    """Blobs that the child wants on disk before it goes on."""

    blobs: tuple[BlobRef, ...]
    type: Literal["need"] = "need"


@dataclass(frozen=True, slots=True)
class Kept:
    """The file at ``path`` is ``blob``, the whole weights of a version that others start from
    later; it is the daemon's now."""

    path: str
    blob: BlobRef
    type: Literal["kept"] = "kept"


@dataclass(frozen=True, slots=True)
class ProgressLine:
    """Progress of the running task."""

    progress: Progress
    type: Literal["progress"] = "progress"


@dataclass(frozen=True, slots=True)
class Checkpointed:
    """The running task is on disk after ``steps`` steps; ``resumed``: it goes on from there now."""

    steps: int
    resumed: bool = False
    type: Literal["checkpointed"] = "checkpointed"


@dataclass(frozen=True, slots=True)
class LogLine:
    """Something worth telling the job's owner."""

    level: Literal["debug", "info", "warning", "error"]
    message: str
    fields: Mapping[str, str] = field(default_factory=dict)
    type: Literal["log"] = "log"


@dataclass(frozen=True, slots=True)
class Done:
    """The task's end. ``delta_path`` is the file of ``outcome.delta``, if there is one;
    ``residual`` what lies in :data:`RESIDUAL` then, with error feedback."""

    outcome: Outcome
    delta_path: str = ""
    residual: BlobRef | None = None
    type: Literal["done"] = "done"


ToChild = Run | Measure | Have | Gate | Finish | Cancel
FromChild = Ready | Measured | Need | Kept | ProgressLine | Checkpointed | LogLine | Done
Message = ToChild | FromChild

_TYPES = {
    c.__dataclass_fields__["type"].default: c
    for c in (
        Run,
        Measure,
        Have,
        Gate,
        Finish,
        Cancel,
        Ready,
        Measured,
        Need,
        Kept,
        ProgressLine,
        Checkpointed,
        LogLine,
        Done,
    )
}


def encode(message: Message) -> bytes:
    """One line, newline included."""
    return json.dumps(to_plain(message), separators=(",", ":")).encode() + b"\n"


def decode(line: bytes) -> Message:
    """The message of one line.

    Raises:
        ValueError: not JSON, an unknown type, or ill-typed fields.
    """
    plain = json.loads(line)
    if not isinstance(plain, dict) or plain.get("type") not in _TYPES:
        raise ValueError(f"not a message of the child's channel: {line[:80]!r}")
    return from_plain(_TYPES[plain["type"]], plain)  # type: ignore[return-value]
