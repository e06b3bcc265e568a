"""Learning rate as a pure function of the global inner step; never restarted per round (A1)."""

from __future__ import annotations

import math

from distribai.core.spec import ScheduleSpec


def lr_factor(schedule: ScheduleSpec, step: int, total: int) -> float:
    """Share of the peak learning rate at global inner ``step`` (from 0) of ``total``.

    Warm-up rises linearly to 1 at step ``warmup - 1`` and never takes more than a tenth of a short
    job. Cosine and WSD then fall to ``floor`` at the last step; constant stays at 1.
    """
    warmup = min(schedule.warmup, max(1, total // 10)) if schedule.warmup else 0
    if step < warmup:
        return (step + 1) / warmup
    if schedule.kind == "constant":
        return 1.0
    floor = schedule.floor
    if schedule.kind == "wsd":
        falling = max(1, round(schedule.decay * total))
        left = total - step
        return 1.0 if left > falling else floor + (1 - floor) * max(0, left) / falling
    progress = min(1.0, (step - warmup) / max(1, total - warmup))
    return floor + (1 - floor) * 0.5 * (1 + math.cos(math.pi * progress))
