"""Error feedback of deltas: what was sent and what is kept are what was learned."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from distribai.core.codecs import BETA, PARTS
from distribai.core.tensors import Init, ParameterManifest, TensorSpec
from distribai.errors import Integrity
from distribai.merge.delta import open_delta, write_delta, write_delta_with_feedback
from distribai.merge.feedback import Feedback, open_residual, passing, residual_writer
from distribai.merge.version0 import make_version0
from distribai.merge.weights import Weights
from tests.merge.support import ODD, header, trained

SHAPES = ((), (0,), (1,), (3, 1), (67,), (64, 67), (2, 3, 5, 40))


class Node:
    """One node's files, and an account of what it learned and sent."""

    def __init__(self, folder: Path, manifest: ParameterManifest, codec: str) -> None:
        self.folder, self.manifest, self.codec = folder, manifest, codec
        self.kept: Path | None = None
        self.count = 0

    def send(
        self, base: Weights, local: Weights, lost: tuple[Path, ...] = (), codec: str = ""
    ) -> Path:
        self.count += 1
        path = self.folder / f"{self.count}.delta"
        out = self.folder / f"{self.count}.residual"
        told = header(self.manifest, f"t{self.count}", codec=codec or self.codec)
        feedback = Feedback(self.kept, out)
        write_delta_with_feedback(path, self.manifest, base, local, told, feedback, lost)
        self.kept = out
        return path

    def sent(self, path: Path) -> Weights:
        delta = open_delta(path, self.manifest, {"job_id": "j"})
        return {
            t.name: delta.packed.reader(t)(0, t.size, np.empty(t.size, np.float32)).copy()
            for t in passing(self.manifest).tensors
        }

    def residual(self) -> Weights:
        assert self.kept is not None
        return {n: a.reshape(-1) for n, a in open_residual(self.kept, self.manifest).arrays.items()}


def learned(manifest: ParameterManifest, base: Weights, local: Weights) -> Weights:
    return {
        t.name: (base[t.name].reshape(-1) - local[t.name].reshape(-1)).astype(np.float32)
        for t in passing(manifest).tensors
    }


def close(found: Weights, wanted: Weights, size: float = 0.01) -> None:
    assert found.keys() == wanted.keys()
    for name, values in wanted.items():
        np.testing.assert_allclose(found[name], values, rtol=1e-5, atol=2e-6 * size)


def total(*parts: Weights) -> Weights:
    return {name: np.sum([p[name] for p in parts], axis=0) for name in parts[0]}


@pytest.mark.parametrize("codec", [name for name in PARTS if BETA.get(name, 1.0) == 1.0])
def test_sent_and_kept_are_what_was_learned(codec: str, tmp_path: Path) -> None:
    base = make_version0(ODD, 1)
    node, deltas, sent = Node(tmp_path, ODD, codec), [], []
    for seed in range(6):
        local = trained(ODD, base, seed)
        deltas.append(learned(ODD, base, local))
        sent.append(node.sent(node.send(base, local)))
    close(total(*sent, node.residual()), total(*deltas))


def test_a_delta_that_came_to_nothing_is_added_back(tmp_path: Path) -> None:
    base = make_version0(ODD, 1)
    node, deltas, merged = Node(tmp_path, ODD, "int2"), [], []
    lost: tuple[Path, ...] = ()
    for seed in range(8):
        local = trained(ODD, base, seed)
        deltas.append(learned(ODD, base, local))
        path = node.send(base, local, lost)
        refused = seed in (2, 3, 6)
        lost = (path,) if refused else ()
        if not refused:
            merged.append(node.sent(path))
    close(total(*merged, node.residual()), total(*deltas))


def test_several_lost_deltas_of_several_codecs_are_added_back_at_once(tmp_path: Path) -> None:
    base = make_version0(ODD, 1)
    node, deltas, paths = Node(tmp_path, ODD, "int4"), [], []
    for seed, codec in enumerate(("sparse", "int8", "int2", "bf16")):
        local = trained(ODD, base, seed)
        deltas.append(learned(ODD, base, local))
        if seed == 1:
            assert node.kept is not None  # beta of what was kept for sparse counts from here on
        paths.append(node.send(base, local, codec=codec))
    local = trained(ODD, base, 9)
    last = node.send(base, local, tuple(paths))
    close(total(node.sent(last), node.residual()), total(*deltas, learned(ODD, base, local)))


def test_sparse_keeps_a_share_of_what_it_owes(tmp_path: Path) -> None:
    base = make_version0(ODD, 1)
    node = Node(tmp_path, ODD, "sparse")
    node.send(base, trained(ODD, base, 1))
    before = node.residual()
    local = trained(ODD, base, 2)
    sent = node.sent(node.send(base, local))
    owed = {name: np.float32(0.95) * values for name, values in before.items()}
    close(total(sent, node.residual()), total(owed, learned(ODD, base, local)))


def test_a_codec_that_loses_nothing_pays_all_debts(tmp_path: Path) -> None:
    base = make_version0(ODD, 1)
    node = Node(tmp_path, ODD, "int2")
    node.send(base, trained(ODD, base, 1))
    node.send(base, trained(ODD, base, 2), codec="fp32")
    assert all(not values.any() for values in node.residual().values())


@given(
    shape=st.sampled_from(SHAPES),
    codec=st.sampled_from(sorted(PARTS)),
    scale=st.sampled_from([0.0, 1e-30, 1e-3, 1e10]),
    constant=st.booleans(),
    seed=st.integers(0, 99),
)
@settings(max_examples=60, deadline=None)
def test_every_shape_accounts_for_its_mass(
    shape: tuple[int, ...],
    codec: str,
    scale: float,
    constant: bool,
    seed: int,
    tmp_path_factory: pytest.TempPathFactory,
) -> None:
    manifest = ParameterManifest((TensorSpec("w", shape, init=Init("constant")),))
    base = make_version0(manifest, 0)
    rng = np.random.default_rng(seed)
    node = Node(tmp_path_factory.mktemp("node"), manifest, codec)
    beta = np.float32(BETA.get(codec, 1.0))
    owed = np.zeros(int(np.prod(shape)), np.float64)
    for _ in range(3):
        values = np.full(shape, scale) if constant else rng.standard_normal(shape) * scale
        local = {"w": np.asarray(-values, np.float32)}
        sent = node.sent(node.send(base, local))["w"]
        owed = owed * beta + np.asarray(values, np.float32).reshape(-1)
        size = max(scale, float(np.abs(owed).max(initial=0)))
        np.testing.assert_allclose(
            sent.astype(np.float64) + node.residual()["w"], owed, rtol=1e-4, atol=1e-5 * size
        )
        owed = node.residual()["w"].astype(np.float64)


def test_the_same_task_encoded_again_gives_the_same_bytes(tmp_path: Path) -> None:
    base = make_version0(ODD, 1)
    node = Node(tmp_path, ODD, "sparse128")
    node.send(base, trained(ODD, base, 1))
    kept, told = node.kept, header(ODD, codec="sparse128")
    made = [
        write_delta_with_feedback(
            tmp_path / f"again{n}",
            ODD,
            base,
            trained(ODD, base, 2),
            told,
            Feedback(kept, tmp_path / f"rest{n}"),
        )
        for n in range(2)
    ]
    assert made[0] == made[1]


def test_without_debts_a_delta_is_the_same_as_without_error_feedback(tmp_path: Path) -> None:
    base = make_version0(ODD, 1)
    local, told = trained(ODD, base, 2), header(ODD, codec="int4")
    plain = write_delta(tmp_path / "plain", ODD, base, local, told)
    out = Feedback(None, tmp_path / "rest")
    assert write_delta_with_feedback(tmp_path / "d", ODD, base, local, told, out)[0] == plain


def test_a_residual_of_another_model_is_refused_and_leaves_nothing(tmp_path: Path) -> None:
    other = ParameterManifest((TensorSpec("w", (3,)),))
    with residual_writer(tmp_path / "other", other) as writer:
        writer.write("w", 0, np.zeros(3, np.float32))
        writer.commit()
    base = make_version0(ODD, 1)
    feedback = Feedback(tmp_path / "other", tmp_path / "rest")
    with pytest.raises(Integrity):
        write_delta_with_feedback(
            tmp_path / "d", ODD, base, trained(ODD, base, 2), header(ODD, codec="int4"), feedback
        )
    assert sorted(p.name for p in tmp_path.iterdir()) == ["other"]


def test_a_debt_that_has_grown_beyond_all_numbers_is_refused(tmp_path: Path) -> None:
    base = make_version0(ODD, 1)
    with residual_writer(tmp_path / "kept", ODD) as writer:
        for spec in passing(ODD).tensors:
            writer.write(spec.name, 0, np.full(spec.size, np.inf, np.float32))
        writer.commit()
    feedback = Feedback(tmp_path / "kept", tmp_path / "rest")
    with pytest.raises(Integrity) as caught:
        write_delta_with_feedback(
            tmp_path / "d", ODD, base, trained(ODD, base, 2), header(ODD, codec="int4"), feedback
        )
    assert caught.value.code == "tensor.nonfinite"
