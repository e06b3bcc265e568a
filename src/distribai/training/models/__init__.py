"""Torch halves of the model families: one file each, found by scanning this package.

A module offers ``NAME`` (that of its core half) and ``build(config) -> nn.Module``, whose
parameters and persistent buffers are exactly the core manifest's tensors.

Weights cross between the canonical side (numpy, by manifest) and the live side (torch) by *copying*
only: theta and theta_k never share storage (algorithms.md A1).
"""

from __future__ import annotations

from functools import cache
from types import ModuleType

import numpy as np
import torch
from torch import Tensor, nn

from distribai.core.architectures import config_from, manifest_of
from distribai.core.plain import Plain
from distribai.core.scan import modules
from distribai.core.tensors import ParameterManifest, TensorSpec
from distribai.errors import Integrity, InvalidSpec
from distribai.merge.weights import Weights


@cache
def families() -> dict[str, ModuleType]:
    """Every torch half by family name."""
    return {module.NAME: module for module in modules(__name__)}


class LiveModel:
    """A torch model bound to its parameter manifest.

    Args:
        model: its parameters and persistent buffers are the manifest's tensors.
        manifest: frozen tensors stop requiring gradients.

    Raises:
        Integrity: ``tensor.manifest``: a name or shape differs, or a tensor is missing.
    """

    def __init__(self, model: nn.Module, manifest: ParameterManifest) -> None:
        self.module = model
        self.manifest = manifest
        persistent = set(model.state_dict())
        tensors: dict[str, Tensor] = dict(model.named_parameters())
        tensors |= {n: b for n, b in model.named_buffers() if n in persistent}
        wanted = {t.name: t.shape for t in manifest.tensors}
        found = {n: tuple(t.shape) for n, t in tensors.items()}
        if wanted != found:
            odd = sorted(n for n in wanted.keys() | found.keys() if wanted.get(n) != found.get(n))
            raise Integrity(
                "tensor.manifest",
                f"The built model's tensor {odd[0]!r} has shape {found.get(odd[0])}, "
                f"the manifest says {wanted.get(odd[0])}.",
            )
        self._tensors = {t.name: tensors[t.name] for t in manifest.tensors}
        for spec in manifest.tensors:
            if spec.role == "frozen":
                self._tensors[spec.name].requires_grad_(False)

    @torch.no_grad()
    def load(self, weights: Weights) -> None:
        """Copy canonical ``weights`` into the live tensors (rounding to the live dtype)."""
        for spec in self.manifest.tensors:
            self._tensors[spec.name].copy_(_from_canonical(spec, weights[spec.name]))

    @torch.no_grad()
    def store(self, base: Weights) -> Weights:
        """New canonical arrays of what travels, after training that began by loading ``base``.

        A live tensor of lower precision contributes its *change*: otherwise the rounding of
        ``base`` itself would look like training.
        """
        out: Weights = {}
        for spec in self.manifest.travelling:
            live = self._tensors[spec.name].detach()
            if spec.dtype == "F32" and live.dtype != torch.float32:
                start = _from_canonical(spec, base[spec.name])
                change = live.cpu().float() - start.to(live.dtype).float()
                out[spec.name] = (start + change).numpy()
            else:
                out[spec.name] = _to_canonical(spec, live)
        return out

    def tensors(self) -> dict[str, Tensor]:
        """The live tensors themselves, by the manifest's names."""
        return self._tensors

    def buffers(self) -> list[Tensor]:
        """Live tensors that a forward pass may change."""
        kinds = ("float_buffer", "int_buffer")
        return [self._tensors[t.name] for t in self.manifest.tensors if t.role in kinds]


def build(family: str, config: Plain, device: str = "cpu") -> LiveModel:
    """A model of ``family`` with the knobs ``config``, on ``device``, with meaningless weights.

    Raises:
        InvalidSpec: no such family here, or impossible knobs.
    """
    manifest = manifest_of(family, config)
    if family not in families():
        raise InvalidSpec(
            "spec.model",
            f"Model family {family!r} cannot be trained by this version.",
            f"Families: {', '.join(families())}.",
            field="model.family",
        )
    module: nn.Module = families()[family].build(config_from(family, config))
    return LiveModel(module.to(device), manifest)


def _from_canonical(spec: TensorSpec, array: np.ndarray) -> Tensor:
    """A CPU tensor over a copy of ``array``: canonical arrays may be read-only maps."""
    value = np.array(array, order="C", copy=True)
    if spec.dtype == "BF16":
        return torch.from_numpy(value.view(np.int16)).view(torch.bfloat16)
    return torch.from_numpy(value)


def _to_canonical(spec: TensorSpec, live: Tensor) -> np.ndarray:
    if spec.dtype == "BF16":
        bits = live.to(torch.bfloat16).cpu().contiguous().view(torch.int16)
        return bits.numpy().view(np.uint16).copy()
    kind = {"F32": torch.float32, "I64": torch.int64}[spec.dtype]
    return live.to(kind).cpu().contiguous().numpy().copy()
