from __future__ import annotations

from dataclasses import asdict, replace

import numpy as np
import pytest
import torch
from torch import nn

from distribai.core.architectures import families as core_families
from distribai.core.architectures import manifest_of
from distribai.core.architectures.decoder_transformer import PROFILES, Config
from distribai.core.tensors import Init, ParameterManifest, TensorSpec
from distribai.errors import Integrity, InvalidSpec
from distribai.merge.version0 import make_version0
from distribai.training import models
from distribai.training.generate import generate
from distribai.training.loop import sequence_loss
from distribai.training.models.decoder_transformer import rope_tables, rotate

MINI = Config(dim=16, layers=2, heads=4, ffn_dim=24, vocab_size=19)
VARIANTS = {
    "plain": MINI,
    "untied": replace(MINI, tied=False),
    "qk_norm": replace(MINI, qk_norm=True),
    "grouped": replace(MINI, kv_heads=2),
    "window": replace(MINI, window=3),
    "checkpointing": replace(MINI, checkpointing=True),
    "everything": replace(MINI, tied=False, qk_norm=True, kv_heads=1, window=5, checkpointing=True),
}
TINY_AND_SMALL = {name: PROFILES[name] for name in ("tiny", "small")}


def live(config: Config, seed: int = 3) -> models.LiveModel:
    built = models.build("decoder_transformer", asdict(config))
    built.load(make_version0(built.manifest, seed))
    return built


def test_every_family_has_a_torch_half() -> None:
    assert sorted(models.families()) == sorted(core_families())


@pytest.mark.parametrize("name", [*VARIANTS, *TINY_AND_SMALL])
def test_a_built_model_has_the_manifests_names_shapes_and_order(name: str) -> None:
    config = (VARIANTS | TINY_AND_SMALL)[name]
    built = models.build("decoder_transformer", asdict(config))
    manifest = manifest_of("decoder_transformer", asdict(config))
    named = [(n, tuple(p.shape)) for n, p in built.module.named_parameters()]
    assert named == [(t.name, t.shape) for t in manifest.tensors]
    assert sum(p.numel() for p in built.module.parameters()) == manifest.parameters


@pytest.mark.parametrize("name", PROFILES)
def test_every_profile_has_its_manifests_parameters(name: str) -> None:
    with torch.device("meta"):
        built = models.build("decoder_transformer", asdict(PROFILES[name]), "meta")
    found = sum(p.numel() for p in built.module.parameters())
    assert found == built.manifest.parameters


def test_an_unknown_family_is_refused() -> None:
    with pytest.raises(InvalidSpec):
        models.build("perceptron", {})


def test_a_model_that_differs_from_the_manifest_is_refused() -> None:
    manifest = ParameterManifest((TensorSpec("weight", (3, 2)),))
    with pytest.raises(Integrity, match="weight"):
        models.LiveModel(nn.Linear(3, 2, bias=False), manifest)


@pytest.mark.parametrize("name", VARIANTS)
def test_a_prediction_depends_on_the_past_alone(name: str) -> None:
    module = live(VARIANTS[name]).module.eval()
    tokens = torch.randint(0, 19, (2, 12), generator=torch.Generator().manual_seed(1))
    changed = tokens.clone()
    changed[:, 8] = (changed[:, 8] + 1) % 19
    with torch.no_grad():
        before, after = module(tokens), module(changed)
    torch.testing.assert_close(before[:, :8], after[:, :8])
    assert not torch.allclose(before[:, 8:], after[:, 8:])


def test_a_window_hides_what_lies_further_back() -> None:
    # Two layers with a window of 3 reach 4 positions back.
    module = live(VARIANTS["window"]).module.eval()
    tokens = torch.randint(0, 19, (1, 12), generator=torch.Generator().manual_seed(1))
    changed = tokens.clone()
    changed[:, 2] = (changed[:, 2] + 1) % 19
    with torch.no_grad():
        before, after = module(tokens), module(changed)
    torch.testing.assert_close(before[:, 7:], after[:, 7:])
    assert not torch.allclose(before[:, 6], after[:, 6])


def test_grouped_queries_equal_repeated_key_heads() -> None:
    grouped = live(VARIANTS["grouped"])
    full = models.build("decoder_transformer", asdict(MINI))
    weights = make_version0(grouped.manifest, 3)
    for i in range(MINI.layers):
        for part in "kv":
            name = f"blocks.{i}.attn.{part}.weight"
            heads = weights[name].reshape(2, 4, 16)
            weights[name] = np.ascontiguousarray(np.repeat(heads, 2, 0).reshape(16, 16))
    full.load(weights)
    tokens = torch.randint(0, 19, (2, 7))
    torch.testing.assert_close(full.module(tokens), grouped.module(tokens))


def test_checkpointing_changes_no_gradient() -> None:
    rows = torch.randint(0, 19, (2, 9))
    gradients = []
    for name in ("plain", "checkpointing"):
        module = live(VARIANTS[name]).module.train()
        sequence_loss(module, rows).backward()
        gradients.append([p.grad for p in module.parameters()])
    torch.testing.assert_close(gradients[0], gradients[1])


def test_rotation_depends_on_the_distance_alone() -> None:
    cos, sin = rope_tables(32, 8, 10000.0)
    q, k = torch.randn(2, 1, 8, generator=torch.Generator().manual_seed(0))
    scores = rotate(q.expand(32, 8), cos, sin) @ rotate(k.expand(32, 8), cos, sin).T
    torch.testing.assert_close(scores[5, 2], scores[25, 22], rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(rotate(q, cos[:1], sin[:1]), q)


def test_rotary_tables_are_no_weights() -> None:
    built = live(MINI)
    built.module(torch.zeros(1, 5, dtype=torch.int64))
    assert set(built.module.state_dict()) == {t.name for t in built.manifest.tensors}


def test_weights_survive_a_load_and_a_store() -> None:
    built = live(VARIANTS["everything"])
    weights = make_version0(built.manifest, 5)
    built.load(weights)
    stored = built.store(weights)
    for name, array in weights.items():
        np.testing.assert_array_equal(stored[name], array)


def test_canonical_and_live_weights_never_share_storage() -> None:
    built = live(MINI)
    weights = make_version0(built.manifest, 5)
    kept = {n: a.copy() for n, a in weights.items()}
    built.load(weights)
    stored = built.store(weights)
    with torch.no_grad():
        for p in built.module.parameters():
            p.add_(1)
    for name in weights:
        np.testing.assert_array_equal(weights[name], kept[name])
        np.testing.assert_array_equal(stored[name], kept[name])
        assert not np.shares_memory(stored[name], weights[name])


def test_read_only_weights_can_be_loaded() -> None:
    built = live(MINI)
    weights = make_version0(built.manifest, 5)
    for array in weights.values():
        array.flags.writeable = False
    built.load(weights)


def test_a_bf16_model_reports_its_change_and_not_its_rounding() -> None:
    manifest = ParameterManifest((TensorSpec("weight", (4, 4), init=Init("uniform", 0.3)),))
    built = models.LiveModel(nn.Linear(4, 4, bias=False).to(torch.bfloat16), manifest)
    base = make_version0(manifest, 1)
    built.load(base)
    np.testing.assert_array_equal(built.store(base)["weight"], base["weight"])
    with torch.no_grad():
        built.module.weight[0, 0] += 1.0
    delta = built.store(base)["weight"] - base["weight"]
    assert abs(delta[0, 0] - 1.0) < 0.01
    assert np.count_nonzero(delta) == 1


class Normed(nn.Module):
    """BatchNorm and a frozen bf16 table: every role of a tensor."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Parameter(torch.zeros(5, 3, dtype=torch.bfloat16))
        self.norm = nn.BatchNorm1d(3)


NORMED = ParameterManifest(
    (
        TensorSpec("table", (5, 3), "BF16", "frozen", Init("uniform", 0.5)),
        TensorSpec("norm.weight", (3,), init=Init("constant", value=1.0)),
        TensorSpec("norm.bias", (3,)),
        TensorSpec("norm.running_mean", (3,), role="float_buffer"),
        TensorSpec("norm.running_var", (3,), role="float_buffer", init=Init("constant", 0, 1.0)),
        TensorSpec("norm.num_batches_tracked", (), "I64", "int_buffer"),
    )
)


def test_buffers_travel_and_frozen_tensors_do_not() -> None:
    built = models.LiveModel(Normed(), NORMED)
    base = make_version0(NORMED, 2)
    built.load(base)
    built.module.train()
    built.module.norm(built.module.table[:4].float() + 1)
    stored = built.store(base)
    assert set(stored) == {t.name for t in NORMED.travelling}
    assert stored["norm.num_batches_tracked"] == 1
    assert stored["norm.num_batches_tracked"].dtype == np.int64
    assert np.all(stored["norm.running_mean"] != base["norm.running_mean"])
    assert not built.module.table.requires_grad
    bits = built.module.table.detach().view(torch.int16).numpy().view(np.uint16)
    np.testing.assert_array_equal(bits, base["table"])
    assert len(built.buffers()) == 3


def test_generation_repeats_itself_with_its_seed() -> None:
    module = live(MINI).module
    texts = [
        generate(module, [1, 2], 12, temperature=1.0, seed=s, context=8, device="cpu")
        for s in (7, 7, 8)
    ]
    assert texts[0] == texts[1] != texts[2]
    assert len(texts[0]) == 12
    assert all(0 <= t < 19 for t in texts[0])


def test_a_cold_generation_takes_the_likeliest_token_and_stops_at_the_end() -> None:
    module = live(MINI).module
    with torch.no_grad():
        first = int(module(torch.tensor([[4]]))[0, -1].argmax())
    text = generate(module, [4], 3, temperature=0, seed=0, context=8, device="cpu")
    assert text[0] == first
    assert (
        generate(module, [4], 3, temperature=0, seed=0, context=8, device="cpu", stop=first) == []
    )


def test_generation_refuses_an_empty_prompt() -> None:
    with pytest.raises(ValueError, match="prompt"):
        generate(live(MINI).module, [], 3, temperature=1, seed=0, context=8, device="cpu")
