"""The way down: what of an outer update is sent, and what is kept for the next one (A3).

Per element of a trainable tensor or float buffer, in fp32, each line one rounding::

    u'     = u + kept          u: the exact outer update (``kernel``)
    sent   = decoded(encoded(u'))
    theta' = theta - sent
    kept'  = u' - sent

Orchestrator and nodes apply the same ``sent``, so that all canonical copies stay equal, bit for
bit. Encoding makes the same bytes on any machine (``codecs``), so a replay does too.
"""

from __future__ import annotations

import mmap
import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any, Protocol, Self

import numpy as np
from numpy.typing import NDArray

from distribai.core.tensors import ParameterManifest, TensorSpec
from distribai.errors import Integrity
from distribai.merge.codecs import Reader, codec
from distribai.merge.feedback import passing
from distribai.merge.kernel import CHUNK, Crew, Floats, Scratch, Targets, check_arithmetic
from distribai.merge.tensorfile import Pages, TensorFile
from distribai.merge.weights import Weights, all_finite, flat


class Exact:
    """Room for one round's exact outer update, in a file without a name: a context manager.

    ``arrays`` are flat, by tensor name.

    Raises:
        OSError: there is no room.
    """

    def __init__(self, manifest: ParameterManifest, folder: Path) -> None:
        specs = passing(manifest).tensors
        size = 4 * sum(t.size for t in specs)
        self._file = tempfile.TemporaryFile(dir=folder)  # noqa: SIM115 - closed by __exit__
        self._file.truncate(max(4, size))
        mapping = mmap.mmap(self._file.fileno(), max(4, size))
        self._pages = Pages(mapping)
        self.arrays: Weights = {}
        self._begin: dict[str, int] = {}
        begin = 0
        for spec in specs:
            self.arrays[spec.name] = np.frombuffer(mapping, np.float32, spec.size, begin)
            self._begin[spec.name] = begin
            begin += 4 * spec.size

    def release(self, spec: TensorSpec, start: int, stop: int) -> None:
        """Let the pages of elements ``start <= i < stop`` leave this process's memory; what they
        hold stays in the file."""
        begin = self._begin[spec.name]
        self._pages.release(begin + 4 * start, begin + 4 * stop)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.arrays.clear()
        self._file.close()


class Rest(Protocol):
    """Where what needs no encoding goes."""

    def momentum(self, spec: TensorSpec, start: int, values: Floats | None) -> None:
        """New momentum: elements ``start, start + 1, ...``; None for a float buffer."""
        ...

    def plain(self, spec: TensorSpec, start: int, values: NDArray[Any]) -> None:
        """As :meth:`distribai.merge.kernel.Sink.plain`."""
        ...


@dataclass(frozen=True, slots=True)
class ExactSink:
    """A :class:`distribai.merge.kernel.Sink` in which the exact update waits until all of a tensor
    is there, to be encoded; everything else goes on to ``rest``."""

    rest: Rest
    exact: Exact

    def targets(self, spec: TensorSpec, start: int, stop: int) -> Targets:
        """The update's place; the rest has none."""
        return Targets(update=self.exact.arrays[spec.name][start:stop])

    def done(
        self, spec: TensorSpec, start: int, theta: Floats, momentum: Floats | None, update: Floats
    ) -> None:
        """A chunk is computed."""
        self.rest.momentum(spec, start, momentum)
        self.exact.release(spec, start, start + update.size)

    def plain(self, spec: TensorSpec, start: int, values: NDArray[Any]) -> None:
        """What passes no codec."""
        self.rest.plain(spec, start, values)


class Sink(Protocol):
    """Where what :func:`send_down` makes goes, tensor by tensor; with one thread elements ascend,
    with several they come in any order, none twice."""

    def stored(self, name: str, values: NDArray[Any]) -> None:
        """A stored array of the encoded update, whole."""
        ...

    def theta(self, spec: TensorSpec, start: int, values: Floats) -> None:
        """New weights: elements ``start, start + 1, ...``."""
        ...

    def kept(self, spec: TensorSpec, start: int, values: Floats) -> None:
        """What was not sent: elements ``start, start + 1, ...``."""
        ...


def is_exact(name: str, has_feedback: bool) -> bool:
    """Whether a codec sends the exact update, so that nothing has to be encoded and kept."""
    return name == "fp32" and not has_feedback


def send_down(
    manifest: ParameterManifest,
    theta: Weights,
    exact: Exact,
    kept: TensorFile | None,
    name: str,
    sink: Sink,
    release: Callable[[TensorSpec, int, int], None] = lambda spec, start, stop: None,
    threads: int = 1,
) -> None:
    """Encode an exact outer update and apply what is sent of it.

    Args:
        manifest: the model's.
        theta: canonical weights v.
        exact: the exact outer update; used up.
        kept: the residual of version v; None when nothing was kept.
        name: the codec.
        sink: takes the encoded update, weights v + 1, and what is kept now.
        release: gives back pages of theta.
        threads: how many to use; changes no bit. One alone encodes: what is around it takes longer.

    Raises:
        Integrity: ``tensor.nonfinite``: the update or the new weights hold NaN or infinity.
        InternalFault: this process's arithmetic is not IEEE.
    """
    check_arithmetic()
    how = codec(name)
    with Crew(threads) as crew:
        for spec in passing(manifest).tensors:
            u = exact.arrays[spec.name]
            _add_kept(crew, spec, u, kept)
            stored = how.encode(u)
            for suffix, part in stored.items():
                sink.stored(spec.name + suffix, part)
            shapes = {part.suffix: part.shape for part in how.parts(spec)}
            read = how.reader(spec, {s: part.reshape(shapes[s]) for s, part in stored.items()})
            _apply_sent(crew, spec, u, read, flat(theta[spec.name]), sink)
            exact.release(spec, 0, spec.size)
            release(spec, 0, spec.size)


def _add_kept(crew: Crew, spec: TensorSpec, u: Floats, kept: TensorFile | None) -> None:
    def add(scratch: Scratch, start: int) -> None:
        here = u[start : start + CHUNK]
        if kept is not None:
            old = kept.arrays[spec.name].reshape(-1)[start : start + CHUNK]
            np.add(here, old, here)
            kept.release(spec.name, start, start + here.size)
        if not all_finite(here):
            raise not_finite(spec)

    crew.each(add, range(0, spec.size, CHUNK))


def _apply_sent(
    crew: Crew, spec: TensorSpec, u: Floats, read: Reader, theta: Floats, sink: Sink
) -> None:
    def apply(scratch: Scratch, start: int) -> None:
        stop = min(start + CHUNK, spec.size)
        here, new = u[start:stop], scratch.theta[: stop - start]
        sent = read(start, stop, scratch.t[: stop - start])
        with np.errstate(all="ignore"):
            np.subtract(theta[start:stop], sent, new)
            np.subtract(here, sent, here)
        if not all_finite(new):
            raise not_finite(spec)
        sink.theta(spec, start, new)
        sink.kept(spec, start, here)

    crew.each(apply, range(0, spec.size, CHUNK))


def not_finite(spec: TensorSpec) -> Integrity:
    """What to raise where a merge makes no weights."""
    return Integrity(
        "tensor.nonfinite",
        f"The merged {spec.name!r} would hold NaN or infinity.",
        "Look at the submissions of this round; lower the learning rate.",
    )
