"""Which device trains, and in which precision: decided at run time, never at import."""

from __future__ import annotations

import contextlib
from typing import Literal

import torch

from distribai.errors import InvalidSpec

DeviceType = Literal["cuda", "mps", "cpu"]


def available() -> tuple[DeviceType, ...]:
    """Device types that torch can use here, best first; ``cpu`` is always last."""
    found: list[DeviceType] = []
    if torch.cuda.is_available():
        found.append("cuda")
    if torch.backends.mps.is_available():
        found.append("mps")
    return (*found, "cpu")


def described() -> tuple[dict[str, str], dict[str, int]]:
    """Names and memory (MiB) of accelerators by device type, where torch can tell."""
    if not torch.cuda.is_available():
        return {}, {}
    facts = torch.cuda.get_device_properties(0)
    return {"cuda": facts.name}, {"cuda": facts.total_memory // 2**20}


def choose(wanted: str) -> str:
    """The torch device for ``wanted``: ``any`` (the best here), a type, or ``cuda:1`` and such.

    Raises:
        InvalidSpec: ``spec.plan``: this machine has no such device.
    """
    here = available()
    if wanted in ("", "any"):
        return here[0]
    if wanted.split(":")[0] not in here:
        raise InvalidSpec(
            "spec.plan",
            f"The task wants device {wanted!r}; torch can use {', '.join(here)} here.",
            "Ask for `any`, or install torch for that device.",
            field="resources.device",
        )
    return wanted


def uses_bf16(device: str, precision: str) -> bool:
    """Whether forward and backward run under bf16 autocast.

    ``auto`` means bf16 where it pays: CUDA devices that compute in it. A CPU emulates it slowly
    unless it has AMX, so there it must be asked for.
    """
    if precision == "auto":
        return device.startswith("cuda") and torch.cuda.is_bf16_supported(False)
    return precision == "bf16"


def autocast(device: str, precision: str) -> contextlib.AbstractContextManager[object]:
    """The context of forward passes."""
    if uses_bf16(device, precision):
        return torch.autocast(device.split(":")[0], dtype=torch.bfloat16)
    return contextlib.nullcontext()
