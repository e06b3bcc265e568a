"""Virtual machines: what they are, when they fail, and what perfect recovery could make of them."""

from __future__ import annotations

import math
import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Outage:
    """A machine dies at second ``at`` and is back ``down_s`` later.

    With ``keeps_disk`` it has its key, its weights, and its tasks as of their last checkpoints.
    Without, it begins with nothing: with the same key (restored from elsewhere) if ``keeps_key``,
    as a stranger otherwise.
    """

    at: float
    down_s: float
    keeps_disk: bool = True
    keeps_key: bool = False

    @property
    def until(self) -> float:
        """When it is back."""
        return self.at + self.down_s


@dataclass(frozen=True, slots=True)
class Machine:
    """One virtual contributor with one device.

    ``step_s`` seconds per inner step on average; each task is faster or slower by ``noise``
    (standard deviation of its rate, relative). ``up`` and ``down`` bytes per second, ``latency_s``
    seconds one way. A checkpoint of the running task every ``checkpoint_steps`` steps (0: none).
    ``joins_at`` and ``leaves_at`` in seconds from the start; ``outages`` in order, apart, between
    the two.
    """

    name: str
    step_s: float = 1.0
    noise: float = 0.0
    up: float = 2.5e6
    down: float = 12.5e6
    latency_s: float = 0.02
    checkpoint_steps: int = 10
    joins_at: float = 0.0
    leaves_at: float = math.inf
    outages: tuple[Outage, ...] = ()

    def __post_init__(self) -> None:
        ends = [self.joins_at, *(t for o in self.outages for t in (o.at, o.until))]
        if ends != sorted(ends) or ends[-1] > self.leaves_at:
            raise ValueError(f"the outages of {self.name} are not in order, or outside of its life")

    def lives(self) -> Iterator[tuple[float, float, Outage | None]]:
        """From when to when it runs, and what ends it."""
        start = self.joins_at
        for outage in self.outages:
            yield start, outage.at, outage
            start = outage.until
        yield start, self.leaves_at, None


@dataclass(frozen=True, slots=True)
class Fleet:
    """How machines are drawn.

    ``spread`` is the standard deviation of the logarithm of their speeds. Outages come as a Poisson
    process while a machine runs, ``between_s`` seconds apart on average; a share ``lose_disk`` of
    them takes the disk along, and of those a share ``keep_key`` not the key. Being down takes
    log-normal seconds with median ``down_s`` and ``down_spread``.
    """

    count: int
    step_s: float = 1.0
    spread: float = 0.0
    noise: float = 0.0
    up: float = 2.5e6
    down: float = 12.5e6
    latency_s: float = 0.02
    checkpoint_steps: int = 10
    between_s: float = math.inf
    lose_disk: float = 0.0
    keep_key: float = 0.0
    down_s: float = 60.0
    down_spread: float = 0.5

    def draw(self, seed: int, horizon_s: float) -> tuple[Machine, ...]:
        """The machines of ``seed``, with their outages within ``horizon_s`` seconds."""
        return tuple(self._machine(seed, i, horizon_s) for i in range(self.count))

    def _machine(self, seed: int, number: int, horizon_s: float) -> Machine:
        rng = random.Random(f"{seed}/machine/{number}")
        speed = math.exp(rng.gauss(0.0, self.spread))
        outages: list[Outage] = []
        now = 0.0
        while math.isfinite(self.between_s):
            now += rng.expovariate(1.0 / self.between_s)
            if now >= horizon_s:
                break
            down = self.down_s * math.exp(rng.gauss(0.0, self.down_spread))
            keeps = rng.random() >= self.lose_disk
            outages.append(Outage(now, down, keeps, rng.random() < self.keep_key))
            now += down
        return Machine(
            name=f"machine-{number:04d}",
            step_s=self.step_s / speed,
            noise=self.noise,
            up=self.up,
            down=self.down,
            latency_s=self.latency_s,
            checkpoint_steps=self.checkpoint_steps,
            outages=tuple(outages),
        )


def living_s(machine: Machine, start: float, stop: float) -> float:
    """Seconds of ``start..stop`` in which a machine runs."""
    return sum(max(0.0, min(b, stop) - max(a, start)) for a, b, _ in machine.lives())


def capacity(machines: Sequence[Machine], start: float, stop: float) -> float:
    """Inner steps that the machines could do in ``start..stop`` if they did nothing else."""
    return sum(living_s(m, start, stop) / m.step_s for m in machines)


def ceiling(machines: Sequence[Machine], boundaries: Sequence[float]) -> float:
    """The goodput that perfect recovery from these outages allows.

    Perfect: every living second is spent on inner steps, nothing is ever waited for or sent, and
    an outage costs only what it must. One that keeps the disk costs the steps since the last
    checkpoint; one that loses it costs all that the machine has done in the round so far.
    ``boundaries`` are the seconds at which rounds began, and the last one ended.

    Raises:
        ValueError: there are fewer than two boundaries.
    """
    if len(boundaries) < 2:
        raise ValueError("a ceiling needs at least one round")
    start, stop = boundaries[0], boundaries[-1]
    lost = sum(_lost_s(m, boundaries) / m.step_s for m in machines)
    return 1.0 - lost / capacity(machines, start, stop)


def _lost_s(machine: Machine, boundaries: Sequence[float]) -> float:
    """Seconds of work that the outages must cost."""
    lost = done = 0.0
    ends = iter(boundaries)
    limit = next(ends)
    every = machine.checkpoint_steps * machine.step_s
    for start, stop, outage in machine.lives():
        at = max(start, boundaries[0])
        stop = min(stop, boundaries[-1])
        if at >= stop:
            continue
        while limit <= at:
            # What was done in a round before counts in it.
            limit, done = next(ends, math.inf), 0.0
        while limit < stop:
            at, done = limit, 0.0
            limit = next(ends, math.inf)
        done += stop - at
        if outage is None or outage.at >= boundaries[-1]:
            continue
        gone = done if not (outage.keeps_disk and every) else done % every
        lost += gone
        done -= gone
    return lost
