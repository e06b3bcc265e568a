"""Records that notice a flipped bit."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from distribai.core.sealed import seal, unseal
from distribai.errors import Integrity


@given(st.dictionaries(st.text(), st.integers() | st.text()))
def test_a_record_reads_back_equal(value: dict[str, object]) -> None:
    assert unseal(seal(value)) == value


@given(st.data())
def test_a_changed_or_torn_record_is_refused(data: st.DataObject) -> None:
    sealed = seal({"steps": 12, "name": "task"})
    at = data.draw(st.integers(0, len(sealed) - 1))
    bit = 1 << data.draw(st.integers(0, 7))
    flipped = sealed[:at] + bytes([sealed[at] ^ bit]) + sealed[at + 1 :]
    for bad in (flipped, sealed[:at]):
        with pytest.raises(Integrity):
            unseal(bad)
