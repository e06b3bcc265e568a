from __future__ import annotations

from dataclasses import asdict, replace

import pytest
import torch
from torch import nn

from distribai.core.architectures.decoder_transformer import Config, hidden_matrices
from distribai.core.spec import OptimizerSpec
from distribai.training.optimizers import (
    NEWTON_SCHULZ,
    NEWTON_SCHULZ_STEPS,
    InnerOptimizer,
    Muon,
    muon_names,
    orthogonalize,
)

SHAPES = [(8, 8), (6, 10), (10, 6), (8, 8), (6, 10)]


def matrices(seed: int = 0) -> list[nn.Parameter]:
    chance = torch.Generator().manual_seed(seed)
    return [nn.Parameter(torch.randn(s, generator=chance)) for s in SHAPES]


def give_gradients(params: list[nn.Parameter], seed: int) -> None:
    chance = torch.Generator().manual_seed(seed)
    for p in params:
        p.grad = torch.randn(p.shape, generator=chance)


def test_orthogonalized_matrices_have_singular_values_near_one() -> None:
    x = torch.randn(3, 6, 10, generator=torch.Generator().manual_seed(0))
    values = torch.linalg.svdvals(orthogonalize(x))
    assert values.min() > 0.5
    assert values.max() < 1.3


def test_wide_matrices_come_out_as_by_the_plain_iteration() -> None:
    x = torch.randn(2, 6, 15, generator=torch.Generator().manual_seed(0))
    plain = x / torch.linalg.matrix_norm(x)[:, None, None]
    a, b, c = NEWTON_SCHULZ
    for _ in range(NEWTON_SCHULZ_STEPS):
        gram = plain @ plain.mT
        plain = a * plain + (b * gram + c * gram @ gram) @ plain
    torch.testing.assert_close(orthogonalize(x), plain, rtol=1e-3, atol=1e-4)


def test_a_zero_gradient_stays_zero() -> None:
    assert torch.count_nonzero(orthogonalize(torch.zeros(1, 4, 5))) == 0


def test_batched_muon_equals_torchs_within_its_bf16() -> None:
    ours, theirs = matrices(), matrices()
    mine = Muon(ours, lr=0.1, momentum=0.9, weight_decay=0.2)
    reference = torch.optim.Muon(theirs, lr=0.1, momentum=0.9, weight_decay=0.2)
    start = [p.detach().clone() for p in ours]
    for step in range(4):
        give_gradients(ours, step)
        give_gradients(theirs, step)
        mine.step()
        reference.step()
    for a, b, s in zip(ours, theirs, start, strict=True):
        moved = torch.linalg.vector_norm(b.detach() - s)
        assert torch.linalg.vector_norm((a - b).detach()) < 0.02 * moved


def test_muon_skips_parameters_without_a_gradient() -> None:
    params = matrices()
    before = params[1].detach().clone()
    give_gradients(params, 0)
    params[1].grad = None
    Muon(params, lr=0.1, weight_decay=0.5).step()
    torch.testing.assert_close(params[1].detach(), before)


def test_muon_refuses_vectors_and_closures() -> None:
    with pytest.raises(ValueError, match="matrices"):
        Muon([nn.Parameter(torch.zeros(3))], lr=0.1)
    with pytest.raises(ValueError, match="closure"):
        Muon(matrices(), lr=0.1).step(lambda: 0.0)


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(5, 4)
        self.hidden = nn.Linear(4, 4)
        self.frozen = nn.Linear(4, 4).requires_grad_(False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.frozen(self.hidden(self.embed(x)))


def stepped(spec: OptimizerSpec, factor: float = 1.0) -> tuple[Model, Model]:
    torch.manual_seed(0)
    model, before = Model(), Model()
    before.load_state_dict(model.state_dict())
    optimizer = InnerOptimizer(spec, model, {"hidden.weight"})
    model(torch.tensor([1, 2])).square().sum().backward()
    optimizer.set_factor(factor)
    optimizer.step()
    return model, before


def test_adamw_equals_torchs_and_decays_matrices_only() -> None:
    spec = OptimizerSpec(name="adamw", lr=0.01, weight_decay=0.5)
    model, reference = stepped(spec)
    groups = [
        {"params": [reference.embed.weight, reference.hidden.weight], "weight_decay": 0.5},
        {"params": [reference.hidden.bias], "weight_decay": 0.0},
    ]
    adamw = torch.optim.AdamW(groups, lr=0.01, betas=(0.9, 0.95))
    reference(torch.tensor([1, 2])).square().sum().backward()
    adamw.step()
    for a, b in zip(model.parameters(), reference.parameters(), strict=True):
        torch.testing.assert_close(a, b)


def test_muon_takes_the_named_matrices_and_adamw_the_rest() -> None:
    model, before = stepped(OptimizerSpec(name="muon", lr=0.0, muon_lr=0.1, weight_decay=0.0))
    moved = model.hidden.weight - before.hidden.weight
    assert 0.04 < torch.linalg.matrix_norm(moved, 2) < 0.14
    torch.testing.assert_close(model.embed.weight, before.embed.weight)
    torch.testing.assert_close(model.hidden.bias, before.hidden.bias)


def test_a_factor_of_zero_moves_nothing() -> None:
    model, before = stepped(OptimizerSpec(), 0.0)
    for a, b in zip(model.parameters(), before.parameters(), strict=True):
        torch.testing.assert_close(a, b, rtol=0, atol=0)


def test_frozen_parameters_are_not_the_optimizers() -> None:
    torch.manual_seed(0)
    model = Model()
    optimizer = InnerOptimizer(OptimizerSpec(), model)
    assert len(optimizer.parameters) == 3
    assert not any(p is model.frozen.weight for p in optimizer.parameters)


def test_reset_forgets_the_moments() -> None:
    spec = replace(OptimizerSpec(), weight_decay=0.0)
    torch.manual_seed(0)
    model = Model()
    optimizer = InnerOptimizer(spec, model, {"hidden.weight"})
    start = {n: p.detach().clone() for n, p in model.named_parameters()}
    ends = []
    for _ in range(2):
        optimizer.reset()
        model.load_state_dict(start)
        for _ in range(2):
            optimizer.zero_grad()
            model(torch.tensor([1, 2])).square().sum().backward()
            optimizer.step()
        ends.append(model.hidden.weight.detach().clone())
    assert torch.equal(ends[0], ends[1])


def test_muon_names_are_the_core_halfs_hidden_matrices() -> None:
    config = Config(dim=8, layers=1, heads=2, ffn_dim=8, tied=False)
    names = muon_names("decoder_transformer", asdict(config))
    assert names == hidden_matrices(config)
    assert "head.weight" not in names
    assert len(names) == 7
