"""What a job takes before it runs, and whether it can be planned at all.

Bytes are counted as in algorithms.md A9: everything that a node moves, both directions.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Final

from distribai.core.architectures import config_from, family, manifest_of
from distribai.core.codecs import Schedule, check_schedule, packed_layout, stages
from distribai.core.datasets import check_built_in
from distribai.core.framing import file_bytes
from distribai.core.needs import Needs
from distribai.core.paradigms import paradigm
from distribai.core.snapshots import CHAIN
from distribai.core.spec import JobSpec
from distribai.core.tensors import ParameterManifest
from distribai.errors import InvalidSpec

STATE_BYTES: Final = 24
"""Bytes per parameter on a node: 4 canonical + 4 live + 4 gradient + 8 moments + 4 error feedback
(design.md section 4)."""

RUNTIME_BYTES: Final = 400_000_000
"""What a training process takes before the model: interpreter, torch and its thread pools (about
0.3 GB resident with torch 2.x on a CPU, rounded up)."""

MAX_PARAMETERS: Final = 2_000_000_000
"""Largest model that this grid plans for."""

MAX_WORKERS: Final = 10_000

MAX_HELD_OUT: Final = 0.5

MAX_ATTEMPTS: Final = 1000

MAX_STALENESS: Final = 3
"""Versions; what is still older would count less than half (A6)."""

MAX_SNAPSHOTS: Final = 1000
"""Snapshots that a job may ask to keep by its cadence."""

MAX_NAME: Final = 100
"""Characters of a name."""

_COUNT: Final = "between 0 (off) and 10^9"

NOMINAL_DELTA: Final = {
    "format": "distribai.delta.v1",
    "attempt": "1",
    "base_version": "100",
    "codec": "sparse128",
    "job_id": "job_" + 16 * "x",
    "manifest_hash": 64 * "0",
    "steps": "100",
    "task_id": "task_" + 16 * "x",
    "tokens": "1000000",
}
NOMINAL_UPDATE: Final = {
    name: NOMINAL_DELTA[name] for name in ("format", "codec", "job_id", "manifest_hash")
} | {"version": "100"}
"""What a usual delta and update say of themselves: real headers differ by 64 bytes at most."""

BYTE_VOCABULARY: Final = 257
"""Ids of the byte tokenizer (``data.tokenizers``)."""


@dataclass(frozen=True, slots=True)
class Plan:
    """What a job takes with ``nodes`` nodes, all of the same speed.

    ``tasks`` train tasks, ``evaluations`` held-out losses (of every version); ``memory_bytes`` of
    one node; ``bytes_up`` and ``bytes_down`` of one node over the whole job, without the data
    (``data_bytes``, at most, None when the data is not known yet); ``bytes_total`` of all nodes,
    both ways, without data; ``data_parallel_ratio`` how many times more bytes ring all-reduce in
    fp32 would move for the same steps, None for a single node; ``tokens`` and ``epochs`` (None when
    the data is not known) of all nodes together.
    """

    nodes: int
    rounds: int
    tasks: int
    evaluations: int
    parameters: int
    memory_bytes: int
    bytes_up: int
    bytes_down: int
    bytes_total: int
    data_bytes: int | None
    data_parallel_ratio: float | None
    tokens: int
    epochs: float | None


def plan(spec: JobSpec, parameters: int, nodes: int, train_sequences: int | None = None) -> Plan:
    """The plan of a valid spec.

    Args:
        spec: the job, see :func:`validate_spec`.
        parameters: trainable parameters, see :func:`parameter_count`.
        nodes: how many nodes take part in every round.
        train_sequences: of the prepared data set, None while it is not prepared.

    Raises:
        ValueError: ``nodes`` is not positive.
        InvalidSpec: the architecture is not possible.
    """
    if nodes < 1:
        raise ValueError("a plan needs at least one node")
    rounds = spec.round_count
    manifest = manifest_of(spec.model.family, spec.model.config)
    up = leg_bytes(spec.rounds.codec_up, manifest, rounds, NOMINAL_DELTA)
    down = leg_bytes(spec.rounds.codec_down, manifest, rounds, NOMINAL_UPDATE)
    ring = 16 * (nodes - 1) / nodes * parameters * spec.steps
    sequences = spec.steps * spec.batch * nodes
    return Plan(
        nodes=nodes,
        rounds=rounds,
        tasks=rounds * nodes,
        evaluations=rounds + 1,
        parameters=parameters,
        memory_bytes=memory_bytes(spec, parameters),
        bytes_up=up,
        bytes_down=down,
        bytes_total=(up + down) * nodes,
        # Shards hold two bytes a token, four for vocabularies beyond 65536.
        data_bytes=None if train_sequences is None else 4 * train_sequences * spec.seq_len,
        data_parallel_ratio=ring / (up + down) if nodes > 1 else None,
        tokens=sequences * spec.seq_len,
        epochs=None if train_sequences is None else sequences / train_sequences,
    )


def leg_bytes(
    schedule: Schedule, manifest: ParameterManifest, rounds: int, metadata: Mapping[str, str]
) -> int:
    """Bytes of ``rounds`` files, headers included, one a round, as a schedule encodes them."""
    found = stages(schedule)
    ends = [*(s.from_round for s in found[1:]), rounds]
    return sum(
        max(0, min(end, rounds) - stage.from_round)
        * file_bytes(packed_layout(manifest, stage.codec), metadata)
        for stage, end in zip(found, ends, strict=True)
    )


def parameter_count(spec: JobSpec) -> int:
    """Trainable parameters of the job's model, without building it.

    Raises:
        InvalidSpec: ``spec.model``; the architecture is not possible.
    """
    config = config_from(spec.model.family, spec.model.config)
    return int(family(spec.model.family).parameters(config))


def memory_bytes(spec: JobSpec, parameters: int) -> int:
    """What a task needs on its device: state of :data:`STATE_BYTES` per parameter, an estimate of
    the activations of a whole batch, and the process itself.

    A node that has less than that splits the batch into micro-batches.

    Raises:
        InvalidSpec: ``spec.model``; the architecture is not possible.
    """
    config = config_from(spec.model.family, spec.model.config)
    activations = family(spec.model.family).activation_bytes(config, spec.batch, spec.seq_len)
    return STATE_BYTES * parameters + int(activations) + RUNTIME_BYTES


def task_memory_mb(spec: JobSpec) -> int:
    """Memory in MiB that a device must have for the job's tasks: the spec's, or what its model's
    state and one sequence at a time take (a smaller micro-batch always works).

    Raises:
        InvalidSpec: ``spec.model``; the architecture is not possible.
    """
    if spec.resources.memory_mb:
        return spec.resources.memory_mb
    config = config_from(spec.model.family, spec.model.config)
    activations = int(family(spec.model.family).activation_bytes(config, 1, spec.seq_len))
    return -(-(STATE_BYTES * parameter_count(spec) + activations + RUNTIME_BYTES) >> 20)


def evaluation_batches(batch: int, inner_steps: int, held_out: int | None) -> int:
    """Batches of a version's held-out loss, of ``held_out`` sequences (None: not known).

    A forward pass takes about a third of a training step: at most a sixth of one node's round.
    """
    most = max(8, inner_steps // 2)
    return most if held_out is None else min(-(-held_out // batch), most)


def needs_of(spec: JobSpec) -> Needs:
    """What the job's tasks need beside a device's type and memory."""
    asked = spec.resources
    return Needs(
        host_memory_mb=asked.host_memory_mb,
        disk_mb=asked.disk_mb,
        gflops=asked.gflops,
        link_mbps=asked.link_mbps,
        standing=asked.standing,
        isolation=asked.isolation,
    )


def validate_spec(spec: JobSpec, *, memory_cap_bytes: int | None = None) -> None:
    """Refuse a spec that cannot be run, naming the first field that is wrong.

    What needs the data itself (its vocabulary, its length) is checked where it is prepared.

    Args:
        spec: the job.
        memory_cap_bytes: what the largest node may have; None for no limit.

    Raises:
        InvalidSpec: ``spec.steps``, ``spec.workers``, ``spec.paradigm``, ``spec.model``,
            ``spec.model_too_large``, ``spec.plan``, ``codec.unknown``, ``spec.invalid``.
        InvalidData: ``data.missing``: no built-in data set has that name.
    """
    paradigm(spec.paradigm)
    for code, field, value, allowed, rule in _figures(spec):
        if not allowed:
            raise InvalidSpec(
                code, f"{field} is {value!r}: it must be {rule}.", f"Change {field}.", field=field
            )
    for leg in ("codec_up", "codec_down"):
        check_schedule(getattr(spec.rounds, leg), f"rounds.{leg}", spec.round_count)
    _check_data(spec)
    _check_model(spec, memory_cap_bytes)


def _check_data(spec: JobSpec) -> None:
    if (spec.data.source == "blobs") != bool(spec.data.files):
        raise InvalidSpec(
            "spec.invalid",
            "data.files and data.source contradict each other: files go with the source 'blobs', "
            "and a built-in data set has none.",
            "Give files, or the name of a built-in data set.",
            field="data.source",
        )
    if not spec.data.files:
        check_built_in(spec.data.source)
    if spec.data.format == "jsonl" and not spec.data.field:
        raise InvalidSpec(
            "spec.invalid",
            "data.field is empty: JSON Lines need the name of the field with the text.",
            "Usually it is `text`.",
            field="data.field",
        )


def _check_model(spec: JobSpec, memory_cap_bytes: int | None) -> None:
    config = config_from(spec.model.family, spec.model.config)
    vocabulary = getattr(config, "vocab_size", None)
    if spec.data.tokenizer is None and vocabulary is not None and vocabulary < BYTE_VOCABULARY:
        raise InvalidSpec(
            "spec.model",
            f"The model's vocabulary of {vocabulary} is too small for bytes: they take "
            f"{BYTE_VOCABULARY} ids.",
            f"Set vocab_size to {BYTE_VOCABULARY}.",
            field="model.architecture_config.vocab_size",
        )
    parameters = parameter_count(spec)
    if parameters > MAX_PARAMETERS:
        raise InvalidSpec(
            "spec.model_too_large",
            f"The model has {parameters:.3g} parameters: this grid plans for at most "
            f"{MAX_PARAMETERS:.3g}.",
            "Take fewer layers, or smaller ones.",
            field="model",
        )
    needed = task_memory_mb(spec) << 20
    if memory_cap_bytes is not None and needed > memory_cap_bytes:
        raise InvalidSpec(
            "spec.model_too_large",
            f"A node needs about {needed / 1e9:.1f} GB for this model, and the largest has "
            f"{memory_cap_bytes / 1e9:.1f} GB.",
            "Take a smaller model or sequence length, or join a larger node.",
            field="model",
        )


_Figure = tuple[str, str, object, bool, str]


def _figures(spec: JobSpec) -> Iterator[_Figure]:
    """(code, field, value, whether it is allowed, the rule) of every figure, in reading order."""
    for field, text, least in (
        ("name", spec.name, 1),
        ("data.source", spec.data.source, 1),
        ("data.field", spec.data.field, 0),
        ("model.profile", spec.model.profile, 0),
    ):
        fits = least <= len(text.strip()) and len(text) <= MAX_NAME and text.isprintable()
        yield "spec.invalid", field, text, fits, f"{least} to {MAX_NAME} printable characters"
    yield "spec.steps", "steps", spec.steps, 1 <= spec.steps <= 10**9, "between 1 and 10^9"
    yield "spec.plan", "batch", spec.batch, 1 <= spec.batch <= 1 << 16, "between 1 and 65536"
    yield "spec.plan", "seq_len", spec.seq_len, 1 <= spec.seq_len <= 1 << 20, "between 1 and 2^20"
    yield "spec.plan", "seed", spec.seed, 0 <= spec.seed < 1 << 63, "between 0 and 2^63 - 1"
    low, high = spec.workers_min, spec.workers_max
    yield "spec.workers", "workers_min", low, low >= 1, "at least 1"
    yield (
        "spec.workers",
        "workers_max",
        high,
        low <= high <= MAX_WORKERS,
        f"between workers_min ({low}) and {MAX_WORKERS}",
    )
    attempts = spec.max_attempts
    yield (
        "spec.plan",
        "max_attempts",
        attempts,
        1 <= attempts <= MAX_ATTEMPTS,
        f"between 1 and {MAX_ATTEMPTS}",
    )
    share = spec.data.held_out
    yield (
        "spec.plan",
        "data.held_out",
        share,
        0 < share <= MAX_HELD_OUT,
        f"above 0 and at most {MAX_HELD_OUT}",
    )
    yield from _resource_figures(spec)
    yield from _optimizer_figures(spec)
    yield from _round_figures(spec)


def _resource_figures(spec: JobSpec) -> Iterator[_Figure]:
    asked = spec.resources
    for name, zero in (
        ("memory_mb", "estimate"),
        ("host_memory_mb", "any"),
        ("disk_mb", "any"),
    ):
        size = getattr(asked, name)
        rule = f"0 ({zero}) or less than 2^31"
        yield "spec.plan", f"resources.{name}", size, 0 <= size < 1 << 31, rule
    for name in ("gflops", "link_mbps"):
        rate = getattr(asked, name)
        yield "spec.plan", f"resources.{name}", rate, 0 <= rate <= 1e9, "0 (any) to 10^9"


def _optimizer_figures(spec: JobSpec) -> Iterator[_Figure]:
    inner, schedule = spec.optimizer, spec.schedule
    for name in ("lr", "eps", "clip", "muon_lr"):
        value = getattr(inner, name)
        yield "spec.plan", f"optimizer.{name}", value, 0 < value < math.inf, "above 0 and finite"
    decay = inner.weight_decay
    yield "spec.plan", "optimizer.weight_decay", decay, 0 <= decay < math.inf, "0 or more"
    betas = inner.betas
    fine = len(betas) == 2 and all(0 <= b < 1 for b in betas)
    yield "spec.plan", "optimizer.betas", betas, fine, "two numbers, each at least 0 and below 1"
    yield _below_one("optimizer.muon_momentum", inner.muon_momentum)
    yield "spec.plan", "schedule.warmup", schedule.warmup, 0 <= schedule.warmup <= 10**9, _COUNT
    yield _share("schedule.floor", schedule.floor)
    yield _share("schedule.decay", schedule.decay)


def _round_figures(spec: JobSpec) -> Iterator[_Figure]:
    outer, rounds = spec.outer, spec.rounds
    # It becomes a number of single precision.
    yield "spec.plan", "outer.eta", outer.eta, 0 < outer.eta <= 1e6, "above 0 and at most 10^6"
    yield _below_one("outer.mu", outer.mu)
    yield "spec.plan", "outer.ramp", outer.ramp, 0 <= outer.ramp <= 10**9, _COUNT
    yield "spec.plan", "outer.ending", outer.ending, 0 <= outer.ending <= 10**9, _COUNT
    h = rounds.inner_steps
    yield "spec.plan", "rounds.inner_steps", h, 1 <= h <= 10**6, "between 1 and 10^6"
    for name in ("min_inner_steps", "quorum"):
        value = getattr(rounds, name)
        yield "spec.plan", f"rounds.{name}", value, 0 < value <= 1, "above 0 and at most 1"
    low, high = rounds.grace_min, rounds.grace_max
    yield "spec.plan", "rounds.grace_min", low, 0 <= low < math.inf, "0 or more seconds"
    yield (
        "spec.plan",
        "rounds.grace_max",
        high,
        low <= high < math.inf,
        f"at least rounds.grace_min ({low})",
    )
    late = rounds.staleness
    allowed = f"between 0 and {MAX_STALENESS}"
    yield "spec.plan", "rounds.staleness", late, 0 <= late <= MAX_STALENESS, allowed
    kept = spec.snapshots
    every, keep = f"between 1 and {CHAIN}", f"between 1 and {MAX_SNAPSHOTS}"
    yield "spec.plan", "snapshots.every", kept.every, 1 <= kept.every <= CHAIN, every
    yield "spec.plan", "snapshots.keep", kept.keep, 1 <= kept.keep <= MAX_SNAPSHOTS, keep


def _share(field: str, value: float) -> _Figure:
    return "spec.plan", field, value, 0 <= value <= 1, "between 0 and 1"


def _below_one(field: str, value: float) -> _Figure:
    return "spec.plan", field, value, 0 <= value < 1, "at least 0 and below 1"
