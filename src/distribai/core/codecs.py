"""Codecs without values: what each stores of a tensor, what it keeps back, how it is scheduled.

Everything here follows from shapes and round numbers alone, so that files are checked before they
are decoded and planned before there are any. How values are encoded is in ``merge.codecs``, one
file a codec, which takes its stored arrays from here.

*Error feedback* (A3): ``e = beta e + Delta``; what is sent is ``decoded(encoded(e))``, and
``e -= sent``. :data:`BETA` names the codecs that lose too much to do without it: int4, int3 and
int2 with beta 1, the sparse ones with 0.95 (SparseLoCo, arXiv:2508.15706). In a leg whose schedule
has one of them all others take part with beta 1, so that nothing that was kept is lost at a change.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Final

from distribai.core.framing import Layout
from distribai.core.tensors import ParameterManifest, TensorSpec
from distribai.errors import InvalidSpec

BLOCK: Final = 256
"""Elements that share a step of an integer codec."""

RUN: Final = 4096
"""Elements of which a sparse codec keeps the k largest."""

SMALL: Final = 1024
"""Tensors with fewer elements go as int8 where a codec is coarser: they weigh nothing, and sparse
places would cost more than their values."""

STEP, SCALE, LEVELS, HIGH, LOW = ":step", ":scale", ":levels", ":high", ":low"
"""Suffixes of stored arrays."""

BETA: Final[Mapping[str, float]] = {
    "int4": 1.0,
    "int3": 1.0,
    "int2": 1.0,
    "sparse": 0.95,
    "sparse128": 0.95,
    "sparse256": 0.95,
}
"""What is kept of the error feedback from one round to the next, by codec (A3)."""

SPARSE_K: Final[Mapping[str, int]] = {"sparse": 64, "sparse128": 128, "sparse256": 256}
"""Elements that a sparse codec keeps of each :data:`RUN`: powers of two."""

MAX_STAGES: Final = 64
"""Stages of a schedule at most: it travels with every task."""


@dataclass(frozen=True, slots=True)
class Part:
    """One stored array of a tensor: its name's suffix (at most one part has none), dtype, shape."""

    suffix: str
    dtype: str
    shape: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class CodecStage:
    """From round ``from_round`` (from 0) on values travel in ``codec``."""

    from_round: int
    codec: str


Schedule = str | tuple[CodecStage, ...]
"""One codec for all rounds, or its changes by round, the first from round 0."""


def _dense(dtype: str) -> Callable[[TensorSpec], tuple[Part, ...]]:
    return lambda spec: (Part("", dtype, spec.shape),)


def _integers(bits: int, steps: str) -> Callable[[TensorSpec], tuple[Part, ...]]:
    def parts(spec: TensorSpec) -> tuple[Part, ...]:
        return (
            Part("", "U8", (-(-spec.size * bits // 8),)),
            Part(steps, "F32", (-(-spec.size // BLOCK),)),
        )

    return parts


def _unless_small(
    parts: Callable[[TensorSpec], tuple[Part, ...]],
) -> Callable[[TensorSpec], tuple[Part, ...]]:
    return lambda spec: (PARTS["int8"] if spec.size < SMALL else parts)(spec)


def low_bits(k: int) -> int:
    """Bits of a kept element's place that a sparse codec stores as they are: those that tell
    elements apart of which, on average, one is kept."""
    return (RUN // k).bit_length() - 1


def _sparse(k: int) -> Callable[[TensorSpec], tuple[Part, ...]]:
    def parts(spec: TensorSpec) -> tuple[Part, ...]:
        kept = -(-k * spec.size // RUN)
        return (
            Part("", "U8", (-(-kept // 4),)),
            Part(HIGH, "U8", (-(-2 * kept // 8),)),
            Part(LOW, "U8", (-(-low_bits(k) * kept // 8),)),
            Part(LEVELS, "F32", (2,)),
        )

    return parts


PARTS: Final[Mapping[str, Callable[[TensorSpec], tuple[Part, ...]]]] = {
    "fp32": _dense("F32"),
    "bf16": _dense("BF16"),
    "int8": _integers(8, STEP),
    "int4": _integers(4, STEP),
    # Another suffix than that of int2's former three levels (and for sparse places than that of
    # twelve bits each): no side may misread the other's.
    "int3": _unless_small(_integers(3, SCALE)),
    "int2": _unless_small(_integers(2, SCALE)),
    **{name: _unless_small(_sparse(k)) for name, k in SPARSE_K.items()},
}
"""The stored arrays of a float tensor, by codec: all codecs there are."""


def check_codec(name: str, field: str) -> None:
    """Refuse a codec that does not exist.

    Raises:
        InvalidSpec: ``codec.unknown``, with ``field``.
    """
    if name not in PARTS:
        raise InvalidSpec(
            "codec.unknown",
            f"There is no codec {name!r}.",
            f"Codecs: {', '.join(PARTS)}.",
            field=field,
        )


def stored_parts(spec: TensorSpec, codec: str) -> tuple[Part, ...]:
    """The stored arrays of one travelling tensor; integer buffers lie as they are."""
    if spec.role == "int_buffer":
        return (Part("", spec.dtype, spec.shape),)
    return PARTS[codec](spec)


def packed_layout(manifest: ParameterManifest, codec: str) -> Layout:
    """The tensors of a delta or update file."""
    return {
        spec.name + part.suffix: (part.dtype, part.shape)
        for spec in manifest.travelling
        for part in stored_parts(spec, codec)
    }


# ------------------------------------------------------------------ schedules


def stages(schedule: Schedule) -> tuple[CodecStage, ...]:
    """A schedule as its stages."""
    return (CodecStage(0, schedule),) if isinstance(schedule, str) else schedule


def codec_of_round(schedule: Schedule, number: int) -> str:
    """The codec of round ``number`` (from 0)."""
    return [s.codec for s in stages(schedule) if s.from_round <= number][-1]


def schedule_from(schedule: Schedule, number: int) -> Schedule:
    """What is left of a schedule for a job that goes on at round ``number`` and counts from 0
    again."""
    if isinstance(schedule, str):
        return schedule
    later = (CodecStage(s.from_round - number, s.codec) for s in schedule if s.from_round > number)
    return (CodecStage(0, codec_of_round(schedule, number)), *later)


def is_sparse(schedule: Schedule) -> bool:
    """Whether any round of it is sparse."""
    return any(s.codec in SPARSE_K for s in stages(schedule))


def feeds_back(schedule: Schedule) -> bool:
    """Whether a leg has error feedback: in every round, if any of its codecs needs it."""
    return any(s.codec in BETA for s in stages(schedule))


def begins_within(schedule: Schedule, rounds: int) -> bool:
    """Whether a job of so many rounds comes to the last stage of a schedule."""
    return stages(schedule)[-1].from_round < rounds


def check_schedule(schedule: Schedule, field: str, rounds: int) -> None:
    """Refuse a schedule that leaves a round without a codec, or a stage without a round of the
    job's ``rounds``.

    Raises:
        InvalidSpec: ``codec.unknown`` or ``spec.plan``, naming the field that is wrong.
    """
    if isinstance(schedule, str):
        check_codec(schedule, field)
        return
    if not 1 <= len(schedule) <= MAX_STAGES:
        raise InvalidSpec(
            "spec.plan",
            f"{field} has {len(schedule)} stages: it must have 1 to {MAX_STAGES}.",
            "Give one codec, or a list of {from_round, codec}.",
            field=field,
        )
    before = -1
    for place, stage in enumerate(schedule):
        where = f"{field}[{place}]"
        rule = (
            f"above {before}, where the stage before it begins, "
            f"and below {rounds}, the number of the job's rounds"
        )
        fits = before < stage.from_round < rounds
        if not place:
            rule, fits = "0, where the job begins", stage.from_round == 0
        if not fits:
            raise InvalidSpec(
                "spec.plan",
                f"{where}.from_round is {stage.from_round}: it must be {rule}.",
                "The first stage begins at round 0, each other one after the one before it and "
                "before the job's end: leave out what no round comes to.",
                field=f"{where}.from_round",
            )
        before = stage.from_round
        check_codec(stage.codec, f"{where}.codec")
