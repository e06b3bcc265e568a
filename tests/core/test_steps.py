from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from distribai.core.architectures.decoder_transformer import PROFILES
from distribai.core.plain import to_plain
from distribai.core.steps import Reached, StepWork, seconds_after, step_work
from tests.core.test_plan import make_spec

MEASURED = {
    ("tiny", 1, "adamw"): 0.0057,
    ("tiny", 64, "adamw"): 0.0080,
    ("tiny", 512, "adamw"): 0.0268,
    ("tiny", 2048, "adamw"): 0.1083,
    ("base", 1, "adamw"): 0.0365,
    ("base", 16, "adamw"): 0.0442,
    ("base", 64, "adamw"): 0.0658,
    ("tiny", 1, "muon"): 0.0212,
    ("tiny", 16, "muon"): 0.0226,
    ("tiny", 64, "muon"): 0.0300,
    ("tiny", 512, "muon"): 0.0380,
    ("tiny", 2048, "muon"): 0.1232,
    ("small", 1, "muon"): 0.0702,
    ("small", 16, "muon"): 0.0742,
    ("small", 512, "muon"): 0.1375,
    ("small", 2048, "muon"): 0.3557,
    ("base", 1, "muon"): 0.5190,
}
"""CPU seconds of a step by profile, tokens and optimizer, one thread of an Intel Xeon
(docs/explanation/planning.md)."""

PAIRS = [(a, b) for a in MEASURED for b in MEASURED if (a[0], a[2]) == (b[0], b[2])]


def work(profile: str, tokens: int, optimizer: str = "muon") -> StepWork:
    spec = make_spec(
        model__config=to_plain(PROFILES[profile]),
        batch=1,
        seq_len=tokens,
        optimizer__name=optimizer,
    )
    return step_work(spec)


@pytest.mark.parametrize(("known", "asked"), PAIRS)
@pytest.mark.parametrize("rate", [2e10, 8e10])
def test_one_record_is_right_within_a_factor_of_two_for_any_number_of_tokens(
    known: tuple[str, int, str], asked: tuple[str, int, str], rate: float
) -> None:
    records = [Reached(work(*known), MEASURED[known])]
    found = seconds_after(records, work(*asked), rate, "cpu")
    assert found is not None
    assert 0.5 < found / MEASURED[asked] < 2.0


def test_the_job_that_is_nearest_in_seconds_counts_and_the_youngest_of_equal_ones() -> None:
    records = [
        Reached(work("small", 2048), 90.0),
        Reached(work("tiny", 512), 1.0),
        Reached(work("tiny", 512), 3.0),
    ]
    assert seconds_after(records, work("tiny", 512), 8e10, "cpu") == 1.0
    assert seconds_after([], work("tiny", 512), 8e10, "cpu") is None


def test_adamw_has_no_matrices_to_orthogonalize() -> None:
    spent = [work("tiny", 1, name).operations for name in ("adamw", "muon")]
    assert spent[0] * 10 < spent[1]


def test_a_small_step_on_a_gpu_is_launching() -> None:
    tiny = work("tiny", 16)
    assert tiny.seconds(2e12, "cuda") > 2 * tiny.operations / 2e12


@settings(deadline=None, max_examples=50)
@given(
    st.integers(1, 1 << 14),
    st.integers(1, 1 << 14),
    st.floats(1e-4, 10),
    st.floats(1e8, 1e14),
    st.sampled_from(["cpu", "cuda", "mps", ""]),
)
def test_more_tokens_never_take_less_nor_more_than_in_proportion(
    few: int, many: int, seconds: float, rate: float, device: str
) -> None:
    few, many = sorted((few, many))
    known = Reached(work("tiny", few), seconds)
    found = seconds_after([known], work("tiny", many), rate, device)
    assert found is not None
    assert seconds * (1 - 1e-9) <= found <= seconds * many / few * (1 + 1e-9)
    again = seconds_after([replace(known, work=work("tiny", many))], known.work, rate, device)
    assert again == pytest.approx(seconds * seconds / found)
