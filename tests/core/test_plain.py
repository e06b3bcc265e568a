"""Frozen dataclasses to plain JSON values and back."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal

import pytest
from hypothesis import given
from hypothesis import strategies as st

from distribai.core.plain import canonical_json, fingerprint, from_plain, to_plain
from distribai.core.states import JobState


@dataclass(frozen=True)
class Inner:
    count: int
    share: float = 0.5


@dataclass(frozen=True)
class Outer:
    name: str
    inner: Inner
    many: tuple[Inner, ...] = ()
    table: Mapping[str, int] = field(default_factory=dict)
    maybe: Inner | None = None
    kind: Literal["a", "b"] = "a"
    state: JobState = JobState.QUEUED


inners = st.builds(Inner, st.integers(), st.floats(allow_nan=False, allow_infinity=False))
outers = st.builds(
    Outer,
    st.text(),
    inners,
    st.lists(inners, max_size=3).map(tuple),
    st.dictionaries(st.text(), st.integers(), max_size=3),
    st.none() | inners,
    st.sampled_from(["a", "b"]),
    st.sampled_from(JobState),
)


@given(outers)
def test_what_is_written_reads_back_equal(value: Outer) -> None:
    assert from_plain(Outer, to_plain(value)) == value


@given(outers)
def test_equal_values_have_one_text_and_one_fingerprint(value: Outer) -> None:
    again = from_plain(Outer, to_plain(value))
    assert canonical_json(again) == canonical_json(value)
    assert fingerprint(again) == fingerprint(value)


@pytest.mark.parametrize(
    ("plain", "complaint"),
    [
        ({"name": "x", "inner": {"count": 1, "extra": 2}}, "inner: unknown field 'extra'"),
        ({"name": "x"}, "inner: missing"),
        ({"name": 3, "inner": {"count": 1}}, "name: expected str"),
        ({"name": "x", "inner": {"count": True}}, "inner.count: expected int"),
        ({"name": "x", "inner": {"count": 1}, "many": {}}, "many: expected a list"),
        ({"name": "x", "inner": {"count": 1}, "table": []}, "table: expected a mapping"),
        ({"name": "x", "inner": {"count": 1}, "kind": "c"}, "kind: expected one of"),
        ({"name": "x", "inner": {"count": 1}, "state": "lost"}, "state: 'lost' is not a valid"),
        ({"name": "x", "inner": None}, "inner: expected a mapping"),
        ({"name": "x", "inner": {"count": 1}, "maybe": 3}, "maybe: expected a mapping"),
        ([], "Outer: expected a mapping"),
    ],
)
def test_a_wrong_value_is_refused_with_its_path(plain: object, complaint: str) -> None:
    with pytest.raises(ValueError, match=complaint.replace("[", r"\[")):
        from_plain(Outer, plain)


def test_an_integer_stands_for_a_float_but_not_the_other_way() -> None:
    assert from_plain(Inner, {"count": 1, "share": 1}).share == 1.0
    with pytest.raises(ValueError, match="count"):
        from_plain(Inner, {"count": 1.5})


def test_what_has_no_plain_form_and_nan_are_refused() -> None:
    with pytest.raises(TypeError):
        to_plain(object())
    with pytest.raises(ValueError, match="JSON"):
        canonical_json({"x": float("nan")})
