"""Version and round manifests: how a model came to be, replayable by anybody (promise 4).

Plain frozen dataclasses; ``core.plain`` turns them into canonical JSON and its fingerprint. The
chain of round manifests from version 0 on is the lineage of a version.
"""

from __future__ import annotations

import hashlib
import tempfile
from collections.abc import Mapping, Sequence
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
from distribai.merge.down import Exact, ExactSink, is_exact, send_down
from distribai.merge.feedback import open_residual, passing
from distribai.merge.kernel import Floats, Targets, walk
from distribai.merge.update import open_update
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
    round had no momentum before it. ``codec_down`` is what its update is encoded in;
    ``base_residual_hash`` and ``residual_hash`` are of what that leg kept before and keeps now,
    empty when it keeps nothing.
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
    codec_down: str = "fp32"
    base_residual_hash: str = ""
    residual_hash: str = ""


@dataclass(frozen=True, slots=True)
class Replay:
    """Verdict of a replay; ``problems`` say in words what does not fit."""

    weights_hash: str
    momentum_hash: str
    problems: tuple[str, ...]
    residual_hash: str = ""

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
    *,
    residual: Path | None = None,
    update: Path | None = None,
) -> Replay:
    """Compute a round again from its files and compare, bit for bit; leaves nothing behind.

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
        residual: what the way down had kept at the base version; None if nothing.
        update: the encoded update that the round made, to be compared; None: it is not.

    Raises:
        Integrity: a file is malformed or belongs to another model.
        ValueError: a delta is missing or superfluous.
        OSError: there is no room for the exact update, in the system's temporary directory.
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
    kept = None if residual is None else open_residual(residual, manifest)
    found = "" if kept is None else weights_hash(passing(manifest), dict(kept.arrays))
    if found != record.base_residual_hash:
        problems.append(f"the base residual hashes to {found!r}, not {record.base_residual_hash!r}")
    if problems:
        return Replay("", "", tuple(problems))
    sink = _HashSink(manifest, None if update is None else _stored(update, manifest, record))
    inputs = make_inputs(manifest, base, base_momentum, rows, record.choices)
    if is_exact(record.codec_down, bool(record.residual_hash)):
        walk(inputs, sink, threads=1)
    else:
        with Exact(manifest, Path(tempfile.gettempdir())) as exact:
            walk(inputs, ExactSink(sink, exact), threads=1)
            send_down(manifest, base, exact, kept, record.codec_down, sink)
    for what, again, told in (
        ("weights hash", weights := sink.hash_of(manifest, sink.weights), record.weights_hash),
        ("momentum hashes", mass := sink.hash_of(momentum_of, sink.momenta), record.momentum_hash),
        (
            "residual hashes",
            rest := sink.hash_of(passing(manifest), sink.rests) if record.residual_hash else "",
            record.residual_hash,
        ),
    ):
        if again != told:
            problems.append(f"the new {what} to {again}, not {told}")
    problems += sorted(f"the update's {name!r} is another one" for name in sink.differing)
    return Replay(weights, mass, tuple(problems), rest)


def _stored(path: Path, manifest: ParameterManifest, record: RoundManifest) -> Mapping[str, Any]:
    claims: dict[str, str | int] = {
        "job_id": record.job_id,
        "version": record.round + 1,
        "codec": record.codec_down,
    }
    return open_update(path, manifest, claims).arrays


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
    """Hashes results as they come, in order, and compares the update: for one thread."""

    def __init__(self, manifest: ParameterManifest, update: Mapping[str, Any] | None) -> None:
        self.weights = {t.name: hashlib.sha256() for t in manifest.tensors}
        self.momenta = {t.name: hashlib.sha256() for t in trainable(manifest).tensors}
        self.rests = {t.name: hashlib.sha256() for t in passing(manifest).tensors}
        self.differing: set[str] = set()
        self._update = update

    def targets(self, spec: TensorSpec, start: int, stop: int) -> Targets:
        return Targets()

    def done(
        self, spec: TensorSpec, start: int, theta: Floats, momentum: Floats | None, update: Floats
    ) -> None:
        self.theta(spec, start, theta)
        self.momentum(spec, start, momentum)
        self._compare(spec.name, start, update)

    def momentum(self, spec: TensorSpec, start: int, values: Floats | None) -> None:
        if values is not None:
            self.momenta[spec.name].update(_bytes(values))

    def plain(self, spec: TensorSpec, start: int, values: NDArray[Any]) -> None:
        self.weights[spec.name].update(_bytes(values))
        if spec.role != "frozen":
            self._compare(spec.name, start, values)

    def stored(self, name: str, values: NDArray[Any]) -> None:
        self._compare(name, 0, values)

    def theta(self, spec: TensorSpec, start: int, values: Floats) -> None:
        self.weights[spec.name].update(_bytes(values))

    def kept(self, spec: TensorSpec, start: int, values: Floats) -> None:
        self.rests[spec.name].update(_bytes(values))

    def hash_of(self, manifest: ParameterManifest, hashes: dict[str, Any]) -> str:
        return _combined(manifest, hashes)

    def _compare(self, name: str, start: int, values: NDArray[Any]) -> None:
        if self._update is None:
            return
        told = self._update[name].reshape(-1)[start : start + values.size]
        if _bytes(told) != _bytes(values):
            self.differing.add(name)


def _combined(manifest: ParameterManifest, hashes: dict[str, Any]) -> str:
    return combined_hash(
        TensorHash(t.name, t.dtype, t.shape, hashes[t.name].hexdigest()) for t in manifest.tensors
    )


def _bytes(values: NDArray[Any]) -> memoryview:
    return flat(values).view(np.uint8).data
