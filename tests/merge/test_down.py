"""The way down: what is sent is what everybody applies; what is not sent is kept."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from distribai.core.codecs import PARTS
from distribai.core.ranges import SampleRange
from distribai.core.spec import BlobRef, OuterSpec
from distribai.core.tensors import ParameterManifest, TensorSpec
from distribai.errors import Integrity
from distribai.merge.codecs import GRAIN, codec
from distribai.merge.delta import Delta
from distribai.merge.down import Exact, send_down
from distribai.merge.feedback import Feedback, open_residual, passing, residual_writer
from distribai.merge.kernel import Floats
from distribai.merge.manifests import AcceptedSubmission, RoundManifest, replay_round
from distribai.merge.outer import (
    MergedFiles,
    UpdateHeader,
    apply_update,
    merge_files,
    merge_round,
    outer_coefficients,
)
from distribai.merge.update import open_update
from distribai.merge.version0 import make_version0
from distribai.merge.weights import open_weights, weights_hash, write_weights
from tests.merge.support import ODD, blank, same, stored_delta, trained

TOKENS = [100, 90, 100]


class Grid:
    """The orchestrator's files of one job, version by version."""

    def __init__(self, folder: Path, feedback: bool = True) -> None:
        self.folder, self.feedback = folder, feedback
        folder.mkdir(exist_ok=True)
        write_weights(folder / "w0", ODD, make_version0(ODD, 5))
        self.made: list[MergedFiles] = []
        self.deltas: list[list[Delta]] = []

    def path(self, kind: str, version: int) -> Path:
        return self.folder / f"{kind}{version}"

    def merge(self, name: str, threads: int = 1) -> MergedFiles:
        v = len(self.made)
        base = open_weights(self.path("w", v), ODD)
        deltas = [
            stored_delta(self.folder, ODD, base, trained(ODD, base, 10 * v + k), f"t{v}-{k}",
                         tokens=n, base_version=v)
            for k, n in enumerate(TOKENS)
        ]  # fmt: skip
        eta, mu = outer_coefficients(OuterSpec(), v, False)
        feedback = None
        if self.feedback:
            feedback = Feedback(self.path("r", v) if v else None, self.path("r", v + 1))
        found = merge_files(
            ODD,
            self.path("w", v),
            self.path("m", v) if v else None,
            deltas,
            TOKENS,
            eta,
            mu,
            out_theta=self.path("w", v + 1),
            out_momentum=self.path("m", v + 1),
            out_update=self.path("u", v + 1),
            header=UpdateHeader("j", v + 1, ODD.hash, name),
            threads=threads,
            feedback=feedback,
        )
        self.made.append(found)
        self.deltas.append(deltas)
        return found

    def record(self, number: int, name: str) -> RoundManifest:
        made, before = self.made[number], self.made[number - 1] if number else None
        base = open_weights(self.path("w", number), ODD)
        return RoundManifest(
            job_id="j",
            round=number,
            manifest_hash=ODD.hash,
            base_version=number,
            base_hash=weights_hash(ODD, base),
            base_momentum_hash=before.momentum_hash if before else "",
            submissions=tuple(
                AcceptedSubmission(d.header.task_id, 1, "n", BlobRef("00", 1), n, 5,
                                   (SampleRange(k, k + 1),))
                for k, (d, n) in enumerate(zip(self.deltas[number], TOKENS, strict=True))
            ),
            choices=made.choices,
            weights_hash=made.weights_hash,
            momentum_hash=made.momentum_hash,
            codec_down=name,
            base_residual_hash=before.residual_hash if before else "",
            residual_hash=made.residual_hash,
        )  # fmt: skip

    def replay(self, number: int, record: RoundManifest) -> tuple[str, ...]:
        before = number and self.feedback
        return replay_round(
            ODD,
            record,
            self.path("w", number),
            self.path("m", number) if number else None,
            self.deltas[number],
            residual=self.path("r", number) if before else None,
            update=self.path("u", number + 1),
        ).problems


@pytest.mark.parametrize("name", PARTS)
@pytest.mark.parametrize("threads", [1, 3])
def test_nodes_that_apply_encoded_updates_stay_equal_to_the_orchestrator(
    name: str, threads: int, tmp_path: Path
) -> None:
    grid, held = Grid(tmp_path), make_version0(ODD, 5)
    for v in range(4):
        made = grid.merge(name, threads)
        apply_update(
            ODD, held, grid.path("u", v + 1), expect={"job_id": "j", "codec": name}, in_place=True
        )
        assert weights_hash(ODD, held) == made.weights_hash
        assert same(held, open_weights(grid.path("w", v + 1), ODD))
        assert not grid.replay(v, grid.record(v, name))


class Taken:
    """A sink that puts together what comes in any order."""

    def __init__(self, spec: TensorSpec) -> None:
        self.parts: dict[str, bytes] = {}
        self.new, self.rest = np.full((2, spec.size), np.nan, np.float32)

    def stored(self, name: str, values: NDArray[Any]) -> None:
        self.parts[name] = values.tobytes()

    def theta(self, spec: TensorSpec, start: int, values: Floats) -> None:
        self.new[start : start + values.size] = values

    def kept(self, spec: TensorSpec, start: int, values: Floats) -> None:
        self.rest[start : start + values.size] = values


@pytest.mark.parametrize("name", PARTS)
def test_chunks_and_threads_change_no_bit_of_what_is_sent(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    spec = TensorSpec("w", (5 * GRAIN + 77,))
    manifest, rng = ParameterManifest((spec,)), np.random.default_rng(0)
    theta, update, owed = rng.standard_normal((3, spec.size), np.float32)
    with residual_writer(tmp_path / "kept", manifest) as writer:
        writer.write("w", 0, owed)
        writer.commit()

    def send(chunk: int, threads: int) -> list[object]:
        monkeypatch.setattr("distribai.merge.down.CHUNK", chunk)
        taken, kept = Taken(spec), open_residual(tmp_path / "kept", manifest)
        with Exact(manifest, tmp_path) as exact:
            exact.arrays["w"][...] = update
            send_down(manifest, {"w": theta}, exact, kept, name, taken, threads=threads)
        return [taken.parts, taken.new.tobytes(), taken.rest.tobytes()]

    whole = send(8 * GRAIN, 1)
    assert send(GRAIN, 1) == whole
    assert send(GRAIN, 3) == whole


@pytest.mark.parametrize("name", PARTS)
def test_what_is_not_sent_is_kept_to_the_last_bit_of_a_sum(name: str, tmp_path: Path) -> None:
    """theta moves by what was sent; sent and kept are the exact update and what was kept before."""
    grid = Grid(tmp_path)
    kept = {t.name: np.zeros(t.shape, np.float32) for t in passing(ODD).tensors}
    momentum = None
    for v in range(3):
        theta = {n: a.copy() for n, a in open_weights(grid.path("w", v), ODD).items()}
        grid.merge(name)
        outs = blank(ODD)
        eta, mu = outer_coefficients(OuterSpec(), v, False)
        merge_round(ODD, theta, momentum, grid.deltas[v], TOKENS, eta, mu, *outs)
        momentum = outs[1]
        update = open_update(grid.path("u", v + 1), ODD, {"version": v + 1})
        left = open_residual(grid.path("r", v + 1), ODD).arrays
        for spec in passing(ODD).tensors:
            sent = update.reader(spec)(0, spec.size, np.empty(spec.size, np.float32))
            wanted = outs[2][spec.name].reshape(-1) + kept[spec.name].reshape(-1)
            np.testing.assert_array_equal(left[spec.name].reshape(-1), wanted - sent)
        kept = {n: a.copy() for n, a in left.items()}


def test_fp32_without_feedback_gives_the_bits_that_it_always_gave(tmp_path: Path) -> None:
    plain, fed = Grid(tmp_path / "plain", feedback=False), Grid(tmp_path / "fed")
    for _ in range(3):
        one, other = plain.merge("fp32"), fed.merge("fp32")
        assert (one.residual, one.residual_hash) == (None, "")
        assert one.weights_hash == other.weights_hash
        assert one.update == other.update


def test_a_codec_without_feedback_keeps_nothing_and_replays(tmp_path: Path) -> None:
    grid = Grid(tmp_path, feedback=False)
    for v in range(2):
        assert grid.merge("int8").residual is None
        assert not grid.replay(v, grid.record(v, "int8"))


def test_a_replay_finds_whatever_is_not_as_recorded(tmp_path: Path) -> None:
    grid = Grid(tmp_path)
    grid.merge("sparse")
    grid.merge("sparse")
    record = grid.record(1, "sparse")
    assert not grid.replay(1, record)
    for change, word in (
        ({"residual_hash": "0" * 64}, "residual"),
        ({"base_residual_hash": ""}, "residual"),
        ({"weights_hash": "0" * 64}, "weights"),
        ({"momentum_hash": "0" * 64}, "momentum"),
    ):
        assert word in " ".join(grid.replay(1, replace(record, **change)))
    with pytest.raises(Integrity):  # the update says itself what it is encoded in
        grid.replay(1, replace(record, codec_down="int4"))
    data = bytearray(grid.path("u", 2).read_bytes())
    data[-1] ^= 1
    grid.path("u", 2).write_bytes(data)
    assert "update" in " ".join(grid.replay(1, record))


@pytest.mark.parametrize("size", [1024, 4096, 3 * 4096 + 77, 200_000])
@pytest.mark.parametrize("name", ["int4", "sparse", "sparse256"])
def test_encoding_depends_on_no_alignment_and_no_history(name: str, size: int) -> None:
    """Reductions of a library go by alignment and vector length; canonical bytes must not."""
    rng = np.random.default_rng(size)
    values = rng.standard_normal(size).astype(np.float32)
    values[: size // 8] = values[0]  # ties
    wanted = {k: a.tobytes() for k, a in codec(name).encode(values).items()}
    room = np.empty(size + 64, np.float32)
    for shift in (1, 3, 7, 16):
        shifted = room[shift : shift + size]
        shifted[...] = values
        again = codec(name).encode(shifted)
        assert {k: a.tobytes() for k, a in again.items()} == wanted
    spec = TensorSpec("w", (size,))
    parts = dict(codec(name).encode(values))
    read = codec(name).reader(spec, parts)(0, size, np.empty(size, np.float32))
    assert np.isfinite(read).all()


def test_a_merge_that_would_overflow_publishes_nothing(tmp_path: Path) -> None:
    grid = Grid(tmp_path)
    base = {n: a.copy() for n, a in open_weights(grid.path("w", 0), ODD).items()}
    local = {n: a.copy() for n, a in base.items()}
    local["matrix"] = np.full_like(local["matrix"], -9e17)
    delta = stored_delta(tmp_path, ODD, base, local, "huge")
    before = sorted(p.name for p in tmp_path.iterdir())
    with pytest.raises(Integrity) as caught:
        merge_files(
            ODD,
            grid.path("w", 0),
            None,
            [delta],
            [1],
            2.0,
            0.5,
            out_theta=grid.path("w", 1),
            out_momentum=grid.path("m", 1),
            out_update=grid.path("u", 1),
            header=UpdateHeader("j", 1, ODD.hash, "int4"),
            feedback=Feedback(None, grid.path("r", 1)),
        )
    assert caught.value.code == "tensor.nonfinite"
    assert sorted(p.name for p in tmp_path.iterdir()) == before
