"""Inner optimizers: AdamW for everything, or Muon for the hidden matrices and AdamW for the rest.

Muon (K. Jordan, https://kellerjordan.github.io/posts/muon/, 2024; inside DiLoCo: arXiv:2505.23725)
replaces a matrix's averaged gradient by its nearest semi-orthogonal matrix::

    M <- beta M + (1 - beta) G                    # momentum, in the gradient's scale
    U  = orthogonalize((1 - beta) G + beta M)     # Nesterov
    W <- (1 - lr wd) W - lr sqrt(max(1, rows / columns)) U

``torch.optim.Muon`` does the same one matrix after the other in bfloat16, which a CPU without bf16
instructions runs about 25 times slower than the batched fp32 of :class:`Muon` here (measured:
467 ms against 18 ms a step for profile ``tiny`` on one AVX2 core); elsewhere the results agree.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Iterable, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from distribai.core.architectures import config_from, family
from distribai.core.plain import Plain
from distribai.core.spec import OptimizerSpec

NEWTON_SCHULZ = (3.4445, -4.7750, 2.0315)
"""Coefficients of the quintic step, chosen by K. Jordan for the steepest slope at zero."""

NEWTON_SCHULZ_STEPS = 5
"""Iterations; singular values then lie within about 0.7 to 1.2 (same source)."""

NORM_FLOOR = 1e-7
"""Smallest norm divided by: a zero gradient stays zero."""


def orthogonalize(x: Tensor) -> Tensor:
    """Nearest semi-orthogonal matrices, roughly, of a batch (n, rows, columns), rows <= columns.

    Computed in ``x``'s dtype; a new tensor of the same shape. All singular values of a full-rank
    matrix come out near 1, those of a zero matrix stay 0.
    """
    x = x / torch.linalg.vector_norm(x, dim=(-2, -1), keepdim=True).clamp_(min=NORM_FLOOR)
    if x.dtype == torch.float32 and x.shape[-1] >= 2 * x.shape[-2]:
        return _orthogonalize_wide(x)
    a, b, c = NEWTON_SCHULZ
    for _ in range(NEWTON_SCHULZ_STEPS):
        gram = x @ x.mT
        x = torch.baddbmm(x, torch.baddbmm(gram, gram, gram, beta=b, alpha=c), x, beta=a)
    return x


def _orthogonalize_wide(x: Tensor) -> Tensor:
    """The same iteration on the small square Gram matrix alone.

    Each step multiplies ``x`` from the left by a polynomial ``Q`` of its Gram matrix ``A``, whose
    own next value is ``Q A Q``; the product of all ``Q`` meets ``x`` once at the end. It takes a
    third less work for a SwiGLU's matrices; in fp32 the results differ by about 1e-5, in bf16 the
    squared condition would show.
    """
    a, b, c = NEWTON_SCHULZ
    gram = x @ x.mT
    product: Tensor | None = None
    for step in range(NEWTON_SCHULZ_STEPS):
        q = torch.baddbmm(gram, gram, gram, beta=b, alpha=c)
        q.diagonal(dim1=-2, dim2=-1).add_(a)
        product = q if product is None else q @ product
        if step < NEWTON_SCHULZ_STEPS - 1:
            gram = q @ gram @ q
    return x if product is None else product @ x


class Muon(torch.optim.Optimizer):
    """Muon over matrices, batched over those of one shape (a tall matrix counts as its transpose).

    Args:
        params: matrices (2-D).
        lr: step of a square matrix; the spectral norm of an update.
        momentum: beta above.
        weight_decay: decoupled, times ``lr``.
        dtype: of the orthogonalisation; bf16 pays only where the device computes in it.

    Raises:
        ValueError: a parameter is not 2-D.
    """

    def __init__(
        self,
        params: Iterable[nn.Parameter],
        *,
        lr: float,
        momentum: float = 0.95,
        weight_decay: float = 0.0,
        dtype: torch.dtype = torch.float32,
    ) -> None:
        super().__init__(params, {"lr": lr, "momentum": momentum, "weight_decay": weight_decay})
        self._dtype = dtype
        for group in self.param_groups:
            if any(p.ndim != 2 for p in group["params"]):
                raise ValueError("Muon takes matrices only")

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> None:  # type: ignore[override]
        """One step over every parameter that has a gradient; ``closure`` is not supported.

        Raises:
            ValueError: a closure was given.
        """
        if closure is not None:
            raise ValueError("Muon takes no closure")
        for group in self.param_groups:
            buckets: dict[tuple[int, ...], list[nn.Parameter]] = {}
            for p in group["params"]:
                if p.grad is not None:
                    buckets.setdefault(tuple(sorted(p.shape)), []).append(p)
            for bucket in buckets.values():
                self._step_bucket(bucket, group)

    def _step_bucket(self, params: list[nn.Parameter], group: dict[str, Any]) -> None:
        lr, beta, decay = group["lr"], group["momentum"], group["weight_decay"]
        for p in params:
            if not self.state[p]:
                self.state[p]["momentum"] = torch.zeros_like(p)
        grads = [p.grad for p in params if p.grad is not None]
        buffers = [self.state[p]["momentum"] for p in params]
        torch._foreach_lerp_(buffers, grads, 1 - beta)
        mixed = torch._foreach_lerp(grads, buffers, beta)
        wide = torch.stack([m if m.shape[0] <= m.shape[1] else m.mT for m in mixed])
        steps = orthogonalize(wide.to(self._dtype)).to(wide.dtype)
        if decay:
            torch._foreach_mul_([*params], 1 - lr * decay)
        for p, step in zip(params, steps, strict=True):
            rows, columns = p.shape
            if rows <= columns:
                p.add_(step, alpha=-lr)
            else:
                p.add_(step.mT, alpha=-lr * math.sqrt(rows / columns))


class InnerOptimizer:
    """What the inner loop sees: groups whose rates follow one schedule factor.

    Weight decay applies to tensors of two or more dimensions only: norms and biases have none.
    """

    def __init__(
        self, spec: OptimizerSpec, model: nn.Module, muon_names: Collection[str] = ()
    ) -> None:
        """``muon_names`` are the hidden matrices, used when ``spec.name`` is ``muon``."""
        named = [(n, p) for n, p in model.named_parameters() if p.requires_grad]
        taken = set(muon_names) if spec.name == "muon" else set()
        muon = [p for n, p in named if n in taken]
        rest = [p for n, p in named if n not in taken]
        device = next((p.device.type for _, p in named), "cpu")
        self.parameters: list[nn.Parameter] = [p for _, p in named]
        self._names: dict[Tensor, str] = {p: n for n, p in named}
        self._optimizers: list[torch.optim.Optimizer] = []
        if muon:
            self._optimizers.append(
                Muon(
                    muon,
                    lr=spec.muon_lr,
                    momentum=spec.muon_momentum,
                    weight_decay=spec.weight_decay,
                    dtype=torch.bfloat16 if device == "cuda" else torch.float32,
                )
            )
        groups = [
            {"params": [p for p in rest if p.ndim >= 2], "weight_decay": spec.weight_decay},
            {"params": [p for p in rest if p.ndim < 2], "weight_decay": 0.0},
        ]
        groups = [g for g in groups if g["params"]]
        if groups:
            beta1, beta2 = spec.betas
            self._optimizers.append(
                torch.optim.AdamW(
                    groups, lr=spec.lr, betas=(beta1, beta2), eps=spec.eps, fused=True
                )
            )
        self._peaks = [[g["lr"] for g in o.param_groups] for o in self._optimizers]

    def set_factor(self, factor: float) -> None:
        """Every group's rate becomes its peak times ``factor``."""
        for optimizer, peaks in zip(self._optimizers, self._peaks, strict=True):
            for group, peak in zip(optimizer.param_groups, peaks, strict=True):
                group["lr"] = peak * factor

    def zero_grad(self) -> None:
        """Forget gradients."""
        for optimizer in self._optimizers:
            optimizer.zero_grad(set_to_none=True)

    def step(self) -> None:
        """One step of each."""
        for optimizer in self._optimizers:
            optimizer.step()

    def reset(self) -> None:
        """Fresh moments, as if nothing had been trained yet."""
        for optimizer in self._optimizers:
            optimizer.state.clear()

    def state(self) -> dict[str, Tensor]:
        """The optimizer's own tensors, moments and step counts, named ``<what>/<parameter>``."""
        return {
            f"{what}/{self._names[p]}": value
            for optimizer in self._optimizers
            for p, values in optimizer.state.items()
            for what, value in values.items()
        }

    def load_state(self, tensors: Mapping[str, Tensor]) -> None:
        """Go on with exactly the moments and step counts that :meth:`state` gave.

        Raises:
            ValueError: a name or shape is not one of this optimizer; nothing has changed then.
        """
        places: dict[str, tuple[torch.optim.Optimizer, nn.Parameter]] = {
            self._names[p]: (optimizer, p)
            for optimizer in self._optimizers
            for group in optimizer.param_groups
            for p in group["params"]
        }
        found: list[tuple[torch.optim.Optimizer, nn.Parameter, str, Tensor]] = []
        for name, value in tensors.items():
            what, _, parameter = name.partition("/")
            optimizer, p = places.get(parameter, (None, None))
            known = ("momentum",) if isinstance(optimizer, Muon) else _ADAM_STATE
            if optimizer is None or p is None or what not in known:
                raise ValueError(f"the optimizer has no {name}")
            if value.shape != (() if what == "step" else p.shape):
                raise ValueError(f"{name} has the shape {tuple(value.shape)}")
            found.append((optimizer, p, what, value))
        self.reset()
        for optimizer, p, what, value in found:
            dtype = torch.float32 if what == "step" else p.dtype
            optimizer.state[p][what] = value.to(p.device, dtype, copy=True)


_ADAM_STATE = ("step", "exp_avg", "exp_avg_sq")


def muon_names(family_name: str, config: Plain) -> frozenset[str]:
    """The tensors that Muon takes in a model of ``family_name`` with the knobs ``config``.

    Raises:
        InvalidSpec: no such family, or impossible knobs.
    """
    names: frozenset[str] = family(family_name).hidden_matrices(config_from(family_name, config))
    return names
