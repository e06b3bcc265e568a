"""Safetensors: deterministic writing, and a reader that trusts nothing."""

import hashlib
import itertools
import json
import struct
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.numpy import load_file, save_file

from distribai.errors import DistribAIError, Integrity
from distribai.merge.tensorfile import WINDOW, TensorWriter, open_tensors

LAYOUT = {
    "b": ("F32", (2, 3)),
    "a": ("F32", ()),
    "empty": ("F32", (0, 4)),
    "n": ("I64", (3,)),
    "h": ("BF16", (5,)),
}


def write(path: Path, metadata: dict[str, str] | None = None) -> bytes:
    with TensorWriter(path, LAYOUT, metadata or {"who": "test"}) as writer:
        writer.write("h", 0, np.arange(5, dtype=np.uint16))
        writer.write("b", 3, np.arange(3, 6, dtype=np.float32))
        writer.write("n", 0, np.arange(3, dtype=np.int64))
        writer.write("b", 0, np.arange(3, dtype=np.float32))
        writer.write("a", 0, np.float32([9]))
        written = writer.commit()
    data = path.read_bytes()
    assert written.blob.sha256 == hashlib.sha256(data).hexdigest()
    assert written.blob.size == len(data)
    assert written.tensors["b"] == hashlib.sha256(np.arange(6, dtype="<f4").tobytes()).hexdigest()
    assert written.tensors["empty"] == hashlib.sha256(b"").hexdigest()
    return data


def raw(header: Any, body: bytes = b"") -> bytes:
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    return struct.pack("<Q", len(text)) + text + body


def entry(dtype: str = "F32", shape: Any = (1,), offsets: Any = (0, 4)) -> dict[str, Any]:
    return {"dtype": dtype, "shape": list(shape), "data_offsets": list(offsets)}


def refused(tmp_path: Path, data: bytes, code: str, layout: Any = None) -> str:
    path = tmp_path / "bad"
    path.write_bytes(data)
    with pytest.raises(Integrity) as caught:
        open_tensors(path, {"x": ("F32", (1,))} if layout is None else layout)
    assert caught.value.code == code
    return caught.value.message


def test_what_was_written_is_read_back_and_read_only(tmp_path: Path):
    write(tmp_path / "f")
    file = open_tensors(tmp_path / "f", LAYOUT)
    assert file.metadata == {"who": "test"}
    assert file.arrays["b"].tolist() == [[0, 1, 2], [3, 4, 5]]
    assert file.arrays["a"].shape == ()
    assert file.arrays["empty"].shape == (0, 4)
    assert file.arrays["h"].dtype == np.uint16
    assert not any(a.flags.writeable for a in file.arrays.values())


def test_the_bytes_do_not_depend_on_the_order_of_writing_or_of_names(tmp_path: Path):
    first = write(tmp_path / "f")
    with TensorWriter(tmp_path / "g", dict(sorted(LAYOUT.items())), {"who": "test"}) as writer:
        writer.write("n", 0, np.arange(3, dtype=np.int64))
        writer.write("a", 0, np.float32([9]))
        writer.write("b", 0, np.arange(6, dtype=np.float32))
        writer.write("h", 0, np.arange(5, dtype=np.uint16))
        writer.commit()
    assert (tmp_path / "g").read_bytes() == first


def test_every_tensor_lies_aligned(tmp_path: Path):
    write(tmp_path / "f")
    file = open_tensors(tmp_path / "f", LAYOUT)
    assert file.data_start % 64 == 0
    assert all(a.flags.aligned for a in file.arrays.values())


def test_the_reference_library_reads_what_we_write(tmp_path: Path):
    layout = {k: v for k, v in LAYOUT.items() if v[0] != "BF16"}
    with TensorWriter(tmp_path / "f", layout, {}) as writer:
        writer.write("b", 0, np.arange(6, dtype=np.float32))
        writer.write("a", 0, np.float32([9]))
        writer.write("n", 0, np.arange(3, dtype=np.int64))
        writer.commit()
    found = load_file(tmp_path / "f")
    assert found["b"].tolist() == [[0, 1, 2], [3, 4, 5]]
    assert found["n"].tolist() == [0, 1, 2]
    assert found["empty"].shape == (0, 4)


def test_we_read_what_the_reference_library_writes(tmp_path: Path):
    save_file({"x": np.ones((2, 2), np.float32), "n": np.ones(3, np.int64)}, tmp_path / "f")
    file = open_tensors(tmp_path / "f", {"x": ("F32", (2, 2)), "n": ("I64", (3,))})
    assert file.arrays["x"].sum() == 4


def test_nothing_is_left_when_writing_is_given_up(tmp_path: Path):
    with TensorWriter(tmp_path / "f", LAYOUT, {}) as writer:
        writer.write("a", 0, np.float32([1]))
    assert list(tmp_path.iterdir()) == []


def test_an_old_file_stays_until_the_new_one_is_complete(tmp_path: Path):
    (tmp_path / "f").write_bytes(b"old")
    with TensorWriter(tmp_path / "f", LAYOUT, {}):
        pass
    assert (tmp_path / "f").read_bytes() == b"old"


@pytest.mark.parametrize("missing", ["nothing written", "half", "twice"])
def test_a_tensor_not_written_exactly_once_is_a_defect(tmp_path: Path, missing: str):
    with TensorWriter(tmp_path / "f", {"b": ("F32", (2, 3))}, {}) as writer:
        if missing != "nothing written":
            writer.write("b", 0, np.zeros(3, np.float32))
        if missing == "twice":
            writer.write("b", 0, np.zeros(6, np.float32))
        with pytest.raises(ValueError, match="exactly once"):
            writer.commit()
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("start", "values"),
    [(0, np.zeros(6)), (4, np.zeros(3, np.float32)), (-1, np.zeros(1, np.float32))],
)
def test_writing_what_does_not_fit_is_a_defect(tmp_path: Path, start: int, values: Any):
    with (
        TensorWriter(tmp_path / "f", LAYOUT, {}) as writer,
        pytest.raises(ValueError, match="does not fit"),
    ):
        writer.write("b", start, values)


def test_metadata_is_not_a_tensor_name(tmp_path: Path):
    with pytest.raises(ValueError, match="__metadata__"):
        TensorWriter(tmp_path / "f", {"__metadata__": ("F32", ())}, {})


def test_released_pages_can_still_be_read(tmp_path: Path):
    size = WINDOW // 4 * 2 + 12_345
    layout, values = {"x": ("F32", (size,))}, np.arange(size, dtype=np.float32)
    with TensorWriter(tmp_path / "f", layout, {}) as writer:
        writer.write("x", 0, values)
        writer.commit()
    file = open_tensors(tmp_path / "f", layout)
    for start, stop in itertools.combinations_with_replacement(
        (0, 1, size // 2, size - 1, size), 2
    ):
        file.release("x", start, stop)
        assert np.array_equal(file.arrays["x"], values)


def test_a_file_too_short_for_a_header_is_refused(tmp_path: Path):
    refused(tmp_path, b"", "tensor.format")
    refused(tmp_path, b"1234567", "tensor.format")


def test_a_header_longer_than_the_file_is_refused(tmp_path: Path):
    refused(tmp_path, struct.pack("<Q", 2**63) + b"{}", "tensor.format")
    refused(tmp_path, struct.pack("<Q", 3) + b"{}", "tensor.format")


def test_a_header_beyond_the_limit_is_refused_unread(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr("distribai.merge.tensorfile.MAX_HEADER", 50)
    data = raw({"x": entry()} | {"__metadata__": {"pad": "p" * 50}}, b"1234")
    assert "does not fit" in refused(tmp_path, data, "tensor.format")


@pytest.mark.parametrize(
    "header",
    [
        b"[]",
        b"{]",
        b"\xff\xfe",
        b'{"x": NaN}',
        b'{"x": 1}',
        b'{"x": {}, "x": {}}',
        b"[" * 100_000,
        b'{"x": {"dtype": "F32", "shape": [' + b"9" * 5000 + b'], "data_offsets": [0, 4]}}',
        {"__metadata__": {"k": 1}, "x": entry()},
        {"__metadata__": [], "x": entry()},
        {"x": entry() | {"more": 1}},
        {"x": entry(dtype=4)},  # type: ignore[arg-type]
        {"x": entry(shape=[-1])},
        {"x": entry(shape=[True])},
        {"x": entry(shape=[1.0])},
        {"x": entry(shape=[1] * 33)},
        {"x": entry(shape=[2])},
        {"x": entry(offsets=[0])},
        {"x": entry(offsets=[4, 0])},
        {"x": entry(offsets=[0, 2**64])},
        {"x": entry(offsets=[4, 8])},
        {"x": entry(), "y": entry()},
        {"x": entry(), "y": entry(offsets=[8, 12])},
        {"x": entry(shape=[0], offsets=[0, 0])},
    ],
)
def test_a_lying_header_is_refused(tmp_path: Path, header: Any):
    refused(tmp_path, raw(header, b"1234"), "tensor.format")


def test_a_file_longer_or_shorter_than_its_header_says_is_refused(tmp_path: Path):
    refused(tmp_path, raw({"x": entry()}, b"123"), "tensor.format")
    refused(tmp_path, raw({"x": entry()}, b"12345"), "tensor.format")


@pytest.mark.parametrize(
    "layout",
    [
        {},
        {"y": ("F32", (1,))},
        {"x": ("F32", ())},
        {"x": ("BF16", (2,))},
        {"x": ("F32", (1,)), "y": ("F32", (0,))},
    ],
)
def test_other_tensors_than_expected_are_refused(tmp_path: Path, layout: Any):
    refused(tmp_path, raw({"x": entry()}, b"1234"), "tensor.manifest", layout)


def test_a_dtype_that_is_not_in_use_is_refused(tmp_path: Path):
    refused(tmp_path, raw({"x": entry("F16", [2])}, b"1234"), "tensor.manifest")


def test_any_truncation_is_refused(tmp_path: Path):
    data = write(tmp_path / "f")
    for size in range(len(data)):
        (tmp_path / "cut").write_bytes(data[:size])
        with pytest.raises(Integrity):
            open_tensors(tmp_path / "cut", LAYOUT)


@settings(max_examples=80, deadline=None)
@given(flips=st.lists(st.tuples(st.integers(0, 400), st.integers(1, 255)), min_size=1, max_size=3))
def test_a_flipped_header_is_refused_or_harmless(
    tmp_path_factory: pytest.TempPathFactory, flips: list[tuple[int, int]]
):
    folder = tmp_path_factory.mktemp("flip")
    data = bytearray(write(folder / "f"))
    for place, bits in flips:
        data[place % len(data)] ^= bits
    (folder / "g").write_bytes(data)
    try:
        file = open_tensors(folder / "g", LAYOUT)
    except DistribAIError:
        return
    assert {n: a.shape for n, a in file.arrays.items()} == {n: s for n, (_, s) in LAYOUT.items()}
