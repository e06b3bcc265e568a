"""The inner loop: H optimizer steps of one node between two versions (algorithms.md A1).

The batch of a step is fixed by the job. When it does not fit into memory the loop halves the
*micro-batch* and accumulates gradients, so that a step means the same on every device.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Protocol

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional

from distribai.core.schedule import lr_factor
from distribai.core.spec import ScheduleSpec
from distribai.errors import DistribAIError, InternalFault
from distribai.training.devices import autocast
from distribai.training.optimizers import InnerOptimizer

REPORT_EVERY_S = 2.0
"""Least seconds between two reports of progress, where nothing else is asked for."""

NEWCOMER_WARMUP = 20
"""Steps over which a newcomer with fresh moments rises to the others' rate (A1, ``keep``)."""


class OutOfMemory(DistribAIError):
    """Not even one sequence at a time fits into memory."""

    http_status = 507


class Gate(Protocol):
    """What the loop asks between two steps."""

    @property
    def exact(self) -> bool:
        """Whether ``step_seconds`` must be the device's time, not merely the host's."""
        ...

    def __call__(self, step_seconds: float, left: int = 0) -> bool:
        """Sleep or block as the limits say; False ends the task after the present step.

        ``left`` steps are still to be done; 0 where there is nothing to end early.
        """
        ...


class Report(Protocol):
    """Receives progress."""

    def __call__(self, step: int, loss: float, tokens_per_s: float) -> None:
        """``step`` steps are done; ``loss`` is the mean since the last report."""
        ...


class OpenGate:
    """A gate without limits."""

    exact = False

    def __call__(self, step_seconds: float, left: int = 0) -> bool:
        """Always go on."""
        return True


def no_report(step: int, loss: float, tokens_per_s: float) -> None:
    """Progress that nobody wants."""


@dataclass(frozen=True, slots=True)
class Mark:
    """How far a task is: ``steps`` done on ``tokens`` target tokens in ``seconds``, with the
    ``micro_batch`` that fits (0: the whole batch)."""

    steps: int
    tokens: int
    seconds: float
    micro_batch: int


class Keep(Protocol):
    """Is offered the state between two steps."""

    def __call__(self, mark: Mark, losses: Tensor) -> None:
        """``losses`` of the steps so far, shape (steps,), on the device. The model and the
        optimizer hold the state after ``mark.steps`` steps and do not change during the call."""
        ...


def no_keep(mark: Mark, losses: Tensor) -> None:
    """A state that nobody keeps."""


@dataclass(frozen=True, slots=True)
class Plan:
    """What one call trains: ``steps`` from global inner step ``offset`` of ``total``.

    ``rewarm`` steps of linear rise on top of the schedule (a newcomer's); ``clip`` is the largest
    global gradient norm.
    """

    schedule: ScheduleSpec
    total: int
    offset: int
    steps: int
    batch: int
    clip: float
    rewarm: int = 0

    def factor(self, step: int) -> float:
        """The learning rate's share of its peak at local ``step`` (from 0)."""
        rise = min(1.0, (step + 1) / self.rewarm) if self.rewarm else 1.0
        return rise * lr_factor(self.schedule, self.offset + step, self.total)


@dataclass(frozen=True, slots=True)
class Trained:
    """What was really done. Losses are means over the first and the last tenth of the steps
    (at least one); ``seconds`` on the injected clock."""

    steps: int
    tokens: int
    loss_first: float
    loss_last: float
    seconds: float


def sequence_loss(model: Callable[[Tensor], Tensor], rows: Tensor) -> Tensor:
    """Mean cross-entropy in nats per target token of ``rows`` (n, length + 1)."""
    logits = model(rows[:, :-1])
    return functional.cross_entropy(logits.flatten(0, 1).float(), rows[:, 1:].flatten())


def is_out_of_memory(problem: BaseException) -> bool:
    """Whether an exception means that an allocation failed, on any device."""
    if isinstance(problem, (torch.OutOfMemoryError, MemoryError)):
        return True
    text = str(problem)
    return isinstance(problem, RuntimeError) and (
        "DefaultCPUAllocator" in text or "MPS backend out of memory" in text
    )


@dataclass(slots=True)
class InnerLoop:
    """Trains a model; keeps the micro-batch that fits from one task to the next.

    Args:
        model: on ``device``, in training mode.
        optimizer: over the model's parameters.
        device: torch's name of it.
        precision: ``auto``, ``fp32`` or ``bf16``, see :mod:`distribai.training.devices`.
        clock: seconds, monotonic.
        buffers: tensors that a forward pass changes; a repeated step starts from them again.
        compiled: run forward and loss through ``torch.compile``.
    """

    model: nn.Module
    optimizer: InnerOptimizer
    device: str
    precision: str
    clock: Callable[[], float]
    buffers: Sequence[Tensor] = ()
    compiled: bool = False
    micro_batch: int = 0
    _loss: Callable[[Callable[[Tensor], Tensor], Tensor], Tensor] = field(init=False)

    def __post_init__(self) -> None:
        self._loss = torch.compile(sequence_loss) if self.compiled else sequence_loss

    def run(
        self,
        plan: Plan,
        batches: Iterator[np.ndarray],
        gate: Gate | None = None,
        report: Report = no_report,
        keep: Keep = no_keep,
        start: tuple[Mark, Tensor] | None = None,
        report_every_s: float = REPORT_EVERY_S,
    ) -> Trained:
        """Train ``plan.steps`` steps, fewer when the gate says so.

        ``report`` hears of the first step, then every ``report_every_s`` at most: a task of a
        second is seen at work too. Of the last step it hears nothing: the end says it all.

        ``batches`` yields each step's rows (batch, length + 1), int64. ``start`` goes on from what
        ``keep`` was given: the model and the optimizer hold that state again, and ``batches``
        begins with the next step's rows. The steps that follow are the same, bit for bit where the
        device is.

        Raises:
            OutOfMemory: ``node.memory``: one sequence does not fit.
            InternalFault: ``tensor.nonfinite``: the loss became NaN or infinite.
        """
        if plan.steps < 1:
            raise ValueError("a task trains at least one step")
        gate = gate or OpenGate()
        self.model.train()
        done = tokens = 0
        began = mark = started = self.clock()
        reported_at = -math.inf
        losses = _Losses(plan.steps, self.device)
        if start is not None:
            earlier, known = start
            done, tokens, self.micro_batch = earlier.steps, earlier.tokens, earlier.micro_batch
            began -= earlier.seconds
            losses.restore(known)
        reported_tokens = tokens
        while done < plan.steps:
            rows = torch.from_numpy(next(batches)).to(self.device, non_blocking=True)
            self.optimizer.set_factor(plan.factor(done))
            losses.add(done, self._gradients(rows))
            nn.utils.clip_grad_norm_(self.optimizer.parameters, plan.clip)
            self.optimizer.step()
            done += 1
            tokens += rows.shape[0] * (rows.shape[1] - 1)
            if gate.exact:
                losses.synchronize(done)
            now = self.clock()
            go_on = gate(now - mark, plan.steps - done)
            if go_on and done < plan.steps:
                so_far = Mark(done, tokens, self.clock() - began, self.micro_batch)
                keep(so_far, losses.so_far(done))
            mark = self.clock()
            if mark - reported_at >= report_every_s and done < plan.steps:
                elapsed = mark - max(reported_at, started)
                speed = (tokens - reported_tokens) / elapsed if elapsed > 0 else 0.0
                report(done, _finite(losses.since_report(done), done), speed)
                reported_at, reported_tokens = mark, tokens
            if not go_on:
                break
        first, last = (_finite(x, done) for x in losses.ends(done))
        self.optimizer.zero_grad()
        return Trained(done, tokens, first, last, self.clock() - began)

    def _gradients(self, rows: Tensor) -> Tensor:
        """Gradients of the mean loss over ``rows``, halving the micro-batch as often as needed.

        Returns the detached loss. A repeated step starts from the same buffers, so it is the
        same step.
        """
        kept = [b.clone() for b in self.buffers]
        while True:
            size = self.micro_batch or rows.shape[0]
            self.optimizer.zero_grad()
            try:
                return self._accumulate(rows, size)
            except (RuntimeError, MemoryError) as problem:
                if not is_out_of_memory(problem):
                    raise
                if size <= 1:
                    raise OutOfMemory(
                        "node.memory",
                        f"One sequence of {rows.shape[1] - 1} tokens does not fit into the "
                        f"memory of {self.device}.",
                        "Use a smaller model or sequence length, or a larger machine.",
                    ) from None
            # Outside the handler: the exception's traceback keeps the failed activations alive.
            self.micro_batch = -(-min(size, rows.shape[0]) // 2)
            for buffer, before in zip(self.buffers, kept, strict=True):
                buffer.copy_(before)
            if self.device.startswith("cuda"):
                torch.cuda.empty_cache()

    def _accumulate(self, rows: Tensor, size: int) -> Tensor:
        if size >= rows.shape[0]:
            with autocast(self.device, self.precision):
                loss = self._loss(self.model, rows)
            loss.backward()  # type: ignore[no-untyped-call]
            return loss.detach()
        total = torch.zeros((), device=rows.device)
        for part in torch.split(rows, size):
            with autocast(self.device, self.precision):
                loss = self._loss(self.model, part) * (part.shape[0] / rows.shape[0])
            loss.backward()  # type: ignore[no-untyped-call]
            total += loss.detach()
        return total


class _Losses:
    """Losses of the steps on the device; read only when somebody wants a figure."""

    def __init__(self, steps: int, device: str) -> None:
        self._values = torch.zeros(steps, device=device)
        self._reported = 0

    def add(self, step: int, loss: Tensor) -> None:
        self._values[step] = loss

    def restore(self, known: Tensor) -> None:
        """The losses of the steps that were done before."""
        self._reported = known.numel()
        self._values[: self._reported] = known.to(self._values.device)

    def so_far(self, done: int) -> Tensor:
        return self._values[:done]

    def synchronize(self, done: int) -> None:
        """Wait until the device has finished the steps so far."""
        self._values[done - 1].item()

    def since_report(self, done: int) -> float:
        mean = self._values[self._reported : done].mean().item()
        self._reported = done
        return mean

    def ends(self, done: int) -> tuple[float, float]:
        values = self._values[:done]
        tenth = max(1, done // 10)
        return values[:tenth].mean().item(), values[-tenth:].mean().item()


def _finite(loss: float, step: int) -> float:
    if not math.isfinite(loss):
        raise InternalFault(
            "tensor.nonfinite",
            f"The training loss is {loss} after {step} steps of this round.",
            "Lower the learning rate (optimizer.lr, optimizer.muon_lr).",
        )
    return loss


@torch.no_grad()
def held_out_loss(
    model: nn.Module, batches: Iterable[np.ndarray], device: str, precision: str
) -> tuple[float, int]:
    """Mean cross-entropy in nats per token over ``batches`` of rows, and the tokens it is over.

    Every token counts the same, also in a short last batch. The model is left in training mode.
    """
    model.eval()
    try:
        total, tokens = 0.0, 0
        for rows in batches:
            with autocast(device, precision):
                loss = sequence_loss(model, torch.from_numpy(rows).to(device))
            count = rows.shape[0] * (rows.shape[1] - 1)
            total += loss.item() * count
            tokens += count
    finally:
        model.train()
    if not tokens:
        raise ValueError("no held-out batch was given")
    return total / tokens, tokens
