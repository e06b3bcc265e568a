"""The mean and the outer step, walked in cache-size chunks in one written order (A1).

Per element of a trainable tensor, all in fp32, each line one rounding per operation::

    equal weights:  g = ((d_1 + d_2) + d_3 ...) ; g = g * (1/K)
    otherwise:      g = d_1 * w_1 ; then for each further row  t = d_k * w_k ; g = g + t
    m' = m * mu ; m' = m' + g                      first round: m' = g
    u  = m' * mu ; u = g + u ; u = u * eta
    theta' = theta - u

A float buffer takes ``u = g`` and has no momentum; an integer buffer the maximum of the rows'
values; a frozen tensor stays. No operation depends on where a chunk begins or on how many threads
run, so neither changes a bit.

Memory: scratch of four chunks per thread. The mapped pages of a row's chunk are released once it is
added, before those of the next row but one are touched, so what is resident does not grow with the
number of rows.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from queue import SimpleQueue
from typing import Any, Protocol, Self, TypeVar

import numpy as np
from numpy.typing import NDArray

from distribai.core.tensors import TensorSpec
from distribai.errors import InternalFault
from distribai.merge.codecs import Reader
from distribai.merge.packed import Packed
from distribai.merge.weights import Weights, flat

Floats = NDArray[np.float32]
Item = TypeVar("Item")

CHUNK = 131072
"""Elements at a time, a multiple of ``codecs.GRAIN``: accumulator and temporary take 512 KiB each,
which a third-level cache holds. Measured with ``python -m bench merge`` (2 cores, 512 KiB of second
and 32 MiB of third level): smaller chunks lose more to a numpy call's overhead (1 microsecond) and
to threads that wait for the interpreter's lock than they gain from a nearer cache."""
SPAN = 4 * CHUNK
"""Elements that one thread takes at a time, and after which it releases theta and momentum."""


@dataclass(frozen=True, slots=True)
class Coefficients:
    """Every scalar of a round, exactly as recorded. ``equal``: all ``weights`` are 1/K."""

    weights: tuple[np.float32, ...]
    equal: bool
    eta: np.float32
    mu: np.float32


class Scratch:
    """One thread's buffers: accumulator, temporary, and room for what a sink does not keep."""

    def __init__(self) -> None:
        self.g, self.t, self.theta, self.momentum = (_aligned(CHUNK) for _ in range(4))


class Crew:
    """Threads that share out what a round has to compute: a context manager.

    Args:
        threads: how many; with one the caller's own does everything, in order.
    """

    def __init__(self, threads: int) -> None:
        self._scratch: SimpleQueue[Scratch] = SimpleQueue()
        for _ in range(threads):
            self._scratch.put(Scratch())
        self._pool = ThreadPoolExecutor(threads, "merge") if threads > 1 else None

    def each(self, work: Callable[[Scratch, Item], None], items: Iterable[Item]) -> None:
        """Do ``work`` for each item, with a scratch that nobody else uses meanwhile; come back when
        all is done, or raise what one of them raised."""

        def one(item: Item) -> None:
            mine = self._scratch.get()
            try:
                work(mine, item)
            finally:
                self._scratch.put(mine)

        for _ in map(one, items) if self._pool is None else self._pool.map(one, items):
            pass  # a worker's exception is raised here

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        if self._pool is not None:
            self._pool.shutdown()


@dataclass(frozen=True, slots=True)
class Targets:
    """Flat arrays that one span's results are computed into, chunk by chunk.

    Each is as long as the span, or None: then that result goes into scratch, chunk by chunk, and
    only :meth:`Sink.done` sees it. ``momentum`` is not used for float buffers.
    """

    theta: Floats | None = None
    momentum: Floats | None = None
    update: Floats | None = None


class Sink(Protocol):
    """Where results go. Called from all threads, never twice for one element."""

    def targets(self, spec: TensorSpec, start: int, stop: int) -> Targets:
        """Where the elements ``start <= i < stop`` of a float tensor shall be written."""
        ...

    def done(
        self, spec: TensorSpec, start: int, theta: Floats, momentum: Floats | None, update: Floats
    ) -> None:
        """A chunk is computed: elements ``start, start + 1, ...`` of a float tensor.

        ``momentum`` is None for a float buffer.
        """
        ...

    def plain(self, spec: TensorSpec, start: int, values: NDArray[Any]) -> None:
        """New values of an integer buffer, or the old ones of a frozen tensor."""
        ...


@dataclass(frozen=True, slots=True)
class Inputs:
    """What a round is made of.

    ``momentum`` is None in the first round. ``rows`` are the contributors in their written order,
    as many as ``coefficients.weights``. ``release(spec, start, stop)`` gives back pages of theta
    and momentum.
    """

    specs: Sequence[TensorSpec]
    theta: Weights
    momentum: Weights | None
    rows: Sequence[Packed]
    coefficients: Coefficients
    release: Callable[[TensorSpec, int, int], None]


def check_arithmetic() -> None:
    """Make sure that this thread's fp32 arithmetic rounds to nearest and keeps subnormal numbers.

    Other code in the process can switch the processor to flush them to zero, which would change
    canonical bits silently.

    Raises:
        InternalFault: ``internal.fault``.
    """
    one, tiny = np.ones(16, np.float32), np.full(16, 2.0**-140, np.float32)
    # Compared as bits: the comparison itself would take a subnormal number for zero.
    kept = (tiny + tiny).view(np.uint32) == np.uint32(1 << 10)
    down, up = one + np.float32(2.0**-24), one + np.float32(1.5 * 2.0**-24)
    if not (kept & (down == 1) & (up > 1)).all():
        raise InternalFault(
            "internal.fault",
            "The processor flushes subnormal numbers to zero or does not round to nearest, "
            "so canonical weights cannot be computed in this process.",
        )


@dataclass(frozen=True, slots=True)
class _Row:
    """What one contributor has of a float tensor."""

    read: Reader
    release: Callable[[int, int], None]


@dataclass(frozen=True, slots=True)
class _Span:
    spec: TensorSpec
    start: int
    stop: int


def walk(inputs: Inputs, sink: Sink, threads: int) -> None:
    """Compute every tensor of a round into ``sink``.

    With one thread everything comes in order: tensors as in ``inputs.specs``, elements ascending.

    Raises:
        InternalFault: see :func:`check_arithmetic`.
    """
    check_arithmetic()
    spans = [
        _Span(spec, start, min(start + SPAN, spec.size))
        for spec in inputs.specs
        for start in range(0, spec.size, SPAN)
    ]
    with Crew(threads) as crew:
        crew.each(lambda scratch, span: _work(inputs, sink, scratch, span), spans)


def _work(inputs: Inputs, sink: Sink, scratch: Scratch, span: _Span) -> None:
    spec, start, stop = span.spec, span.start, span.stop
    if spec.role == "frozen":
        sink.plain(spec, start, flat(inputs.theta[spec.name])[start:stop])
    elif spec.role == "int_buffer":
        values = inputs.rows[0].integers(spec)[start:stop].copy()
        for row in inputs.rows:
            np.maximum(values, row.integers(spec)[start:stop], out=values)
            row.releaser(spec)(start, stop)
        sink.plain(spec, start, values)
    else:
        with np.errstate(all="ignore"):  # whoever publishes the result checks that it is finite
            _float_span(inputs, sink, scratch, span)
    inputs.release(spec, start, stop)


def _float_span(inputs: Inputs, sink: Sink, scratch: Scratch, span: _Span) -> None:
    spec, c = span.spec, inputs.coefficients
    trainable = spec.role == "trainable"
    # 0-d arrays: numpy converts a scalar object anew in every call, which costs as much as the
    # rest of the call's overhead.
    weights = [np.array(w) for w in c.weights]
    eta, mu = np.array(c.eta), np.array(c.mu)
    theta = flat(inputs.theta[spec.name])
    momentum = flat(inputs.momentum[spec.name]) if inputs.momentum and trainable else None
    targets = sink.targets(spec, span.start, span.stop)
    rows = [_Row(row.reader(spec), row.releaser(spec)) for row in inputs.rows]
    for lo in range(span.start, span.stop, CHUNK):
        hi = min(lo + CHUNK, span.stop)
        g, t = scratch.g[: hi - lo], scratch.t[: hi - lo]
        if c.equal:
            _plain_sum(rows, lo, hi, g, t)
            np.multiply(g, weights[0], g)
        else:
            _weighted_sum(rows, weights, lo, hi, g, t)
        here = slice(lo - span.start, hi - span.start)
        new = scratch.theta[: hi - lo] if targets.theta is None else targets.theta[here]
        u = t if targets.update is None else targets.update[here]
        m = None
        if not trainable:
            u[...] = g
        else:
            m = scratch.momentum[: hi - lo] if targets.momentum is None else targets.momentum[here]
            if momentum is None:
                m[...] = g
            else:
                np.multiply(momentum[lo:hi], mu, m)
                np.add(m, g, m)
            np.multiply(m, mu, u)
            np.add(g, u, u)
            np.multiply(u, eta, u)
        np.subtract(theta[lo:hi], u, new)
        sink.done(spec, lo, new, m, u)


def _plain_sum(rows: list[_Row], lo: int, hi: int, g: Floats, t: Floats) -> None:
    if len(rows) == 1:
        g[...] = rows[0].read(lo, hi, g)
    else:
        np.add(rows[0].read(lo, hi, g), rows[1].read(lo, hi, t), g)
    for row in rows[:2]:
        row.release(lo, hi)
    for row in rows[2:]:
        np.add(g, row.read(lo, hi, t), g)
        row.release(lo, hi)


def _weighted_sum(
    rows: list[_Row],
    weights: list[NDArray[np.float32]],
    lo: int,
    hi: int,
    g: Floats,
    t: Floats,
) -> None:
    np.multiply(rows[0].read(lo, hi, g), weights[0], g)
    rows[0].release(lo, hi)
    for row, weight in zip(rows[1:], weights[1:], strict=True):
        np.multiply(row.read(lo, hi, t), weight, t)
        np.add(g, t, g)
        row.release(lo, hi)


def _aligned(size: int) -> Floats:
    room = np.empty(size + 16, np.float32)
    first = -room.ctypes.data % 64 // 4
    return room[first : first + size]
