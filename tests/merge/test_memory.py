"""Merging takes the same memory whatever the number of deltas."""

import tracemalloc
from pathlib import Path

import numpy as np
import pytest

from distribai.core.tensors import ParameterManifest, TensorSpec
from distribai.merge import kernel
from distribai.merge.outer import UpdateHeader, merge_files
from distribai.merge.version0 import make_version0
from distribai.merge.weights import write_weights
from tests.merge.support import stored_delta

BIG = ParameterManifest((TensorSpec("x", (512, 1024)), TensorSpec("y", (100_000,))))


def peak(folder: Path, count: int) -> int:
    base = make_version0(BIG, 0)
    write_weights(folder / "w", BIG, base)
    rng = np.random.default_rng(0)
    local = {n: a + rng.standard_normal(a.shape).astype(np.float32) for n, a in base.items()}
    deltas = [stored_delta(folder, BIG, base, local, f"t{k}") for k in range(count)]
    tracemalloc.start()
    merge_files(
        BIG,
        folder / "w",
        None,
        deltas,
        list(range(1, count + 1)),
        1.0,
        0.5,
        out_theta=folder / "w1",
        out_momentum=folder / "m1",
        out_update=folder / "u1",
        header=UpdateHeader("j", 1, BIG.hash, "fp32"),
        threads=1,
    )
    found = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    return found


def test_memory_is_flat_in_the_number_of_deltas(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(kernel, "CHUNK", 4096)
    monkeypatch.setattr(kernel, "SPAN", 4 * 4096)
    peaks = []
    for count in (4, 32):
        (tmp_path / str(count)).mkdir()
        peaks.append(peak(tmp_path / str(count), count))
    one_delta = sum(t.nbytes for t in BIG.tensors)
    assert peaks[1] < peaks[0] + 0.05 * one_delta
    assert peaks[1] < one_delta
