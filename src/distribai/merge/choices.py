"""The choices of a merge: every scalar that decides a bit, recorded exactly (A1)."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

from distribai.core.spec import OuterSpec
from distribai.core.tensors import ParameterManifest, TensorSpec
from distribai.errors import Conflict
from distribai.merge.delta import Delta
from distribai.merge.headers import require
from distribai.merge.kernel import Coefficients, Inputs
from distribai.merge.tensorfile import file_order
from distribai.merge.weights import Weights, check_weights, manifest_hash, trainable, weights_layout


@dataclass(frozen=True, slots=True)
class MergeChoices:
    """What a merge decided, exactly: fp32 numbers as ``float.hex`` text.

    ``order`` are the task ids of the contributing rows as they were added, ``weights`` their
    shares (of tokens, less for late work: :func:`worth`), ``equal`` whether the plain sum was
    scaled once instead, ``dropped`` the task ids of rows without tokens.
    """

    order: tuple[str, ...]
    weights: tuple[str, ...]
    equal: bool
    eta: str
    mu: str
    dropped: tuple[str, ...] = ()
    rule: str = "mean"


def outer_coefficients(
    spec: OuterSpec, round_number: int, from_trained: bool, rounds_left: int | None = None
) -> tuple[float, float]:
    """``(eta_r, mu_r)`` of a round (from 0): cold start as in A1, and its mirror image at the end.

    ``mu_r = mu q``, ``eta_r = 1 + (eta - 1) q`` with ``q = min(1, r/ramp, left/ending)``, computed
    in double precision and rounded to fp32 once; the floats returned are exactly those fp32
    numbers, and their ``hex()`` is what the round's manifest records. ``rounds_left`` come after
    this one: the last round of a job is a plain average, so that what is handed out does not
    overshoot (None: the end is not in sight). No ramp when the job started from trained weights;
    0 switches ramp or ending off.
    """
    ramp = 1.0 if from_trained or not spec.ramp else min(1.0, round_number / spec.ramp)
    if spec.ending and rounds_left is not None:
        ramp = min(ramp, max(0, rounds_left) / spec.ending)
    eta, mu = 1.0 + (spec.eta - 1.0) * ramp, spec.mu * ramp
    if ramp == 1.0:
        eta, mu = spec.eta, spec.mu
    return float(np.float32(eta)), float(np.float32(mu))


def worth(tokens: int, staleness: int) -> float:
    """What a row counts: its tokens times ``(1 + staleness)^-0.5`` (A6, arXiv:2401.09135).

    ``staleness`` is how many versions its base is behind the round's. Root and division are exact
    to the last bit on every machine, which a power need not be.
    """
    return tokens / math.sqrt(1.0 + staleness)


def choose(
    deltas: Sequence[Delta],
    tokens: Sequence[int],
    eta: float,
    mu: float,
    staleness: Sequence[int] = (),
) -> MergeChoices:
    """The choices of a weighted mean: ``w_k = fp32(worth_k / sum of worths)``.

    Args:
        deltas: the rows, in the order in which they are added.
        tokens: of each row; one without any is left out.
        eta: outer learning rate.
        mu: outer momentum.
        staleness: of each row, see :func:`worth`; empty when none of them is late.

    Raises:
        ValueError: ``tokens`` or ``staleness`` are not one non-negative number a row, or ``eta`` or
            ``mu`` is not a fp32 number.
        Conflict: ``merge.empty``: no row has tokens; the caller makes no version.
    """
    if len(tokens) != len(deltas) or any(n < 0 for n in tokens):
        raise ValueError("each delta has a number of tokens, none negative")
    late = staleness or [0] * len(deltas)
    if len(late) != len(deltas) or any(s < 0 for s in late):
        raise ValueError("each delta has a staleness, none negative")
    if float(np.float32(eta)) != eta or float(np.float32(mu)) != mu:
        raise ValueError("eta and mu are fp32 numbers")
    kept = [
        (d.header.task_id, worth(n, s)) for d, n, s in zip(deltas, tokens, late, strict=True) if n
    ]
    if not kept:
        raise Conflict("merge.empty", "No submission of this round carries tokens.")
    total = math.fsum(n for _, n in kept)
    return MergeChoices(
        order=tuple(task for task, _ in kept),
        weights=tuple(float(np.float32(n / total)).hex() for _, n in kept),
        equal=len({n for _, n in kept}) == 1,
        eta=float(eta).hex(),
        mu=float(mu).hex(),
        dropped=tuple(d.header.task_id for d, n in zip(deltas, tokens, strict=True) if not n),
    )


def make_inputs(
    manifest: ParameterManifest,
    theta: Weights,
    momentum: Weights | None,
    deltas: Sequence[Delta],
    choices: MergeChoices,
    release: Callable[[TensorSpec, int, int], None] = lambda spec, start, stop: None,
) -> Inputs:
    """The kernel's inputs for recorded choices, tensors in the order of a weights file.

    Raises:
        Integrity: ``tensor.manifest``: arrays or deltas of another model.
        ValueError: a task id of the choices has no delta, or more than one.
    """
    check_weights(manifest.tensors, theta)
    if momentum is not None:
        check_weights(trainable(manifest).tensors, momentum)
    wanted, rows = manifest_hash(manifest), {}
    for delta in deltas:
        require(delta.header, {"manifest_hash": wanted})
        rows[delta.header.task_id] = delta.packed
    if len(rows) != len(deltas) or not rows.keys() >= set(choices.order):
        raise ValueError("each task of a merge has exactly one delta")
    specs = {t.name: t for t in manifest.tensors}
    return Inputs(
        specs=[specs[name] for name in file_order(weights_layout(manifest))],
        theta=theta,
        momentum=momentum,
        rows=[rows[task] for task in choices.order],
        coefficients=Coefficients(
            tuple(_fp32(w) for w in choices.weights),
            choices.equal,
            _fp32(choices.eta),
            _fp32(choices.mu),
        ),
        release=release,
    )


def _fp32(text: str) -> np.float32:
    return np.float32(float.fromhex(text))
