"""Merging takes the same memory whatever the number of deltas."""

import tracemalloc
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest

from distribai.core.tensors import ParameterManifest, TensorSpec
from distribai.merge import kernel
from distribai.merge.choices import choose, make_inputs
from distribai.merge.delta import Delta
from distribai.merge.kernel import Targets, walk
from distribai.merge.outer import UpdateHeader, merge_files
from distribai.merge.tensorfile import WINDOW
from distribai.merge.version0 import make_version0
from distribai.merge.weights import write_weights
from tests.merge.support import stored_delta

BIG = ParameterManifest((TensorSpec("x", (512, 1024)), TensorSpec("y", (100_000,))))


ROLLUP = Path("/proc/self/smaps_rollup")


def stored(folder: Path, count: int, codec: str = "fp32") -> Sequence[Delta]:
    base = make_version0(BIG, 0)
    write_weights(folder / "w", BIG, base)
    rng = np.random.default_rng(0)
    local = {n: a + rng.standard_normal(a.shape).astype(np.float32) for n, a in base.items()}
    return [stored_delta(folder, BIG, base, local, f"t{k}", codec=codec) for k in range(count)]


def peak(folder: Path, count: int) -> int:
    deltas = stored(folder, count)
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


def mapped() -> int:
    """Bytes of files' pages that are in this process's memory, counted page by page."""
    kb = {
        k: v.split()[0]
        for k, v in (line.split(":") for line in ROLLUP.read_text().splitlines()[1:])
    }
    return 1024 * (int(kb["Rss"]) - int(kb["Anonymous"]))


class Watch:
    """A sink that looks at memory whenever a chunk of all rows was added."""

    def __init__(self) -> None:
        self.most = 0

    def targets(self, spec: TensorSpec, start: int, stop: int) -> Targets:
        return Targets()

    def done(self, *chunk: object) -> None:
        self.most = max(self.most, mapped())

    def plain(self, *chunk: object) -> None: ...


@pytest.mark.skipif(not ROLLUP.exists(), reason="Linux counts mapped pages")
@pytest.mark.parametrize("codec", ["fp32", "int8"])
@pytest.mark.parametrize("weights", ["equal", "weighted"])
def test_no_more_than_two_rows_of_mapped_files_are_in_memory(
    tmp_path: Path, codec: str, weights: str
):
    deltas = stored(tmp_path, 32, codec)
    tokens = [1] * 32 if weights == "equal" else list(range(1, 33))
    inputs = make_inputs(BIG, make_version0(BIG, 0), None, deltas, choose(deltas, tokens, 1.0, 0.5))
    before, watch = mapped(), Watch()
    walk(inputs, watch, threads=1)
    # All of two rows' files would be 5 MB, and of all 32 at least 20.
    assert watch.most - before < 4 * WINDOW
