"""A small model with every awkward tensor, and deltas of it."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np

from distribai.core.tensors import Init, ParameterManifest, TensorSpec
from distribai.merge.codecs import codec
from distribai.merge.delta import Delta, DeltaHeader, open_delta, write_delta
from distribai.merge.packed import Packed
from distribai.merge.version0 import make_version0
from distribai.merge.weights import Weights

UNIFORM = Init("uniform", std=0.05)

ODD = ParameterManifest(
    (
        TensorSpec("z.scalar", (), init=UNIFORM),
        TensorSpec("empty", (0,), init=UNIFORM),
        TensorSpec("one", (1,), init=UNIFORM),
        TensorSpec("column", (3, 1), init=UNIFORM),
        TensorSpec("prime", (67,), init=UNIFORM),
        TensorSpec("matrix", (64, 67), init=UNIFORM),
        TensorSpec("conv", (4, 3, 5, 7), init=UNIFORM),
        TensorSpec("bn.weight", (6,), init=Init("constant", value=1.0)),
        TensorSpec("bn.running_mean", (6,), role="float_buffer"),
        TensorSpec("bn.running_var", (6,), role="float_buffer", init=Init("constant", value=1.0)),
        TensorSpec("bn.num_batches_tracked", (), "I64", "int_buffer"),
        TensorSpec("frozen.half", (5, 3), "BF16", "frozen", UNIFORM),
        TensorSpec("frozen.full", (9,), "F32", "frozen", UNIFORM),
    )
)


def trained(manifest: ParameterManifest, base: Weights, seed: int, scale: float = 0.01) -> Weights:
    """What a node holds after some training from ``base``."""
    rng = np.random.default_rng(seed)
    local: Weights = {}
    for spec in manifest.travelling:
        if spec.role == "int_buffer":
            local[spec.name] = base[spec.name] + rng.integers(1, 50, spec.shape)
        else:
            step = rng.standard_normal(spec.shape).astype(np.float32) * np.float32(scale)
            local[spec.name] = base[spec.name] + step
    return local


def header(manifest: ParameterManifest, task: str = "t0", **fields: object) -> DeltaHeader:
    values: dict[str, object] = {
        "job_id": "j",
        "task_id": task,
        "attempt": 1,
        "base_version": 0,
        "manifest_hash": manifest.hash,
        "codec": "fp32",
        "tokens": 100,
        "steps": 5,
    }
    return DeltaHeader(**{**values, **fields})  # type: ignore[arg-type]


def stored_delta(
    folder: Path,
    manifest: ParameterManifest,
    base: Weights,
    local: Weights,
    task: str = "t0",
    **fields: object,
) -> Delta:
    told = header(manifest, task, **fields)
    path = folder / f"{task}.delta"
    write_delta(path, manifest, base, local, told)
    return open_delta(path, manifest, told)


def memory_delta(manifest: ParameterManifest, arrays: Weights, task: str = "t0") -> Delta:
    return Delta(header(manifest, task), Packed(codec("fp32"), arrays))


def deltas_of(manifest: ParameterManifest, base: Weights, seeds: Sequence[int]) -> list[Delta]:
    """In-memory deltas, as write_delta would make them."""
    rows = []
    for seed in seeds:
        local = trained(manifest, base, seed)
        arrays = {
            t.name: local[t.name]
            if t.role == "int_buffer"
            else np.asarray(base[t.name] - local[t.name])
            for t in manifest.travelling
        }
        rows.append(memory_delta(manifest, arrays, f"t{seed}"))
    return rows


def blank(manifest: ParameterManifest) -> tuple[Weights, Weights, Weights]:
    """Outputs theta, momentum, update, filled with something wrong."""
    theta = make_version0(manifest, 99)
    momentum = {
        t.name: np.full(t.shape, 7, np.float32) for t in manifest.tensors if t.role == "trainable"
    }
    update = {t.name: np.full_like(theta[t.name], 3) for t in manifest.travelling}
    return theta, momentum, update


def same(a: Weights, b: Weights) -> bool:
    """Whether two sets of arrays hold the same bytes."""
    return a.keys() == b.keys() and all(
        a[n].dtype == b[n].dtype and a[n].shape == b[n].shape and a[n].tobytes() == b[n].tobytes()
        for n in a
    )
