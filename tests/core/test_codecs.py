"""Codecs without values: schedules, and who keeps error feedback."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from distribai.core.codecs import (
    BETA,
    MAX_STAGES,
    PARTS,
    CodecStage,
    begins_within,
    check_schedule,
    codec_of_round,
    feeds_back,
    is_sparse,
    schedule_from,
    stages,
)
from distribai.errors import InvalidSpec

MIXED = (CodecStage(0, "int4"), CodecStage(20, "sparse"), CodecStage(21, "fp32"))


def test_a_schedule_says_the_codec_of_every_round() -> None:
    assert [codec_of_round(MIXED, n) for n in (0, 19, 20, 21, 10**6)] == [
        "int4",
        "int4",
        "sparse",
        "fp32",
        "fp32",
    ]
    assert codec_of_round("bf16", 7) == "bf16"
    assert stages("bf16") == (CodecStage(0, "bf16"),)


def test_a_stage_that_no_round_comes_to_is_refused_with_its_place() -> None:
    check_schedule(MIXED, "rounds.codec_up", 22)
    with pytest.raises(InvalidSpec) as caught:
        check_schedule(MIXED, "rounds.codec_up", 21)
    assert (caught.value.code, caught.value.field) == (
        "spec.plan",
        "rounds.codec_up[2].from_round",
    )
    assert "below 21, the number of the job's rounds" in caught.value.message
    assert begins_within(MIXED, 22)
    assert not begins_within(MIXED, 21)


@given(st.lists(st.integers(1, 50), unique=True, max_size=5), st.integers(0, 60), st.data())
def test_what_is_left_of_a_schedule_gives_each_round_the_codec_that_it_had(
    begins: list[int], number: int, data: st.DataObject
) -> None:
    codecs = st.sampled_from(sorted(PARTS))
    schedule = tuple(CodecStage(n, data.draw(codecs)) for n in (0, *sorted(begins)))
    left = schedule_from(schedule, number)
    assert [codec_of_round(left, n) for n in range(60)] == [
        codec_of_round(schedule, number + n) for n in range(60)
    ]
    if begins_within(schedule, number + 60):
        check_schedule(left, "rounds.codec_up", 60)
    assert schedule_from("int8", number) == "int8"


def test_a_leg_has_error_feedback_as_soon_as_one_of_its_codecs_needs_it() -> None:
    assert {name for name in PARTS if feeds_back(name)} == BETA.keys()
    assert feeds_back((CodecStage(0, "fp32"), CodecStage(9, "int2")))
    assert not feeds_back((CodecStage(0, "fp32"), CodecStage(9, "int8")))


def test_a_schedule_is_sparse_as_soon_as_one_of_its_stages_is() -> None:
    assert is_sparse(MIXED)
    assert is_sparse("sparse256")
    assert not is_sparse("int2")


@pytest.mark.parametrize(
    ("schedule", "code", "field"),
    [
        ("morse", "codec.unknown", "rounds.codec_up"),
        ((), "spec.plan", "rounds.codec_up"),
        ((CodecStage(1, "fp32"),), "spec.plan", "rounds.codec_up[0].from_round"),
        (
            (CodecStage(0, "fp32"), CodecStage(0, "int8")),
            "spec.plan",
            "rounds.codec_up[1].from_round",
        ),
        (
            (CodecStage(0, "fp32"), CodecStage(10**9, "int8")),
            "spec.plan",
            "rounds.codec_up[1].from_round",
        ),
        (
            (CodecStage(0, "fp32"), CodecStage(3, "morse")),
            "codec.unknown",
            "rounds.codec_up[1].codec",
        ),
        (
            tuple(CodecStage(n, "fp32") for n in range(MAX_STAGES + 1)),
            "spec.plan",
            "rounds.codec_up",
        ),
    ],
)
def test_a_schedule_with_a_hole_is_refused(schedule: object, code: str, field: str) -> None:
    with pytest.raises(InvalidSpec) as caught:
        check_schedule(schedule, "rounds.codec_up", 10**9)  # type: ignore[arg-type]
    assert (caught.value.code, caught.value.field) == (code, field)


def test_good_schedules_pass() -> None:
    for name in PARTS:
        check_schedule(name, "rounds.codec_down", 1)
    check_schedule(MIXED, "rounds.codec_down", 100)
