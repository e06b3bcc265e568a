"""One micro-task as both sides see it: what is assigned, what comes back."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal

from distribai.core.plain import Plain
from distribai.core.ranges import Ranges
from distribai.core.spec import BlobRef, JobSpec

Phase = Literal["train", "evaluate", "generate"]


def works_on(phase: str, number: int) -> str:
    """What a task of version ``number`` works on, for people: ``round 1`` is the one that makes
    version 1. Programs count rounds from 0, by the version that a round starts from."""
    return f"round {number + 1}" if phase == "train" else f"version {number}"


@dataclass(frozen=True, slots=True)
class UpdateRef:
    """The encoded outer update that leads from version ``version - 1`` to ``version``."""

    version: int
    blob: BlobRef
    weights_hash: str


@dataclass(frozen=True, slots=True)
class KeptRef:
    """The whole weights of a version that the grid keeps for long, and nodes may keep, too."""

    version: int
    blob: BlobRef


@dataclass(frozen=True, slots=True)
class WeightsRef:
    """Canonical weights ``version``, and the ways to get them.

    A node that holds version ``v0`` in ``[version - len(updates), version]`` applies
    ``updates`` from ``v0 + 1`` on; any other takes ``snapshot``, and the updates that follow it;
    without a snapshot (version 0 of a job without user weights) it makes version 0 from the seed
    and applies all updates. ``weights_hash`` is what the result must hash to.

    ``kept`` is an earlier snapshot, or the very version's, that a node may have on its own disk:
    with the updates from there on it needs fewer bytes, or none. Who reaches a version that is
    ``kept`` may put its weights there: the same file, to the byte.
    """

    version: int
    weights_hash: str
    snapshot: BlobRef | None = None
    snapshot_version: int = 0
    updates: tuple[UpdateRef, ...] = ()
    kept: KeptRef | None = None

    @property
    def blobs(self) -> tuple[BlobRef, ...]:
        """Every blob that some way to the version takes."""
        whole = (self.snapshot, None if self.kept is None else self.kept.blob)
        return (*(b for b in whole if b is not None), *(u.blob for u in self.updates))


@dataclass(frozen=True, slots=True)
class DatasetRef:
    """The prepared data set: its manifest blob (``data.shards.DatasetManifest`` as JSON)."""

    manifest: BlobRef


@dataclass(frozen=True, slots=True)
class OwnWork:
    """An earlier submission of the node to the same job that counts: ``merged``, or to be merged
    yet, as far as anybody can say."""

    task_id: str
    attempt: int
    merged: bool


@dataclass(frozen=True, slots=True)
class Assignment:
    """A leased task.

    ``attempt`` is the fencing token: a report under another attempt counts for nothing.
    ``steps`` inner steps from global inner step ``inner_step_offset`` on; ``samples`` hold exactly
    ``steps * spec.batch`` positions. ``deadline_s`` seconds from the assignment, on the node's
    monotonic clock. ``env`` the RANK / WORLD_SIZE environment of the phase. ``params`` what only
    this phase reads: evaluate ``{"batches": n}``; generate ``{"prompt": s, "max_tokens": n,
    "temperature": t, "seed": n}``. ``own``: with error feedback, what became of the node's latest
    submissions to the job; one that is not named came to nothing.
    """

    job_id: str
    task_id: str
    attempt: int
    round: int
    phase: Phase
    spec: JobSpec
    base: WeightsRef
    data: DatasetRef | None
    paradigm: str = "diloco"
    executor: str = "package"
    isolation: str = "L0"
    samples: Ranges = ()
    steps: int = 0
    inner_step_offset: int = 0
    deadline_s: float = 0.0
    env: Mapping[str, str] = field(default_factory=dict)
    params: Mapping[str, Plain] = field(default_factory=dict)
    own: tuple[OwnWork, ...] = ()


@dataclass(frozen=True, slots=True)
class Progress:
    """How far a running task is; ``loss`` is the mean since the last report."""

    task_id: str
    attempt: int
    step: int
    steps: int
    loss: float
    tokens_per_s: float


@dataclass(frozen=True, slots=True)
class Outcome:
    """What a task returns.

    ``status`` ``failed`` is a failed attempt with ``error_code`` and ``reason``. ``delta`` is the
    uploaded blob (train). ``samples`` are the positions really consumed, ``tokens`` the target
    tokens trained on. ``base_hash`` is the hash of the canonical copy the work started from.
    ``metrics`` are finite numbers: train ``loss_first``, ``loss_last``, ``seconds`` at inner steps,
    ``download_seconds`` in which the training waited for blobs, ``upload_seconds`` of the delta;
    evaluate ``held_out_loss``, ``held_out_tokens``. ``text`` is a generated sample.
    """

    task_id: str
    attempt: int
    status: Literal["done", "failed"]
    delta: BlobRef | None = None
    samples: Ranges = ()
    steps: int = 0
    tokens: int = 0
    base_hash: str = ""
    metrics: Mapping[str, float] = field(default_factory=dict)
    text: str = ""
    error_code: str = ""
    reason: str = ""
