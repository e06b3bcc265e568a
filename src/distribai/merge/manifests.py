"""Version and round manifests: how a model came to be, replayable by anybody (promise 4).

Plain frozen dataclasses; ``core.plain`` turns them into canonical JSON and its fingerprint. The
chain of round manifests from version 0 on is the lineage of a version.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from distribai.core.ranges import Ranges
from distribai.core.spec import BlobRef
from distribai.core.tensors import ParameterManifest, TensorSpec
from distribai.merge.choices import MergeChoices, choose, make_inputs
from distribai.merge.delta import Delta
from distribai.merge.kernel import Floats, Targets, walk
from distribai.merge.weights import (
    TensorHash,
    combined_hash,
    flat,
    open_weights,
    trainable,
    weights_hash,
)


@dataclass(frozen=True, slots=True)
class VersionManifest:
    """Canonical weights ``version``: tensors in manifest order, and the files that lead there.

    ``update`` leads from ``version - 1``; ``snapshot`` holds all weights, now and then.
    ``round_hash`` is the fingerprint of the :class:`RoundManifest` that made it, empty for
    version 0.
    """

    job_id: str
    version: int
    manifest_hash: str
    tensors: tuple[TensorHash, ...]
    weights_hash: str
    snapshot: BlobRef | None = None
    update: BlobRef | None = None
    round_hash: str = ""


@dataclass(frozen=True, slots=True)
class AcceptedSubmission:
    """One accepted submission: whose, which delta, and what it was worth.

    ``staleness``: its delta starts from the version that is so many before the round's base (A6).
    """

    task_id: str
    attempt: int
    node_id: str
    delta: BlobRef
    tokens: int
    steps: int
    samples: Ranges
    staleness: int = 0


@dataclass(frozen=True, slots=True)
class RoundManifest:
    """One round: base version, accepted submissions in their written order, choices, result.

    Outer coefficients are in ``choices``, as hex floats. ``base_momentum_hash`` is empty when the
    round had no momentum before it.
    """

    job_id: str
    round: int
    manifest_hash: str
    base_version: int
    base_hash: str
    base_momentum_hash: str
    submissions: tuple[AcceptedSubmission, ...]
    choices: MergeChoices
    weights_hash: str
    momentum_hash: str


@dataclass(frozen=True, slots=True)
class Replay:
    """Verdict of a replay; ``problems`` say in words what does not fit."""

    weights_hash: str
    momentum_hash: str
    problems: tuple[str, ...]

    @property
    def ok(self) -> bool:
        """Whether everything came out as recorded."""
        return not self.problems


def replay_round(
    manifest: ParameterManifest,
    record: RoundManifest,
    theta: Path,
    momentum: Path | None,
    deltas: Sequence[Delta],
) -> Replay:
    """Compute a round again from its files and compare, bit for bit; writes nothing.

    The recorded choices are used as they are, and derived anew from the submissions' tokens and
    staleness: the order and the rows left out must agree exactly, scalars within 1e-6. Each delta
    must start from the version that its staleness says. If any of this or the base does not fit,
    nothing is computed and the replay's hashes are empty. Whether the deltas' bytes are those of
    ``record.submissions`` (blobs are named by hash), and whether the outer coefficients are the
    job's, is the caller's to check.

    Args:
        manifest: the job's.
        record: what the orchestrator recorded.
        theta: weights file of the base version.
        momentum: momentum file of the base version; None if there was none.
        deltas: one for each submission, in any order.

    Raises:
        Integrity: a file is malformed or belongs to another model.
        ValueError: a delta is missing or superfluous.
    """
    by_task = {d.header.task_id: d for d in deltas}
    if by_task.keys() != {s.task_id for s in record.submissions} or len(by_task) != len(deltas):
        raise ValueError("a replay needs exactly the deltas of the round's submissions")
    rows = [by_task[s.task_id] for s in record.submissions]
    base = open_weights(theta, manifest)
    momentum_of = trainable(manifest)
    base_momentum = None if momentum is None else open_weights(momentum, momentum_of)
    problems = _compare_choices(record, rows)
    found = weights_hash(manifest, base)
    if found != record.base_hash:
        problems.append(f"the base weights hash to {found}, not {record.base_hash}")
    found = "" if base_momentum is None else weights_hash(momentum_of, base_momentum)
    if found != record.base_momentum_hash:
        problems.append(f"the base momentum hashes to {found!r}, not {record.base_momentum_hash!r}")
    if problems:
        return Replay("", "", tuple(problems))
    sink = _HashSink(manifest)
    walk(make_inputs(manifest, base, base_momentum, rows, record.choices), sink, threads=1)
    new, new_momentum = sink.hash_theta(manifest), sink.hash_momentum(momentum_of)
    if new != record.weights_hash:
        problems.append(f"the new weights hash to {new}, not {record.weights_hash}")
    if new_momentum != record.momentum_hash:
        problems.append(f"the new momentum hashes to {new_momentum}, not {record.momentum_hash}")
    return Replay(new, new_momentum, tuple(problems))


def _compare_choices(record: RoundManifest, rows: Sequence[Delta]) -> list[str]:
    told = record.choices
    tokens = [s.tokens for s in record.submissions]
    late = [s.staleness for s in record.submissions]
    again = choose(rows, tokens, float.fromhex(told.eta), float.fromhex(told.mu), late)
    problems = [
        f"the recorded {name} is {getattr(told, name)!r}, not {getattr(again, name)!r}"
        for name in ("rule", "order", "equal", "dropped")
        if getattr(told, name) != getattr(again, name)
    ]
    ours, theirs = map(_numbers, (again.weights, told.weights))
    if len(ours) != len(theirs) or not np.allclose(ours, theirs, rtol=1e-6, atol=0):
        problems.append(f"the recorded weights are {theirs}, not {ours}")
    problems += [
        f"the delta of {s.task_id} says {r.header.tokens} tokens, not {s.tokens}"
        for s, r in zip(record.submissions, rows, strict=True)
        if r.header.tokens != s.tokens
    ]
    problems += [
        f"the delta of {s.task_id} starts from version {r.header.base_version}, not "
        f"{record.base_version - s.staleness}"
        for s, r in zip(record.submissions, rows, strict=True)
        if r.header.base_version != record.base_version - s.staleness
    ]
    return problems


def _numbers(texts: Sequence[str]) -> list[float]:
    return [float.fromhex(t) for t in texts]


class _HashSink:
    """Hashes results as they come, in order: for one thread."""

    def __init__(self, manifest: ParameterManifest) -> None:
        self._theta = {t.name: hashlib.sha256() for t in manifest.tensors}
        self._momentum = {t.name: hashlib.sha256() for t in trainable(manifest).tensors}

    def targets(self, spec: TensorSpec, start: int, stop: int) -> Targets:
        return Targets()

    def done(
        self, spec: TensorSpec, start: int, theta: Floats, momentum: Floats | None, update: Floats
    ) -> None:
        self.plain(spec, start, theta)
        if momentum is not None:
            self._momentum[spec.name].update(_bytes(momentum))

    def plain(self, spec: TensorSpec, start: int, values: NDArray[Any]) -> None:
        self._theta[spec.name].update(_bytes(values))

    def hash_theta(self, manifest: ParameterManifest) -> str:
        return _combined(manifest, self._theta)

    def hash_momentum(self, manifest: ParameterManifest) -> str:
        return _combined(manifest, self._momentum)


def _combined(manifest: ParameterManifest, hashes: dict[str, Any]) -> str:
    return combined_hash(
        TensorHash(t.name, t.dtype, t.shape, hashes[t.name].hexdigest()) for t in manifest.tensors
    )


def _bytes(values: NDArray[Any]) -> memoryview:
    return flat(values).view(np.uint8).data
