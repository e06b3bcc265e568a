"""The outer step: against torch, against hand computation, and never another bit."""

from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from distribai.core.spec import OuterSpec
from distribai.core.tensors import Init, ParameterManifest, TensorSpec
from distribai.errors import Conflict, Integrity, InternalFault
from distribai.merge import kernel
from distribai.merge.outer import (
    MergeChoices,
    UpdateHeader,
    merge_files,
    merge_round,
    momentum_hash,
    open_momentum,
    outer_coefficients,
    write_momentum,
)
from distribai.merge.update import apply_update
from distribai.merge.version0 import make_version0
from distribai.merge.weights import Weights, open_weights, weights_hash, write_weights
from tests.merge.support import (
    ODD,
    blank,
    deltas_of,
    memory_delta,
    same,
    stored_delta,
    trained,
)

F = np.float32
ETA, MU = float(F(0.7)), float(F(0.9))
VECTOR = ParameterManifest((TensorSpec("x", (1000,), init=Init("uniform", std=0.5)),))


def naive(
    manifest: ParameterManifest,
    theta: Weights,
    momentum: Weights | None,
    deltas: Sequence[Weights],
    tokens: Sequence[int],
    eta: float,
    mu: float,
) -> tuple[Weights, Weights, Weights]:
    """The written order of operations on whole arrays."""
    kept = [(d, n) for d, n in zip(deltas, tokens, strict=True) if n]
    total = sum(n for _, n in kept)
    new, new_momentum, update = {}, {}, {}
    for t in manifest.tensors:
        if t.role == "frozen":
            new[t.name] = theta[t.name].copy()
            continue
        rows = [d[t.name] for d, _ in kept]
        if t.role == "int_buffer":
            new[t.name] = update[t.name] = np.max(rows, axis=0)
            continue
        if len({n for _, n in kept}) == 1:
            g = rows[0].copy()
            for row in rows[1:]:
                g = g + row
            g = g * F(1 / len(rows))
        else:
            g = rows[0] * F(kept[0][1] / total)
            for row, (_, n) in zip(rows[1:], kept[1:], strict=True):
                g = g + row * F(n / total)
        u = g
        if t.role == "trainable":
            m = g if momentum is None else momentum[t.name] * F(mu) + g
            new_momentum[t.name] = np.asarray(m)
            u = (g + m * F(mu)) * F(eta)
        update[t.name] = np.asarray(u)
        new[t.name] = np.asarray(theta[t.name] - u)
    return new, new_momentum, update


def run(
    manifest: ParameterManifest,
    theta: Weights,
    momentum: Weights | None,
    rows: Sequence[Weights],
    tokens: Sequence[int],
    eta: float = ETA,
    mu: float = MU,
    threads: int = 1,
) -> tuple[Weights, Weights, Weights, MergeChoices]:
    deltas = [memory_delta(manifest, arrays, f"t{i}") for i, arrays in enumerate(rows)]
    outs = blank(manifest)
    choices = merge_round(
        manifest, theta, momentum, deltas, tokens, eta, mu, *outs, threads=threads
    )
    return *outs, choices


def arrays_of(base: Weights, seeds: Sequence[int], manifest: ParameterManifest = ODD):
    return [dict(d.packed.arrays) for d in deltas_of(manifest, base, seeds)]


@pytest.mark.parametrize("tokens", [[5], [5, 5], [3, 3, 3], [10, 20, 30], [7, 0, 7], [0, 3, 0, 9]])
@pytest.mark.parametrize("first", [True, False])
def test_every_shape_and_role_follows_the_written_order(tokens: list[int], first: bool):
    theta = make_version0(ODD, 1)
    rows = arrays_of(theta, range(len(tokens)))
    momentum = None if first else {n: a * F(0.3) for n, a in rows[0].items() if n in trainables()}
    momentum = momentum and {n: np.asarray(a) for n, a in momentum.items()}
    found = run(ODD, theta, momentum, rows, tokens)
    wanted = naive(ODD, theta, momentum, rows, tokens, ETA, MU)
    for ours, theirs in zip(found[:3], wanted, strict=True):
        assert same(ours, theirs)


def trainables() -> set[str]:
    return {t.name for t in ODD.tensors if t.role == "trainable"}


@pytest.mark.parametrize("mu", [0.9, 0.5])
def test_constant_momentum_is_torchs_nesterov_within_two_ulp_a_step(mu: float):
    mu, eta = float(F(mu)), float(F(0.7))
    rng = np.random.default_rng(0)
    theta: Weights = make_version0(VECTOR, 0)
    momentum: Weights | None = None
    worst = 0.0
    for _ in range(60):
        gradient = (rng.standard_normal(1000) * 0.02).astype(F)
        parameter = torch.nn.Parameter(torch.from_numpy(theta["x"].copy()))
        reference = torch.optim.SGD([parameter], lr=eta, momentum=mu, nesterov=True)
        if momentum is not None:
            reference.state[parameter]["momentum_buffer"] = torch.from_numpy(momentum["x"].copy())
        parameter.grad = torch.from_numpy(gradient.copy())
        reference.step()
        outs = blank(VECTOR)
        merge_round(
            VECTOR, theta, momentum, [memory_delta(VECTOR, {"x": gradient})], [1], eta, mu, *outs
        )
        theirs = parameter.detach().numpy()
        # One ulp of the largest operand: a sum that cancels has no smaller error to compare with.
        size = np.maximum(np.maximum(np.abs(theta["x"]), np.abs(theirs)), np.abs(outs[2]["x"]))
        worst = max(worst, float((np.abs(outs[0]["x"] - theirs) / np.spacing(size)).max()))
        buffer = reference.state[parameter]["momentum_buffer"].numpy()
        assert np.abs(outs[1]["x"] - buffer).max() <= 2 * np.spacing(np.abs(buffer).max())
        theta, momentum = outs[0], outs[1]
    assert worst <= 2


def test_a_whole_run_stays_beside_torchs():
    rng = np.random.default_rng(1)
    theta: Weights = make_version0(VECTOR, 0)
    momentum: Weights | None = None
    parameter = torch.nn.Parameter(torch.from_numpy(theta["x"].copy()))
    reference = torch.optim.SGD([parameter], lr=ETA, momentum=MU, nesterov=True)
    for _ in range(60):
        gradient = (rng.standard_normal(1000) * 0.02).astype(F)
        parameter.grad = torch.from_numpy(gradient.copy())
        reference.step()
        outs = blank(VECTOR)
        merge_round(
            VECTOR, theta, momentum, [memory_delta(VECTOR, {"x": gradient})], [1], ETA, MU, *outs
        )
        theta, momentum = outs[0], outs[1]
    np.testing.assert_allclose(theta["x"], parameter.detach().numpy(), rtol=0, atol=1e-5)


def test_the_ramp_follows_a_double_precision_computation_by_hand():
    spec = OuterSpec(eta=0.8, mu=0.8, ramp=8)
    rng = np.random.default_rng(2)
    theta: Weights = make_version0(VECTOR, 0)
    momentum: Weights | None = None
    exact, m = theta["x"].astype(np.float64), np.zeros(1000)
    for r in range(20):
        gradient = (rng.standard_normal(1000) * 0.02).astype(F)
        share = min(1.0, r / 8)
        m = 0.8 * share * m + gradient
        exact = exact - (1 + (0.8 - 1) * share) * (gradient + 0.8 * share * m)
        eta, mu = outer_coefficients(spec, r, from_trained=False)
        outs = blank(VECTOR)
        merge_round(
            VECTOR, theta, momentum, [memory_delta(VECTOR, {"x": gradient})], [1], eta, mu, *outs
        )
        theta, momentum = outs[0], outs[1]
    np.testing.assert_allclose(theta["x"], exact, rtol=0, atol=2e-6)
    np.testing.assert_allclose(momentum["x"], m, rtol=0, atol=1e-6)


def test_coefficients_rise_from_averaging_to_the_full_step():
    spec = OuterSpec(eta=0.7, mu=0.9, ramp=8)
    assert outer_coefficients(spec, 0, False) == (1.0, 0.0)
    assert outer_coefficients(spec, 4, False) == (float(F(0.85)), float(F(0.45)))
    assert outer_coefficients(spec, 8, False) == (float(F(0.7)), float(F(0.9)))
    assert outer_coefficients(spec, 1000, False) == (float(F(0.7)), float(F(0.9)))


def test_the_last_rounds_lead_back_to_averaging():
    spec = OuterSpec(eta=0.7, mu=0.9, ramp=8, ending=4)
    assert outer_coefficients(spec, 20, False, 4) == (float(F(0.7)), float(F(0.9)))
    assert outer_coefficients(spec, 22, False, 2) == (float(F(0.85)), float(F(0.45)))
    assert outer_coefficients(spec, 24, True, 0) == (1.0, 0.0)
    assert outer_coefficients(spec, 1, False, 3) == outer_coefficients(spec, 1, False)
    off = OuterSpec(eta=0.7, mu=0.9, ramp=8, ending=0)
    assert outer_coefficients(off, 24, False, 0) == (float(F(0.7)), float(F(0.9)))


def test_there_is_no_ramp_from_trained_weights_or_when_switched_off():
    full = (float(F(0.7)), float(F(0.9)))
    assert outer_coefficients(OuterSpec(0.7, 0.9, 8), 0, True) == full
    assert outer_coefficients(OuterSpec(0.7, 0.9, 0), 0, False) == full


def test_without_outer_momentum_it_is_plain_averaging():
    theta = {"x": np.float32([1.0] * 1000)}
    rows = [{"x": np.full(1000, v, F)} for v in (0.25, 0.75)]
    new, *_ = run(VECTOR, theta, None, rows, [4, 4], eta=1.0, mu=0.0)
    assert (new["x"] == 0.5).all()


def test_weights_are_shares_of_tokens():
    theta = {"x": np.zeros(1000, F)}
    rows = [{"x": np.full(1000, v, F)} for v in (4.0, 8.0)]
    new, _, update, choices = run(VECTOR, theta, None, rows, [1, 3], eta=1.0, mu=0.0)
    assert (update["x"] == 7.0).all()
    assert (new["x"] == -7.0).all()
    assert [float.fromhex(w) for w in choices.weights] == [0.25, 0.75]
    assert not choices.equal


def test_a_row_without_tokens_is_not_in_the_divisor():
    theta = make_version0(ODD, 1)
    rows = arrays_of(theta, [1, 2, 3])
    rows[1] = {n: np.full_like(a, 77) for n, a in rows[1].items()}
    with_it = run(ODD, theta, None, rows, [5, 0, 5])
    without = run(ODD, theta, None, [rows[0], rows[2]], [5, 5])
    for ours, theirs in zip(with_it[:3], without[:3], strict=True):
        assert same(ours, theirs)
    assert with_it[3].dropped == ("t1",)
    assert with_it[3].order == ("t0", "t2")


@pytest.mark.parametrize("tokens", [[], [0], [0, 0]])
def test_without_any_contributor_nothing_is_made(tokens: list[int]):
    theta = make_version0(ODD, 1)
    rows = arrays_of(theta, range(len(tokens)))
    with pytest.raises(Conflict) as caught:
        run(ODD, theta, None, rows, tokens)
    assert caught.value.code == "merge.empty"


def test_float_buffers_are_averaged_and_integers_take_the_maximum():
    manifest = ParameterManifest(
        (TensorSpec("mean", (2,), role="float_buffer"), TensorSpec("n", (), "I64", "int_buffer"))
    )
    theta = {"mean": np.float32([1, 2]), "n": np.array(5)}
    rows = [
        {"mean": np.float32([0.5, 1.0]), "n": np.array(2**60 + 1)},
        {"mean": np.float32([0.0, -1.0]), "n": np.array(9)},
    ]
    new, momentum, update, _ = run(manifest, theta, None, rows, [1, 1], eta=0.5, mu=0.5)
    assert new["mean"].tolist() == [0.75, 2.0]
    assert new["n"] == update["n"] == 2**60 + 1
    assert momentum == {}


@settings(max_examples=25, deadline=None)
@given(
    size=st.integers(0, 500),
    chunk=st.integers(1, 64),
    spans=st.integers(1, 4),
    threads=st.integers(1, 3),
    tokens=st.lists(st.integers(0, 5), min_size=1, max_size=6).filter(any),
    first=st.booleans(),
)
def test_chunks_and_threads_change_no_bit(
    size: int, chunk: int, spans: int, threads: int, tokens: list[int], first: bool
):
    manifest = ParameterManifest(
        (TensorSpec("x", (size,)), TensorSpec("b", (7,), role="float_buffer"))
    )
    rng = np.random.default_rng(size)

    def arrays() -> Weights:
        return {"x": rng.standard_normal(size).astype(F), "b": rng.standard_normal(7).astype(F)}

    theta, rows = arrays(), [arrays() for _ in tokens]
    momentum = None if first else {"x": rng.standard_normal(size).astype(F)}
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(kernel, "CHUNK", chunk)
        patch.setattr(kernel, "SPAN", chunk * spans)
        found = run(manifest, theta, momentum, rows, tokens, threads=threads)
    wanted = naive(manifest, theta, momentum, rows, tokens, ETA, MU)
    for ours, theirs in zip(found[:3], wanted, strict=True):
        assert same(ours, theirs)


def test_the_order_given_decides():
    rows = [{"x": np.full(1000, v, F)} for v in (1e8, 1.0, -1e8)]
    theta = {"x": np.zeros(1000, F)}
    one = run(VECTOR, theta, None, rows, [1, 1, 1])
    two = run(VECTOR, theta, None, [rows[0], rows[2], rows[1]], [1, 1, 1])
    assert (one[2]["x"] == 0).all()
    assert (two[2]["x"] > 0).all()


def test_inputs_stay_untouched_and_outputs_share_nothing_with_them():
    theta = make_version0(ODD, 1)
    before = {n: a.copy() for n, a in theta.items()}
    rows = arrays_of(theta, [1, 2])
    new, momentum, update, _ = run(ODD, theta, None, rows, [1, 2])
    assert same(theta, before)
    for made in (new, momentum, update):
        for name, array in made.items():
            assert not np.shares_memory(array, theta[name])
            assert not any(np.shares_memory(array, row[name]) for row in rows if name in row)


def test_a_merge_may_write_over_its_own_inputs():
    theta = make_version0(ODD, 1)
    rows = arrays_of(theta, [1, 2])
    _, momentum, _, _ = run(ODD, theta, None, rows, [1, 2])
    wanted = run(ODD, theta, momentum, rows, [1, 2])
    deltas = [memory_delta(ODD, r, f"t{i}") for i, r in enumerate(rows)]
    merge_round(ODD, theta, momentum, deltas, [1, 2], ETA, MU, theta, momentum)
    assert same(theta, wanted[0])
    assert same(momentum, wanted[1])


def test_choices_are_recorded_exactly():
    theta = make_version0(ODD, 1)
    *_, choices = run(ODD, theta, None, arrays_of(theta, [1, 2, 3]), [2, 2, 2])
    assert choices.equal
    assert choices.rule == "mean"
    assert {float.fromhex(w) for w in choices.weights} == {float(F(1 / 3))}
    assert float.fromhex(choices.eta) == ETA
    assert float.fromhex(choices.mu) == MU


def test_bad_arguments_are_defects():
    theta = make_version0(ODD, 1)
    rows = arrays_of(theta, [1, 2])
    with pytest.raises(ValueError, match="tokens"):
        run(ODD, theta, None, rows, [1, -1])
    with pytest.raises(ValueError, match="tokens"):
        run(ODD, theta, None, rows, [1])
    with pytest.raises(ValueError, match="fp32"):
        run(ODD, theta, None, rows, [1, 1], eta=0.7)
    deltas = [memory_delta(ODD, r, "same") for r in rows]
    with pytest.raises(ValueError, match="exactly one"):
        merge_round(ODD, theta, None, deltas, [1, 1], ETA, MU, *blank(ODD))


def test_deltas_of_another_model_are_refused():
    theta = make_version0(ODD, 1)
    with pytest.raises(Integrity):
        merge_round(
            VECTOR,
            {"x": np.zeros(1000, F)},
            None,
            deltas_of(ODD, theta, [1]),
            [1],
            ETA,
            MU,
            *blank(VECTOR),
        )


def test_arithmetic_that_flushes_subnormals_is_noticed():
    if not torch.set_flush_denormal(True):
        pytest.skip("this processor cannot flush subnormal numbers")
    try:
        with pytest.raises(InternalFault):
            kernel.check_arithmetic()
    finally:
        torch.set_flush_denormal(False)
    kernel.check_arithmetic()


def test_training_in_bf16_gives_fp32_deltas_and_fp32_weights(tmp_path: Path):
    base = make_version0(VECTOR, 3)
    live = torch.from_numpy(base["x"].copy()).to(torch.bfloat16)
    live -= torch.full_like(live, 0.125)
    local = {"x": live.to(torch.float32).numpy()}
    delta = stored_delta(tmp_path, VECTOR, base, local)
    outs = blank(VECTOR)
    merge_round(VECTOR, base, None, [delta], [1], 1.0, 0.0, *outs)
    assert outs[0]["x"].dtype == F
    np.testing.assert_allclose(outs[0]["x"], local["x"], rtol=0, atol=1e-7)


def test_a_tied_storage_is_merged_once(tmp_path: Path):
    class Tied(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.embed = torch.nn.Embedding(10, 4)
            self.head = torch.nn.Linear(4, 10, bias=False)
            self.head.weight = self.embed.weight

    model = Tied()
    manifest = ParameterManifest((TensorSpec("embed.weight", (10, 4)),))
    base = {"embed.weight": model.embed.weight.detach().numpy().copy()}
    torch.optim.SGD(model.parameters(), lr=0.1)
    model.head.weight.data += 0.5
    local = {n: p.detach().numpy() for n, p in model.named_parameters()}
    assert set(local) == {"embed.weight"}
    delta = stored_delta(tmp_path, manifest, base, local)
    outs = blank(manifest)
    merge_round(manifest, base, None, [delta], [1], 1.0, 0.0, *outs)
    np.testing.assert_allclose(outs[0]["embed.weight"], base["embed.weight"] + 0.5, atol=1e-6)


def test_batch_norm_statistics_are_averaged_over_nodes(tmp_path: Path):
    manifest = ParameterManifest(
        (
            TensorSpec("weight", (3,), init=Init("constant", value=1.0)),
            TensorSpec("bias", (3,)),
            TensorSpec("running_mean", (3,), role="float_buffer"),
            TensorSpec("running_var", (3,), role="float_buffer", init=Init("constant", value=1.0)),
            TensorSpec("num_batches_tracked", (), "I64", "int_buffer"),
        )
    )
    base = make_version0(manifest, 0)
    rows, states = [], []
    for node, batches in enumerate((2, 5)):
        layer = torch.nn.BatchNorm1d(3)
        torch.manual_seed(node)
        for _ in range(batches):
            layer(torch.randn(16, 3) + node)
        state = {n: a.numpy() for n, a in layer.state_dict().items()}
        states.append(state)
        rows.append(stored_delta(tmp_path, manifest, base, state, f"t{node}"))
    outs = blank(manifest)
    merge_round(manifest, base, None, rows, [1, 1], ETA, MU, *outs)
    for name in ("running_mean", "running_var"):
        wanted = (states[0][name] + states[1][name]) / 2
        np.testing.assert_allclose(outs[0][name], wanted, atol=1e-6)
    assert outs[0]["num_batches_tracked"] == 5


@pytest.mark.parametrize("threads", [1, 3])
def test_nodes_that_apply_updates_stay_equal_to_the_orchestrator(tmp_path: Path, threads: int):
    canonical = make_version0(ODD, 5)
    fresh_each_time = {n: a.copy() for n, a in canonical.items()}
    write_weights(tmp_path / "w0", ODD, canonical)
    arrays, arrays_momentum = make_version0(ODD, 5), None
    for v in range(8):
        base = open_weights(tmp_path / f"w{v}", ODD)
        tokens = [100, 100, 100] if v % 2 else [100, 90, 0]
        deltas = [
            stored_delta(tmp_path, ODD, base, trained(ODD, base, 10 * v + k), f"t{v}-{k}")
            for k in range(3)
        ]
        eta, mu = outer_coefficients(OuterSpec(), v, False)
        made = merge_files(
            ODD,
            tmp_path / f"w{v}",
            tmp_path / f"m{v}" if v else None,
            deltas,
            tokens,
            eta,
            mu,
            out_theta=tmp_path / f"w{v + 1}",
            out_momentum=tmp_path / f"m{v + 1}",
            out_update=tmp_path / f"u{v + 1}",
            header=UpdateHeader("j", v + 1, ODD.hash, "fp32"),
            threads=threads,
        )
        expect = {"job_id": "j", "version": v + 1}
        update = tmp_path / f"u{v + 1}"
        apply_update(ODD, canonical, update, expect=expect, in_place=True)
        fresh_each_time = apply_update(ODD, fresh_each_time, update)
        assert weights_hash(ODD, canonical) == made.weights_hash
        assert weights_hash(ODD, fresh_each_time) == made.weights_hash
        assert weights_hash(ODD, open_weights(tmp_path / f"w{v + 1}", ODD)) == made.weights_hash
        momentum = open_momentum(tmp_path / f"m{v + 1}", ODD)
        assert momentum_hash(ODD, momentum) == made.momentum_hash
        outs = blank(ODD)
        choices = merge_round(ODD, arrays, arrays_momentum, deltas, tokens, eta, mu, *outs)
        arrays, arrays_momentum = outs[0], outs[1]
        assert weights_hash(ODD, arrays) == made.weights_hash
        assert choices == made.choices


def test_momentum_files_hold_the_trainable_tensors(tmp_path: Path):
    _, momentum, _ = blank(ODD)
    write_momentum(tmp_path / "m", ODD, momentum)
    assert same(open_momentum(tmp_path / "m", ODD), momentum)


def test_a_merge_that_would_overflow_publishes_nothing(tmp_path: Path):
    base = make_version0(VECTOR, 0)
    write_weights(tmp_path / "w", VECTOR, base)
    rows = [memory_delta(VECTOR, {"x": np.full(1000, 3e38, F)}, f"t{i}") for i in range(2)]
    with pytest.raises(Integrity) as caught:
        files(tmp_path, rows)
    assert caught.value.code == "tensor.nonfinite"
    assert [p.name for p in tmp_path.iterdir()] == ["w"]


def test_an_empty_round_writes_no_file(tmp_path: Path):
    write_weights(tmp_path / "w", VECTOR, make_version0(VECTOR, 0))
    with pytest.raises(Conflict):
        files(tmp_path, [])
    assert [p.name for p in tmp_path.iterdir()] == ["w"]


def files(folder: Path, rows: list, codec: str = "fp32"):
    return merge_files(
        VECTOR,
        folder / "w",
        None,
        rows,
        [1] * len(rows),
        ETA,
        MU,
        out_theta=folder / "w1",
        out_momentum=folder / "m1",
        out_update=folder / "u1",
        header=UpdateHeader("j", 1, VECTOR.hash, codec),
    )
