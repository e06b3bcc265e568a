"""How long an inner step takes on a device: what every step costs, and its operations.

A step launches kernels, orthogonalizes matrices where Muon is at work, and passes its tokens
forward and backward through the model::

    seconds = launches * launch_s + operations / rate
    operations = 6 * parameters * tokens + 200 * parameters + Muon's products

Launches, passes over the parameters and Muon's products are as many for one token as for a million,
so that a step of few tokens is by far not as much shorter as its tokens are fewer. Measured against
CPU seconds of real steps (one thread of an Intel Xeon, profiles ``tiny`` to ``base``, 1 to 2048
tokens a step): docs/explanation/planning.md.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

from distribai.core.architectures import config_from, family, manifest_of
from distribai.core.pace import FLOPS_PER_WEIGHT
from distribai.core.spec import JobSpec

LAUNCHES: Final = 100
"""Kernels of a step that do not depend on the model's size."""

LAUNCHES_PER_TENSOR: Final = 10.7
"""Kernels of a step for each tensor of the model, forward, backward and optimizer: 312 were counted
for the 20 tensors of ``tiny``, 408 for the 29 of ``small``."""

LAUNCH_S: Final = 2e-5
"""What a kernel costs a CPU before it does anything, Python and autograd included: what is left of
21 ms for one token of ``tiny`` when its operations are taken off, over its 312 kernels."""

GPU_LAUNCH_S: Final = 1e-5
"""The same of a GPU, whose host does nothing but launch: eager PyTorch is said to take 5 to 10
microseconds; not measured here."""

PASSES: Final = 200
"""Operations that would take as long as a step's passes over each parameter in memory: clearing and
clipping gradients, moments, weights. 36 ms for one token of ``base`` with AdamW, less its launches,
are 3 ns a parameter, at 78 GFLOP/s."""

NEWTON_SCHULZ: Final = 5
"""Iterations of Muon (``training.optimizers``)."""


@dataclass(frozen=True, slots=True)
class StepWork:
    """What one inner step of a job does: kernels, and floating-point operations."""

    launches: float
    operations: float

    def seconds(self, rate: float, device: str) -> float:
        """At ``rate`` operations a second on a device of that type (empty: taken to be a GPU)."""
        launch = LAUNCH_S if device == "cpu" else GPU_LAUNCH_S
        return self.launches * launch + self.operations / rate


@dataclass(frozen=True, slots=True)
class Reached:
    """A device took ``seconds`` for a step of ``work``, in an earlier job."""

    work: StepWork
    seconds: float


def step_work(spec: JobSpec) -> StepWork:
    """What a step of a job does.

    Raises:
        InvalidSpec: the architecture is not possible.
    """
    model = spec.model
    config = config_from(model.family, model.config)
    module, tensors = family(model.family), manifest_of(model.family, model.config).tensors
    tokens = spec.batch * spec.seq_len
    operations = float(module.parameters(config)) * (FLOPS_PER_WEIGHT * tokens + PASSES)
    if spec.optimizer.name == "muon":
        hidden = module.hidden_matrices(config)
        operations += sum(_orthogonalizing(t.shape) for t in tensors if t.name in hidden)
    return StepWork(LAUNCHES + LAUNCHES_PER_TENSOR * len(tensors), operations)


def seconds_after(
    known: Sequence[Reached], work: StepWork, rate: float, device: str
) -> float | None:
    """Seconds of a step of ``work`` on a device that reached ``known``; None: nothing.

    That of them whose step is nearest in seconds counts, the first of equal ones, times what the
    formula says that ``work`` takes over what it says of that step: ``rate`` only decides how much
    of either is launching.
    """

    def expected(of: StepWork) -> float:
        return of.seconds(rate, device)

    wanted = expected(work)
    if not known:
        return None
    near = min(known, key=lambda reached: abs(math.log(expected(reached.work) / wanted)))
    return near.seconds * wanted / expected(near.work)


def _orthogonalizing(shape: Sequence[int]) -> float:
    """Operations of Muon's iteration on one matrix: three products in each, or for a wide one those
    of its Gram matrix alone (``training.optimizers.orthogonalize``)."""
    m, n = float(min(shape)), float(max(shape))
    if n < 2 * m:
        return NEWTON_SCHULZ * (4 * m * m * n + 2 * m**3)
    squares = NEWTON_SCHULZ + 3 * (NEWTON_SCHULZ - 1)
    return 4 * m * m * n + 2 * m**3 * squares
