"""What a retry does."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from distribai.core.retry import retry_spec, steps_left
from distribai.core.spec import BlobRef, DataSpec, JobSpec, ModelSpec, RoundSpec

REF = BlobRef("a" * 64, 10)


def spec(steps: int, inner: int) -> JobSpec:
    rounds = RoundSpec(inner_steps=inner)
    return JobSpec("j", ModelSpec("f", {}), DataSpec(), steps, rounds=rounds)


@given(st.integers(1, 500), st.integers(1, 100), st.data())
def test_a_retry_does_the_rounds_that_are_left(steps: int, inner: int, data: st.DataObject) -> None:
    job = spec(steps, inner)
    version = data.draw(st.integers(0, job.round_count - 1))
    again = retry_spec(job, version, REF)
    assert again.round_count == job.round_count - version
    assert again.steps == steps_left(job, version)
    assert again.model.init == (REF if version else None)
    assert again.outer.ramp == (0 if version else job.outer.ramp)
    assert [again.steps_of_round(i) for i in range(again.round_count)] == [
        job.steps_of_round(version + i) for i in range(again.round_count)
    ]


def test_nothing_is_left_of_a_job_whose_rounds_are_all_merged() -> None:
    with pytest.raises(ValueError, match="all its rounds are merged"):
        retry_spec(spec(10, 5), 2, REF)
