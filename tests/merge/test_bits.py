"""Codes in bytes."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from distribai.merge.bits import pack, unpack


@given(data=st.data(), bits=st.sampled_from([2, 3, 4, 5, 6, 8]), size=st.integers(0, 300))
@settings(deadline=None)
def test_codes_come_back_from_any_place_that_is_a_multiple_of_8(
    data: st.DataObject, bits: int, size: int
):
    codes = np.array(
        data.draw(st.lists(st.integers(0, 2**bits - 1), min_size=size, max_size=size)), np.uint8
    )
    packed = pack(codes, bits)
    assert packed.dtype == np.uint8
    assert packed.size == -(-size * bits // 8)
    start = 8 * data.draw(st.integers(0, size // 8))
    stop = data.draw(st.integers(start, size))
    assert list(unpack(packed, start, stop, bits)) == list(codes[start:stop])


@pytest.mark.parametrize("bits", [2, 3, 4, 5, 6])
def test_the_first_code_lies_in_the_lowest_bits(bits: int):
    codes = np.arange(13, dtype=np.uint8) % 2**bits
    number = sum(int(code) << (bits * place) for place, code in enumerate(codes))
    assert pack(codes, bits).tobytes() == number.to_bytes(-(-13 * bits // 8), "little")
