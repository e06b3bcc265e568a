from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterator
from dataclasses import replace

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from distribai.core.schedule import lr_factor
from distribai.core.spec import OptimizerSpec, ScheduleSpec
from distribai.errors import InternalFault
from distribai.training import devices
from distribai.training.loop import (
    InnerLoop,
    OutOfMemory,
    Plan,
    held_out_loss,
    is_out_of_memory,
    sequence_loss,
)
from distribai.training.optimizers import InnerOptimizer

VOCAB = 7


class Bigram(nn.Module):
    """Next-token logits from the token alone; BatchNorm on request; a memory that can run out."""

    def __init__(self, normed: bool = False, fits: int = 99, error: type = MemoryError) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embed = nn.Embedding(VOCAB, 6)
        self.norm = nn.BatchNorm1d(6) if normed else None
        self.head = nn.Linear(6, VOCAB)
        self.fits, self.error = fits, error
        self.sizes: list[int] = []

    def forward(self, tokens: Tensor) -> Tensor:
        self.sizes.append(len(tokens))
        x = self.embed(tokens)
        if self.norm is not None:
            x = self.norm(x.flatten(0, 1)).view_as(x)
        if len(tokens) > self.fits:
            raise self.error("DefaultCPUAllocator: can't allocate memory")
        return self.head(x)


def rows(step: int, batch: int = 8, length: int = 5) -> np.ndarray:
    return np.random.default_rng(step).integers(0, VOCAB, (batch, length + 1))


def stream(batch: int = 8) -> Iterator[np.ndarray]:
    return (rows(step, batch) for step in itertools.count())


def same() -> Iterator[np.ndarray]:
    return itertools.repeat(rows(0))


def loop(
    model: nn.Module, clock: Callable[[], float] = lambda: 0.0, precision: str = "fp32"
) -> InnerLoop:
    spec = OptimizerSpec(lr=0.02, muon_lr=0.05)
    optimizer = InnerOptimizer(spec, model, {"head.weight"})
    return InnerLoop(model, optimizer, "cpu", precision, clock, buffers=[*model.buffers()])


def plan(steps: int, **knobs: int) -> Plan:
    schedule = ScheduleSpec(warmup=2)
    return replace(Plan(schedule, total=20, offset=0, steps=steps, batch=8, clip=1.0), **knobs)


def weights(model: nn.Module) -> list[np.ndarray]:
    return [p.detach().numpy().copy() for p in model.state_dict().values()]


def test_training_lowers_the_loss_and_counts_what_it_did() -> None:
    model = Bigram()
    done = loop(model).run(plan(20), same())
    assert done.loss_last < done.loss_first
    assert (done.steps, done.tokens) == (20, 20 * 8 * 5)


def test_two_rounds_follow_one_schedule() -> None:
    rates = []

    class Watched(InnerOptimizer):
        def set_factor(self, factor: float) -> None:
            rates.append(factor)
            super().set_factor(factor)

    model = Bigram()
    trainer = InnerLoop(model, Watched(OptimizerSpec(), model), "cpu", "fp32", lambda: 0.0)
    trainer.run(plan(10), stream())
    trainer.run(plan(10, offset=10), stream())
    assert rates == [lr_factor(ScheduleSpec(warmup=2), i, 20) for i in range(20)]


def test_a_newcomer_rises_linearly_to_the_schedule() -> None:
    late = plan(10, offset=10, rewarm=4)
    full = plan(10, offset=10)
    assert late.factor(0) == full.factor(0) / 4
    assert late.factor(3) == full.factor(3)
    assert late.factor(9) == full.factor(9)


@pytest.mark.parametrize("error", [MemoryError, RuntimeError, torch.OutOfMemoryError])
def test_out_of_memory_halves_the_micro_batch_and_keeps_the_batch(error: type) -> None:
    model, roomy = Bigram(fits=2, error=error), Bigram()
    trainer = loop(model)
    trainer.run(plan(3), stream())
    loop(roomy).run(plan(3), stream())
    assert trainer.micro_batch == 2
    assert model.sizes == [8, 4, *[2] * 12]
    for a, b in zip(weights(model), weights(roomy), strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-5)


def test_an_odd_batch_is_split_and_weighed_by_its_parts() -> None:
    model, roomy = Bigram(fits=3), Bigram()
    for m in (model, roomy):
        loop(m).run(plan(2), stream(7))
    assert model.sizes == [7, 4, *[2, 2, 2, 1] * 2]
    for a, b in zip(weights(model), weights(roomy), strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-5)


def test_a_repeated_step_starts_from_the_same_buffers() -> None:
    short, small = Bigram(normed=True, fits=4), Bigram(normed=True)
    starved, knowing = loop(short), loop(small)
    knowing.micro_batch = 4
    starved.run(plan(3), stream())
    knowing.run(plan(3), stream())
    for a, b in zip(weights(short), weights(small), strict=True):
        np.testing.assert_array_equal(a, b)


def test_one_sequence_that_does_not_fit_is_said_so() -> None:
    with pytest.raises(OutOfMemory) as caught:
        loop(Bigram(fits=0)).run(plan(3), stream())
    assert caught.value.code == "node.memory"


def test_other_runtime_errors_are_not_taken_for_memory() -> None:
    class Broken(Bigram):
        def forward(self, tokens: Tensor) -> Tensor:
            raise RuntimeError("shapes differ")

    with pytest.raises(RuntimeError, match="shapes"):
        loop(Broken()).run(plan(3), stream())
    assert not is_out_of_memory(ValueError("DefaultCPUAllocator"))


def test_the_gate_ends_the_task_after_the_present_step() -> None:
    class Third:
        exact = True

        def __call__(self, step_seconds: float, left: int = 0) -> bool:
            seen.append(step_seconds)
            return len(seen) < 3

    seen: list[float] = []
    ticks = itertools.count()
    done = loop(Bigram(), clock=lambda: float(next(ticks))).run(plan(9), stream(), Third())
    assert done.steps == 3
    assert done.tokens == 3 * 8 * 5
    assert seen == [1.0, 1.0, 1.0]


def test_progress_is_reported_at_the_first_step_and_then_at_most_as_often_as_asked() -> None:
    now = [0.0]

    class Slow:
        exact = False

        def __call__(self, step_seconds: float, left: int = 0) -> bool:
            now[0] += 0.75
            return True

    reports: list[tuple[int, float, float]] = []
    loop(Bigram(), clock=lambda: now[0]).run(
        plan(11),
        stream(),
        Slow(),
        lambda *figures: reports.append(figures),
        report_every_s=2.0,
    )
    assert [r[0] for r in reports] == [1, 4, 7, 10]
    assert all(math.isfinite(r[1]) for r in reports)
    assert reports[0][2] == pytest.approx(40 / 0.75)
    assert reports[1][2] == pytest.approx(3 * 40 / 2.25)


def test_a_clock_that_stands_still_reports_the_first_step_without_a_speed() -> None:
    reports: list[tuple[int, float, float]] = []
    loop(Bigram()).run(plan(3), stream(), report=lambda *figures: reports.append(figures))
    assert [(r[0], r[2]) for r in reports] == [(1, 0.0)]


def test_a_loss_that_is_not_finite_is_an_error() -> None:
    model = Bigram()
    with torch.no_grad():
        model.head.bias[0] = math.nan
    with pytest.raises(InternalFault) as caught:
        loop(model).run(plan(2), stream())
    assert caught.value.code == "tensor.nonfinite"


def test_frozen_parameters_stay_as_they_are() -> None:
    model = Bigram()
    model.embed.weight.requires_grad_(False)
    before = model.embed.weight.clone()
    loop(model).run(plan(2), stream())
    assert torch.equal(model.embed.weight, before)


def test_bf16_autocast_trains_fp32_weights() -> None:
    model = Bigram()
    done = loop(model, precision="bf16").run(plan(20), same())
    assert done.loss_last < done.loss_first
    assert all(p.dtype == torch.float32 for p in model.parameters())


def test_a_task_without_steps_is_refused() -> None:
    with pytest.raises(ValueError, match="one step"):
        loop(Bigram()).run(plan(0), stream())


def test_held_out_loss_weighs_tokens_and_leaves_the_model_in_training() -> None:
    model = Bigram(normed=True).train()
    before = weights(model)
    parts = [rows(1), rows(2, batch=3)]
    loss, tokens = held_out_loss(model, parts, "cpu", "fp32")
    model.eval()
    with torch.no_grad():
        whole = sequence_loss(model, torch.from_numpy(np.concatenate(parts))).item()
    assert loss == pytest.approx(whole, rel=1e-6)
    assert tokens == 11 * 5
    for a, b in zip(weights(model), before, strict=True):
        np.testing.assert_array_equal(a, b)


def test_held_out_loss_needs_a_batch() -> None:
    model = Bigram()
    with pytest.raises(ValueError, match="held-out"):
        held_out_loss(model, [], "cpu", "fp32")
    assert model.training


def test_the_cpu_is_always_there_and_missing_devices_are_refused() -> None:
    from distribai.errors import InvalidSpec

    assert devices.available()[-1] == "cpu"
    assert devices.choose("any") == devices.available()[0]
    assert devices.choose("cpu") == "cpu"
    with pytest.raises(InvalidSpec):
        devices.choose("abacus")


def test_a_cpu_computes_in_bf16_only_when_asked() -> None:
    assert not devices.uses_bf16("cpu", "auto")
    assert devices.uses_bf16("cpu", "bf16")
    assert not devices.uses_bf16("cuda", "fp32")
