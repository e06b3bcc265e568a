"""The outer step of a round, on arrays and between files.

    g = sum_k w_k Delta_k / sum_k w_k ;  m = mu m + g ;  theta <- theta - eta (g + mu m)

(A1, arXiv:2311.08105; the exact order of operations is in ``kernel``.) Rows are added in the order
the caller gives: by the hash of the node's key. What was decided comes back as
:class:`MergeChoices` and goes into the round's manifest.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from numpy.typing import NDArray

from distribai.core.spec import BlobRef
from distribai.core.tensors import ParameterManifest, TensorSpec
from distribai.merge.choices import MergeChoices, choose, make_inputs, outer_coefficients
from distribai.merge.delta import Delta
from distribai.merge.down import Exact, ExactSink, is_exact, not_finite, send_down
from distribai.merge.feedback import Feedback, open_residual, passing, residual_writer
from distribai.merge.kernel import Floats, Targets, walk
from distribai.merge.tensorfile import TensorWriter, Written, open_tensors
from distribai.merge.update import UpdateHeader, apply_update, update_writer, write_update
from distribai.merge.weights import (
    TensorHash,
    Weights,
    all_finite,
    check_weights,
    combined_hash,
    flat,
    open_weights,
    trainable,
    weights_hash,
    weights_layout,
    write_weights,
)

__all__ = [
    "MergeChoices",
    "MergedFiles",
    "UpdateHeader",
    "apply_update",
    "choose",
    "merge_files",
    "merge_round",
    "momentum_hash",
    "open_momentum",
    "outer_coefficients",
    "write_momentum",
    "write_update",
]


@dataclass(frozen=True, slots=True)
class MergedFiles:
    """What :func:`merge_files` made; ``tensors`` are the new weights', in manifest order.

    ``residual`` is what the update's codec did not send, ``residual_hash`` its one hash; None and
    empty without error feedback.
    """

    theta: BlobRef
    momentum: BlobRef
    update: BlobRef
    tensors: tuple[TensorHash, ...]
    weights_hash: str
    momentum_hash: str
    choices: MergeChoices
    residual: BlobRef | None = None
    residual_hash: str = ""


def merge_round(
    manifest: ParameterManifest,
    theta: Weights,
    momentum: Weights | None,
    deltas: Sequence[Delta],
    weights: Sequence[int],
    eta: float,
    mu: float,
    out_theta: Weights,
    out_momentum: Weights,
    out_update: Weights | None = None,
    threads: int = 1,
    staleness: Sequence[int] = (),
) -> MergeChoices:
    """One round on arrays.

    Args:
        manifest: the model's.
        theta: canonical weights v.
        momentum: of the trainable tensors; None in the first round.
        deltas: in the order in which they are added; all made for this manifest.
        weights: tokens of each delta; a row of 0 is left out.
        eta: outer learning rate, a fp32 number (:func:`outer_coefficients`).
        mu: outer momentum, a fp32 number.
        out_theta: filled with v + 1; may be ``theta`` itself.
        out_momentum: filled; may be ``momentum`` itself.
        out_update: filled with ``u`` of float tensors and new values of integer buffers, if given.
        threads: how many to use; changes no bit.
        staleness: of each delta, see :func:`choose`.

    Raises:
        Conflict: ``merge.empty``.
        Integrity: ``tensor.manifest``: arrays or deltas of another model.
        ValueError: see :func:`choose`.
    """
    choices = choose(deltas, weights, eta, mu, staleness)
    check_weights(manifest.tensors, out_theta)
    check_weights(trainable(manifest).tensors, out_momentum)
    if out_update is not None:
        check_weights(manifest.travelling, out_update)
    inputs = make_inputs(manifest, theta, momentum, deltas, choices)
    walk(inputs, _ArraySink(out_theta, out_momentum, out_update), threads)
    return choices


def merge_files(
    manifest: ParameterManifest,
    theta: Path,
    momentum: Path | None,
    deltas: Sequence[Delta],
    weights: Sequence[int],
    eta: float,
    mu: float,
    *,
    out_theta: Path,
    out_momentum: Path,
    out_update: Path,
    header: UpdateHeader,
    threads: int = 1,
    staleness: Sequence[int] = (),
    feedback: Feedback | None = None,
) -> MergedFiles:
    """One round between files, with memory independent of the number of deltas, and of model size
    but for the encoded update of one tensor.

    Args:
        manifest: the model's.
        theta: weights file of version v.
        momentum: momentum file of version v; None in the first round.
        deltas: as opened, in the order in which they are added.
        weights: tokens of each delta; a row of 0 is left out.
        eta: see :func:`merge_round`.
        mu: see :func:`merge_round`.
        out_theta: where the weights file of v + 1 shall lie.
        out_momentum: where its momentum file shall lie.
        out_update: where the encoded update shall lie.
        header: of the update; ``version`` is v + 1. Its codec decides what is applied.
        threads: how many to use; changes no bit.
        staleness: of each delta, see :func:`choose`.
        feedback: residual of version v, and where that of v + 1 shall lie; None: no error feedback.

    Raises:
        Conflict: ``merge.empty``: no row has tokens. Nothing is written then, nor with any other
            error, except that after an OSError while finishing some of the files may be there.
        Integrity: ``tensor.format``, ``tensor.manifest``: files or deltas of another model;
            ``tensor.nonfinite``: the new weights would hold NaN or infinity.
        InvalidSpec: ``codec.unknown``.
        ValueError: see :func:`choose`.
        OSError: a file cannot be read or written.
    """
    choices = choose(deltas, weights, eta, mu, staleness)
    momentum_of = trainable(manifest)
    old = open_tensors(theta, weights_layout(manifest))
    old_momentum = None
    if momentum is not None:
        old_momentum = open_tensors(momentum, weights_layout(momentum_of))

    def release(spec: TensorSpec, start: int, stop: int) -> None:
        old.release(spec.name, start, stop)
        if old_momentum is not None and spec.role == "trainable":
            old_momentum.release(spec.name, start, stop)

    inputs = make_inputs(
        manifest,
        dict(old.arrays),
        None if old_momentum is None else dict(old_momentum.arrays),
        deltas,
        choices,
        release,
    )
    with ExitStack() as stack:
        out = _Files(
            stack.enter_context(TensorWriter(out_theta, weights_layout(manifest), {})),
            stack.enter_context(TensorWriter(out_momentum, weights_layout(momentum_of), {})),
            stack.enter_context(update_writer(out_update, manifest, header)),
            None
            if feedback is None
            else stack.enter_context(residual_writer(feedback.out, manifest)),
        )
        if is_exact(header.codec, feedback is not None):
            walk(inputs, _FileSink(out), threads)
        else:
            kept = None
            if feedback is not None and feedback.kept is not None:
                kept = open_residual(feedback.kept, manifest)
            exact = stack.enter_context(Exact(manifest, out_update.parent))
            walk(inputs, ExactSink(_FileSink(out), exact), threads)
            sink = _DownSink(out)
            send_down(manifest, inputs.theta, exact, kept, header.codec, sink, release, threads)
        written, written_momentum, update, rest = out.commit(threads)
    tensors = _hashes(manifest, written.tensors)
    return MergedFiles(
        theta=written.blob,
        momentum=written_momentum.blob,
        update=update.blob,
        tensors=tensors,
        weights_hash=combined_hash(tensors),
        momentum_hash=combined_hash(_hashes(momentum_of, written_momentum.tensors)),
        choices=choices,
        residual=None if rest is None else rest.blob,
        residual_hash=""
        if rest is None
        else combined_hash(_hashes(passing(manifest), rest.tensors)),
    )


def write_momentum(path: Path, manifest: ParameterManifest, momentum: Weights) -> BlobRef:
    """Write the outer momentum: one fp32 array a trainable tensor. Raises as ``write_weights``."""
    return write_weights(path, trainable(manifest), momentum)


def open_momentum(path: Path, manifest: ParameterManifest) -> Weights:
    """Memory-mapped, read-only momentum. Raises as ``open_weights``."""
    return open_weights(path, trainable(manifest))


def momentum_hash(manifest: ParameterManifest, momentum: Weights) -> str:
    """The one hash of a momentum. Raises as ``weights_hash``."""
    return weights_hash(trainable(manifest), momentum)


class _ArraySink:
    def __init__(self, theta: Weights, momentum: Weights, update: Weights | None) -> None:
        self._theta, self._momentum, self._update = theta, momentum, update

    def targets(self, spec: TensorSpec, start: int, stop: int) -> Targets:
        def part(arrays: Weights | None) -> Floats | None:
            found = None if arrays is None else arrays.get(spec.name)
            return None if found is None else flat(found)[start:stop]

        return Targets(part(self._theta), part(self._momentum), part(self._update))

    def done(
        self, spec: TensorSpec, start: int, theta: Floats, momentum: Floats | None, update: Floats
    ) -> None:
        pass  # computed in place

    def plain(self, spec: TensorSpec, start: int, values: NDArray[Any]) -> None:
        here = slice(start, start + values.size)
        flat(self._theta[spec.name])[here] = values
        if self._update is not None and spec.role != "frozen":
            flat(self._update[spec.name])[here] = values


@dataclass(frozen=True, slots=True)
class _Files:
    """What a merge writes; ``rest`` with error feedback."""

    theta: TensorWriter
    momentum: TensorWriter
    update: TensorWriter
    rest: TensorWriter | None

    def commit(self, threads: int) -> tuple[Written, Written, Written, Written | None]:
        """All of them; several at once, since hashing takes as long as computing what is in them.

        Raises:
            OSError: one cannot be finished.
        """
        writers = [w for w in (self.theta, self.momentum, self.update, self.rest) if w is not None]
        with ThreadPoolExecutor(threads, "merge") as pool:
            theta, momentum, update, *rest = pool.map(TensorWriter.commit, writers)
        return theta, momentum, update, rest[0] if rest else None


@dataclass(frozen=True, slots=True)
class _FileSink:
    """The exact update is sent and applied."""

    out: _Files

    def targets(self, spec: TensorSpec, start: int, stop: int) -> Targets:
        return Targets()

    def done(
        self, spec: TensorSpec, start: int, theta: Floats, momentum: Floats | None, update: Floats
    ) -> None:
        if not all_finite(theta):
            raise not_finite(spec)
        self.out.theta.write(spec.name, start, theta)
        self.momentum(spec, start, momentum)
        self.out.update.write(spec.name, start, update)

    def momentum(self, spec: TensorSpec, start: int, values: Floats | None) -> None:
        if values is not None:
            self.out.momentum.write(spec.name, start, values)

    def plain(self, spec: TensorSpec, start: int, values: NDArray[Any]) -> None:
        self.out.theta.write(spec.name, start, values)
        if spec.role != "frozen":
            self.out.update.write(spec.name, start, values)


@dataclass(frozen=True, slots=True)
class _DownSink:
    """The encoded update, and what comes of it."""

    out: _Files

    def stored(self, name: str, values: NDArray[Any]) -> None:
        self.out.update.write(name, 0, values)

    def theta(self, spec: TensorSpec, start: int, values: Floats) -> None:
        self.out.theta.write(spec.name, start, values)

    def kept(self, spec: TensorSpec, start: int, values: Floats) -> None:
        if self.out.rest is not None:
            self.out.rest.write(spec.name, start, values)


def _hashes(manifest: ParameterManifest, by_name: Mapping[str, str]) -> tuple[TensorHash, ...]:
    return tuple(TensorHash(t.name, t.dtype, t.shape, by_name[t.name]) for t in manifest.tensors)
