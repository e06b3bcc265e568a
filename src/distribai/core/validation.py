"""Whether a job can be run at all: every figure of its spec, its data and its model."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Final

from distribai.core.architectures import config_from
from distribai.core.codecs import check_schedule
from distribai.core.datasets import check_built_in
from distribai.core.paradigms import paradigm
from distribai.core.plan import parameter_count, task_memory_mb
from distribai.core.snapshots import CHAIN
from distribai.core.spec import JobSpec
from distribai.errors import InvalidSpec

MAX_PARAMETERS: Final = 2_000_000_000
"""Largest model that this grid plans for."""

MAX_WORKERS: Final = 10_000

MAX_HELD_OUT: Final = 0.5

MAX_ATTEMPTS: Final = 1000

MAX_STALENESS: Final = 3
"""Versions; what is still older would count less than half (A6)."""

MAX_SNAPSHOTS: Final = 1000
"""Snapshots that a job may ask to keep by its cadence."""

MAX_NAME: Final = 100
"""Characters of a name."""

_COUNT: Final = "between 0 (off) and 10^9"

BYTE_VOCABULARY: Final = 257
"""Ids of the byte tokenizer (``data.tokenizers``)."""


def validate_spec(spec: JobSpec, *, memory_cap_bytes: int | None = None) -> None:
    """Refuse a spec that cannot be run, naming the first field that is wrong.

    What needs the data itself (its vocabulary, its length) is checked where it is prepared.

    Args:
        spec: the job.
        memory_cap_bytes: what the largest node may have; None for no limit.

    Raises:
        InvalidSpec: ``spec.steps``, ``spec.workers``, ``spec.paradigm``, ``spec.model``,
            ``spec.model_too_large``, ``spec.plan``, ``codec.unknown``, ``spec.invalid``.
        InvalidData: ``data.missing``: no built-in data set has that name.
    """
    paradigm(spec.paradigm)
    for code, field, value, allowed, rule in _figures(spec):
        if not allowed:
            raise InvalidSpec(
                code, f"{field} is {value!r}: it must be {rule}.", f"Change {field}.", field=field
            )
    for leg in ("codec_up", "codec_down"):
        check_schedule(getattr(spec.rounds, leg), f"rounds.{leg}", spec.round_count)
    _check_data(spec)
    _check_model(spec, memory_cap_bytes)


def _check_data(spec: JobSpec) -> None:
    if (spec.data.source == "blobs") != bool(spec.data.files):
        raise InvalidSpec(
            "spec.invalid",
            "data.files and data.source contradict each other: files go with the source 'blobs', "
            "and a built-in data set has none.",
            "Give files, or the name of a built-in data set.",
            field="data.source",
        )
    if not spec.data.files:
        check_built_in(spec.data.source)
    if spec.data.format == "jsonl" and not spec.data.field:
        raise InvalidSpec(
            "spec.invalid",
            "data.field is empty: JSON Lines need the name of the field with the text.",
            "Usually it is `text`.",
            field="data.field",
        )


def _check_model(spec: JobSpec, memory_cap_bytes: int | None) -> None:
    config = config_from(spec.model.family, spec.model.config)
    vocabulary = getattr(config, "vocab_size", None)
    if spec.data.tokenizer is None and vocabulary is not None and vocabulary < BYTE_VOCABULARY:
        raise InvalidSpec(
            "spec.model",
            f"The model's vocabulary of {vocabulary} is too small for bytes: they take "
            f"{BYTE_VOCABULARY} ids.",
            f"Set vocab_size to {BYTE_VOCABULARY}.",
            field="model.architecture_config.vocab_size",
        )
    parameters = parameter_count(spec)
    if parameters > MAX_PARAMETERS:
        raise InvalidSpec(
            "spec.model_too_large",
            f"The model has {parameters:.3g} parameters: this grid plans for at most "
            f"{MAX_PARAMETERS:.3g}.",
            "Take fewer layers, or smaller ones.",
            field="model",
        )
    needed = task_memory_mb(spec) << 20
    if memory_cap_bytes is not None and needed > memory_cap_bytes:
        raise InvalidSpec(
            "spec.model_too_large",
            f"A node needs about {needed / 1e9:.1f} GB for this model, and the largest has "
            f"{memory_cap_bytes / 1e9:.1f} GB.",
            "Take a smaller model or sequence length, or join a larger node.",
            field="model",
        )


_Figure = tuple[str, str, object, bool, str]


def _figures(spec: JobSpec) -> Iterator[_Figure]:
    """(code, field, value, whether it is allowed, the rule) of every figure, in reading order."""
    for field, text, least in (
        ("name", spec.name, 1),
        ("data.source", spec.data.source, 1),
        ("data.field", spec.data.field, 0),
        ("model.profile", spec.model.profile, 0),
    ):
        fits = least <= len(text.strip()) and len(text) <= MAX_NAME and text.isprintable()
        yield "spec.invalid", field, text, fits, f"{least} to {MAX_NAME} printable characters"
    yield "spec.steps", "steps", spec.steps, 1 <= spec.steps <= 10**9, "between 1 and 10^9"
    yield "spec.plan", "batch", spec.batch, 1 <= spec.batch <= 1 << 16, "between 1 and 65536"
    yield "spec.plan", "seq_len", spec.seq_len, 1 <= spec.seq_len <= 1 << 20, "between 1 and 2^20"
    yield "spec.plan", "seed", spec.seed, 0 <= spec.seed < 1 << 63, "between 0 and 2^63 - 1"
    low, high = spec.workers_min, spec.workers_max
    yield "spec.workers", "workers_min", low, low >= 1, "at least 1"
    yield (
        "spec.workers",
        "workers_max",
        high,
        low <= high <= MAX_WORKERS,
        f"between workers_min ({low}) and {MAX_WORKERS}",
    )
    attempts = spec.max_attempts
    yield (
        "spec.plan",
        "max_attempts",
        attempts,
        1 <= attempts <= MAX_ATTEMPTS,
        f"between 1 and {MAX_ATTEMPTS}",
    )
    share = spec.data.held_out
    yield (
        "spec.plan",
        "data.held_out",
        share,
        0 < share <= MAX_HELD_OUT,
        f"above 0 and at most {MAX_HELD_OUT}",
    )
    yield from _resource_figures(spec)
    yield from _optimizer_figures(spec)
    yield from _round_figures(spec)


def _resource_figures(spec: JobSpec) -> Iterator[_Figure]:
    asked = spec.resources
    for name, zero in (
        ("memory_mb", "estimate"),
        ("host_memory_mb", "any"),
        ("disk_mb", "any"),
    ):
        size = getattr(asked, name)
        rule = f"0 ({zero}) or less than 2^31"
        yield "spec.plan", f"resources.{name}", size, 0 <= size < 1 << 31, rule
    for name in ("gflops", "link_mbps"):
        rate = getattr(asked, name)
        yield "spec.plan", f"resources.{name}", rate, 0 <= rate <= 1e9, "0 (any) to 10^9"


def _optimizer_figures(spec: JobSpec) -> Iterator[_Figure]:
    inner, schedule = spec.optimizer, spec.schedule
    for name in ("lr", "eps", "clip", "muon_lr"):
        value = getattr(inner, name)
        yield "spec.plan", f"optimizer.{name}", value, 0 < value < math.inf, "above 0 and finite"
    decay = inner.weight_decay
    yield "spec.plan", "optimizer.weight_decay", decay, 0 <= decay < math.inf, "0 or more"
    betas = inner.betas
    fine = len(betas) == 2 and all(0 <= b < 1 for b in betas)
    yield "spec.plan", "optimizer.betas", betas, fine, "two numbers, each at least 0 and below 1"
    yield _below_one("optimizer.muon_momentum", inner.muon_momentum)
    yield "spec.plan", "schedule.warmup", schedule.warmup, 0 <= schedule.warmup <= 10**9, _COUNT
    yield _share("schedule.floor", schedule.floor)
    yield _share("schedule.decay", schedule.decay)


def _round_figures(spec: JobSpec) -> Iterator[_Figure]:
    outer, rounds = spec.outer, spec.rounds
    # It becomes a number of single precision.
    yield "spec.plan", "outer.eta", outer.eta, 0 < outer.eta <= 1e6, "above 0 and at most 10^6"
    yield _below_one("outer.mu", outer.mu)
    yield "spec.plan", "outer.ramp", outer.ramp, 0 <= outer.ramp <= 10**9, _COUNT
    yield "spec.plan", "outer.ending", outer.ending, 0 <= outer.ending <= 10**9, _COUNT
    h = rounds.inner_steps
    yield "spec.plan", "rounds.inner_steps", h, 1 <= h <= 10**6, "between 1 and 10^6"
    for name in ("min_inner_steps", "quorum"):
        value = getattr(rounds, name)
        yield "spec.plan", f"rounds.{name}", value, 0 < value <= 1, "above 0 and at most 1"
    low, high = rounds.grace_min, rounds.grace_max
    yield "spec.plan", "rounds.grace_min", low, 0 <= low < math.inf, "0 or more seconds"
    yield (
        "spec.plan",
        "rounds.grace_max",
        high,
        low <= high < math.inf,
        f"at least rounds.grace_min ({low})",
    )
    late = rounds.staleness
    allowed = f"between 0 and {MAX_STALENESS}"
    yield "spec.plan", "rounds.staleness", late, 0 <= late <= MAX_STALENESS, allowed
    kept = spec.snapshots
    every, keep = f"between 1 and {CHAIN}", f"between 1 and {MAX_SNAPSHOTS}"
    yield "spec.plan", "snapshots.every", kept.every, 1 <= kept.every <= CHAIN, every
    yield "spec.plan", "snapshots.keep", kept.keep, 1 <= kept.keep <= MAX_SNAPSHOTS, keep


def _share(field: str, value: float) -> _Figure:
    return "spec.plan", field, value, 0 <= value <= 1, "between 0 and 1"


def _below_one(field: str, value: float) -> _Figure:
    return "spec.plan", field, value, 0 <= value < 1, "at least 0 and below 1"
