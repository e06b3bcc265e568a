"""The job spec: every value that decides how a job runs, frozen, with its default.

``api.recipe`` reads what people write and makes one of these; the store keeps its canonical JSON;
a node gets it with each task. Defaults of the training recipe were chosen by measurement, see
``docs/explanation/learning.md``. Plain text in and out through :mod:`distribai.core.plain`.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

from distribai.core.codecs import Schedule, codec_of_round
from distribai.core.needs import Isolation
from distribai.core.plain import Plain

JobKind = Literal["train"]
Priority = Literal["P0", "P1", "P2", "P3"]


@dataclass(frozen=True, slots=True)
class BlobRef:
    """A blob: SHA-256 (hex) and size in bytes."""

    sha256: str
    size: int


@dataclass(frozen=True, slots=True)
class ModelSpec:
    """The model: family, and its complete configuration as plain JSON.

    ``init`` is a blob of safetensors weights to start from; without it version 0 is made from the
    seed. ``profile`` only remembers where ``config`` came from.
    """

    family: str
    config: Mapping[str, Plain]
    profile: str = ""
    init: BlobRef | None = None


@dataclass(frozen=True, slots=True)
class DataSpec:
    """What is trained on.

    ``source``: ``blobs`` (the files in ``files``, in this order) or the name of a built-in data
    set (``stdlib``). ``format``: ``text``, or ``jsonl`` with the text in ``field``. ``tokenizer``:
    a blob of a ``tokenizers`` JSON, or None for bytes. ``held_out``: the share of sequences that
    training never touches.
    """

    source: str = "stdlib"
    files: tuple[BlobRef, ...] = ()
    format: Literal["text", "jsonl"] = "text"
    field: str = "text"
    tokenizer: BlobRef | None = None
    held_out: float = 0.02


@dataclass(frozen=True, slots=True)
class OptimizerSpec:
    """The inner optimizer. ``muon`` takes the hidden matrices and leaves the rest to AdamW.

    Weight decay and clip from algorithms.md A1; Muon inside after arXiv:2505.23725. The rates,
    Muon's momentum and the second beta were tuned, see ``docs/explanation/learning.md``.
    """

    name: Literal["adamw", "muon"] = "muon"
    lr: float = 0.012
    betas: tuple[float, ...] = (0.9, 0.99)
    eps: float = 1e-8
    weight_decay: float = 0.1
    clip: float = 1.0
    muon_lr: float = 0.005
    muon_momentum: float = 0.9


@dataclass(frozen=True, slots=True)
class ScheduleSpec:
    """Learning rate over the *global* inner step: warm-up, then cosine, WSD or constant.

    ``warmup`` steps rise linearly; ``floor`` is the last rate's share of the peak; ``decay`` is the
    share of all steps that WSD spends falling.
    """

    kind: Literal["cosine", "wsd", "constant"] = "cosine"
    warmup: int = 50
    floor: float = 0.0
    decay: float = 0.2


@dataclass(frozen=True, slots=True)
class OuterSpec:
    """The outer step of algorithms.md A1. ``ramp`` rounds of cold start lead from averaging to
    ``eta`` and ``mu``, the last ``ending`` rounds lead back; 0 switches either off."""

    eta: float = 0.8
    mu: float = 0.8
    ramp: int = 8
    ending: int = 8


@dataclass(frozen=True, slots=True)
class RoundSpec:
    """When a round merges (A2) and what travels.

    ``inner_steps`` H; ``min_inner_steps`` the least share of H that a slow node is given;
    ``quorum`` the share of expected submissions that starts the grace; ``grace_min`` and
    ``grace_max`` in seconds; ``staleness``: by how many versions late work may be behind the round
    that takes it (A6), 0: what its round did not get is trained again; ``moments``: ``fresh`` each
    round, or ``keep`` the node's own. ``codec_up`` and ``codec_down``: how deltas and updates
    travel (A3), one codec or stages by round.
    """

    inner_steps: int = 50
    min_inner_steps: float = 0.25
    quorum: float = 0.5
    grace_min: float = 2.0
    grace_max: float = 120.0
    staleness: int = 1
    moments: Literal["fresh", "keep"] = "keep"
    codec_up: Schedule = "int4"
    codec_down: Schedule = "int4"


@dataclass(frozen=True, slots=True)
class SnapshotSpec:
    """Which versions keep their whole weights and outer state (``core.snapshots``): the newest
    ``keep`` of each ``every``-th, besides the first, the last and about each 64th. The others keep
    the encoded update that leads to them."""

    every: int = 10
    keep: int = 4


@dataclass(frozen=True, slots=True)
class ResourceSpec:
    """What a task needs of a device and its machine.

    ``memory_mb`` of the device, which is an accelerator's own (VRAM); 0 is the planner's own
    estimate. The others ask for nothing by default: ``host_memory_mb`` main memory and ``disk_mb``
    free disk in MiB, ``gflops`` the device's measured matrix products in 10^9 operations a second,
    ``link_mbps`` its measured link in 10^6 bits a second, ``standing`` of the node, ``isolation``
    at least.
    """

    memory_mb: int = 0
    device: Literal["any", "cuda", "mps", "cpu"] = "any"
    precision: Literal["auto", "fp32", "bf16"] = "auto"
    compile: bool = False
    host_memory_mb: int = 0
    disk_mb: int = 0
    gflops: float = 0.0
    link_mbps: float = 0.0
    standing: Literal["any", "trusted"] = "any"
    isolation: Isolation = "L0"


@dataclass(frozen=True, slots=True)
class JobSpec:
    """A job. ``steps`` are inner steps per worker; ``batch`` sequences per worker and step;
    ``seq_len`` tokens that each sequence predicts."""

    name: str
    model: ModelSpec
    data: DataSpec
    steps: int
    batch: int = 8
    seq_len: int = 64
    seed: int = 0
    kind: JobKind = "train"
    paradigm: str = "diloco"
    priority: Priority = "P2"
    workers_min: int = 1
    workers_max: int = 64
    max_attempts: int = 5
    optimizer: OptimizerSpec = OptimizerSpec()
    schedule: ScheduleSpec = ScheduleSpec()
    outer: OuterSpec = OuterSpec()
    rounds: RoundSpec = RoundSpec()
    snapshots: SnapshotSpec = SnapshotSpec()
    resources: ResourceSpec = ResourceSpec()

    @property
    def round_count(self) -> int:
        """Rounds: ceil(steps / H)."""
        return -(-self.steps // self.rounds.inner_steps)

    def steps_of_round(self, number: int) -> int:
        """Inner steps of round ``number`` (from 0); the last may be shorter."""
        h = self.rounds.inner_steps
        return max(0, min(h, self.steps - number * h))

    def codec_up_of(self, number: int) -> str:
        """How the deltas of round ``number`` travel."""
        return codec_of_round(self.rounds.codec_up, number)

    def codec_down_of(self, number: int) -> str:
        """How the update travels that round ``number`` makes."""
        return codec_of_round(self.rounds.codec_down, number)
