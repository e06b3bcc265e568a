"""What a job takes, before it runs.

Bytes are counted as in algorithms.md A9: everything that a node moves, both directions.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final

from distribai.core.architectures import config_from, family, manifest_of
from distribai.core.codecs import Schedule, packed_layout, stages
from distribai.core.datasets import once_bytes
from distribai.core.framing import file_bytes
from distribai.core.needs import Needs
from distribai.core.spec import JobSpec
from distribai.core.tensors import ParameterManifest

STATE_BYTES: Final = 24
"""Bytes per parameter on a node: 4 canonical + 4 live + 4 gradient + 8 moments + 4 error feedback
(design.md section 4)."""

RUNTIME_BYTES: Final = 400_000_000
"""What a training process takes before the model: interpreter, torch and its thread pools (about
0.3 GB resident with torch 2.x on a CPU, rounded up)."""

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


@dataclass(frozen=True, slots=True)
class Plan:
    """What a job takes with ``nodes`` nodes, all of the same speed.

    ``tasks`` train tasks, ``evaluations`` held-out losses (of every version); ``memory_bytes`` of
    one node; ``bytes_up`` and ``bytes_down`` of one node over the whole job, without
    ``once_bytes``, the data (at most) and the weights that training begins with, which it fetches
    once; ``bytes_total`` of all nodes, both ways, without these; ``data_parallel_ratio`` how many
    times more bytes ring all-reduce in fp32 would move for the same steps, None for a single node;
    ``tokens`` and ``epochs`` (None when the data is not known) of all nodes together.
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
    once_bytes: int
    data_parallel_ratio: float | None
    tokens: int
    epochs: float | None


def plan(
    spec: JobSpec,
    parameters: int,
    nodes: int,
    train_sequences: int | None = None,
    data_bytes: int | None = None,
) -> Plan:
    """The plan of a valid spec.

    Args:
        spec: the job, see :func:`distribai.core.validation.validate_spec`.
        parameters: trainable parameters, see :func:`parameter_count`.
        nodes: how many nodes take part in every round.
        train_sequences: of the prepared data set, None while it is not prepared.
        data_bytes: of its shards, None likewise.

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
        once_bytes=once_bytes(spec, data_bytes),
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
