"""How ids look."""

from __future__ import annotations

import pytest

from distribai.core.ids import make_id, node_id


def test_an_id_names_its_kind_and_keeps_all_of_its_entropy() -> None:
    one, other = make_id("job", bytes(10)), make_id("job", bytes(9) + b"\x01")
    assert one.startswith("job_")
    assert one != other
    with pytest.raises(ValueError, match="entropy"):
        make_id("job", b"short")


def test_a_node_id_is_the_hash_of_its_public_key() -> None:
    assert node_id(bytes(32)) == node_id(bytes(32)) != node_id(b"\x01" + bytes(31))
    with pytest.raises(ValueError, match="32 bytes"):
        node_id(b"short")
