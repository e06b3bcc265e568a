"""Error feedback: what a codec did not send is kept, and goes with the next file (A3).

Per element of a trainable tensor or float buffer, in fp32, each operation rounded once::

    a  = kept ; a = a + lost_1 ; a = a + lost_2 ...   still owed (lost: sent, not merged)
    a  = a * beta ; a = a + values                    beta 1 is left out
    sent = decoded(encoded(a))
    kept' = a - sent

Both legs do this: a node with its deltas, and the orchestrator, with beta 1, with its updates.
A *residual* is a file of ``kept``: one fp32 array for each tensor that passes a codec.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from distribai.core.codecs import BETA
from distribai.core.tensors import ParameterManifest, TensorSpec
from distribai.errors import Integrity
from distribai.merge.codecs import Codec
from distribai.merge.kernel import CHUNK
from distribai.merge.packed import Packed
from distribai.merge.tensorfile import Layout, TensorFile, TensorWriter, open_tensors
from distribai.merge.weights import all_finite, manifest_hash

KIND = "distribai.residual.v1"


@dataclass(frozen=True, slots=True)
class Feedback:
    """Where a leg's error feedback lies: ``kept`` before (None: nothing was kept yet), and the file
    that the new one goes to."""

    kept: Path | None
    out: Path


def passing(manifest: ParameterManifest) -> ParameterManifest:
    """The tensors that pass a codec, and of which something is kept."""
    return ParameterManifest(tuple(t for t in manifest.travelling if t.role != "int_buffer"))


def residual_layout(manifest: ParameterManifest) -> Layout:
    """The tensors of a residual."""
    return {t.name: ("F32", t.shape) for t in passing(manifest).tensors}


def residual_writer(path: Path, manifest: ParameterManifest) -> TensorWriter:
    """A writer of a residual; the caller writes every tensor that passes a codec."""
    metadata = {"format": KIND, "manifest_hash": manifest_hash(manifest)}
    return TensorWriter(path, residual_layout(manifest), metadata)


def open_residual(path: Path, manifest: ParameterManifest) -> TensorFile:
    """Map a residual.

    Raises:
        Integrity: ``tensor.format`` or ``tensor.manifest``: no residual of this model.
        OSError: the file cannot be read.
    """

    def layout(metadata: Mapping[str, str]) -> Layout:
        if metadata != {"format": KIND, "manifest_hash": manifest_hash(manifest)}:
            raise Integrity("tensor.format", f"{path.name} is no residual of this model.")
        return residual_layout(manifest)

    return open_tensors(path, layout)


class Owed:
    """What earlier files of a leg owe: the residual, and what was sent and came to nothing.

    Args:
        kept: the residual, if there is one.
        lost: files that were sent and not merged.
        beta: what is kept of all that.
    """

    def __init__(self, kept: TensorFile | None, lost: tuple[Packed, ...], beta: float) -> None:
        self._kept, self._lost, self._beta = kept, lost, np.float32(beta)

    def add_to(self, spec: TensorSpec, values: NDArray[np.float32]) -> None:
        """Add what is owed of a tensor to ``values``, shape (size,), in place.

        Raises:
            Integrity: ``tensor.format``: a lost file is malformed; ``tensor.nonfinite``: the sum is
                NaN or infinite.
        """
        if self._kept is None and not self._lost:
            return
        owed, scratch = np.empty((2, min(CHUNK, values.size)), np.float32)
        with np.errstate(all="ignore"):  # the sum is judged below
            for start in range(0, values.size, CHUNK):
                stop = min(start + CHUNK, values.size)
                a, room = owed[: stop - start], scratch[: stop - start]
                if self._kept is None:
                    a[...] = 0
                else:
                    a[...] = self._kept.arrays[spec.name].reshape(-1)[start:stop]
                for file in self._lost:
                    np.add(a, file.reader(spec)(start, stop, room), a)
                if self._beta != 1:
                    np.multiply(a, self._beta, a)
                np.add(a, values[start:stop], values[start:stop])
        if not all_finite(values):
            raise Integrity(
                "tensor.nonfinite", f"What is owed of {spec.name!r} has grown to infinity or NaN."
            )
        if self._kept is not None:
            self._kept.release(spec.name, 0, spec.size)


def beta_of(codec: str) -> float:
    """What a codec keeps of its error feedback; one that needs none loses nothing of it."""
    return BETA.get(codec, 1.0)


def take_off(
    spec: TensorSpec,
    codec: Codec,
    stored: Mapping[str, NDArray[Any]],
    values: NDArray[np.float32],
) -> None:
    """Leave in ``values``, shape (size,), what the codec did not send of them.

    ``stored`` is what it made of them. With fp32 those are the very values, so write them first.
    """
    parts = {part.suffix: part for part in codec.parts(spec)}
    shaped = {suffix: array.reshape(parts[suffix].shape) for suffix, array in stored.items()}
    read, scratch = codec.reader(spec, shaped), np.empty(min(CHUNK, values.size), np.float32)
    for start in range(0, values.size, CHUNK):
        stop = min(start + CHUNK, values.size)
        here = values[start:stop]
        np.subtract(here, read(start, stop, scratch[: stop - start]), here)
