"""Built-in data sets."""

from pathlib import Path

import pytest

from distribai.core.datasets import BUILT_IN
from distribai.data import builtin
from distribai.errors import InvalidData


def test_the_standard_library_is_megabytes_of_text_in_a_fixed_order() -> None:
    pieces = list(builtin.documents("stdlib"))
    size = sum(len(p.text.encode()) for p in pieces)
    assert 5_000_000 < size <= builtin.STDLIB_MAX_BYTES
    assert all(p.last for p in pieces)
    assert pieces == list(builtin.documents("stdlib"))


def test_only_modules_that_are_text_are_read(tmp_path: Path) -> None:
    for name, raw in {
        "b.py": b"b",
        "a/z.py": b"az",
        "a.py": b"a",
        "latin.py": b"\xe9",
        "test/t.py": b"no",
        "site-packages/s.py": b"no",
        "_sysconfigdata_x.py": b"no",
        "notes.txt": b"no",
    }.items():
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_bytes(raw)
    assert [p.text for p in builtin.read_modules(tmp_path)] == ["a", "az", "b"]
    assert [p.text for p in builtin.read_modules(tmp_path, max_bytes=2)] == ["a"]


def test_a_python_without_its_library_says_so(tmp_path: Path) -> None:
    with pytest.raises(InvalidData) as caught:
        list(builtin.read_modules(tmp_path))
    assert caught.value.code == "data.missing"


def test_an_unknown_name_is_missing() -> None:
    with pytest.raises(InvalidData) as caught:
        builtin.documents("stdlob")
    assert caught.value.code == "data.missing"
    assert "stdlib" in caught.value.hint


def test_every_data_set_that_a_spec_may_name_can_be_read() -> None:
    assert tuple(builtin.SETS) == tuple(BUILT_IN)
