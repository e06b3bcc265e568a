"""Weights: one hash, deterministic files."""

import hashlib
import json
from pathlib import Path

import numpy as np
import pytest

from distribai.core.tensors import ParameterManifest, TensorSpec
from distribai.errors import Integrity
from distribai.merge.version0 import make_version0
from distribai.merge.weights import (
    all_finite,
    flat,
    open_weights,
    weights_hash,
    write_weights,
)
from tests.merge.support import ODD, same

PAIR = ParameterManifest((TensorSpec("b", (2,)), TensorSpec("a", (1, 2))))


def test_the_hash_is_over_name_dtype_shape_and_bytes_in_manifest_order():
    weights = {"a": np.float32([[1, 2]]), "b": np.float32([3, 4])}
    rows = [
        [n, "F32", list(weights[n].shape), hashlib.sha256(weights[n].tobytes()).hexdigest()]
        for n in ("b", "a")
    ]
    text = json.dumps(rows, separators=(",", ":"))
    assert weights_hash(PAIR, weights) == hashlib.sha256(text.encode()).hexdigest()


def test_files_round_trip_every_shape_and_dtype(tmp_path: Path):
    weights = make_version0(ODD, 4)
    write_weights(tmp_path / "w", ODD, weights, {"version": "0"})
    found = open_weights(tmp_path / "w", ODD)
    assert same(found, weights)
    assert weights_hash(ODD, found) == weights_hash(ODD, weights)
    assert not any(a.flags.writeable for a in found.values())


def test_the_same_weights_make_the_same_file(tmp_path: Path):
    weights = make_version0(ODD, 4)
    one = write_weights(tmp_path / "a", ODD, weights)
    two = write_weights(tmp_path / "b", ODD, dict(reversed(weights.items())))
    assert one == two
    assert (tmp_path / "a").read_bytes() == (tmp_path / "b").read_bytes()


def test_weights_of_another_model_are_refused(tmp_path: Path):
    good = {"a": np.zeros((1, 2), np.float32), "b": np.zeros(2, np.float32)}
    for bad in (
        {"a": good["a"]},
        good | {"b": np.zeros(3, np.float32)},
        good | {"b": np.zeros(2, np.float64)},
    ):
        with pytest.raises(Integrity) as caught:
            write_weights(tmp_path / "w", PAIR, bad)
        assert caught.value.code == "tensor.manifest"
        with pytest.raises(Integrity):
            weights_hash(PAIR, bad)
    assert list(tmp_path.iterdir()) == []


def test_a_file_of_another_model_is_refused(tmp_path: Path):
    write_weights(tmp_path / "w", ODD, make_version0(ODD, 0))
    with pytest.raises(Integrity) as caught:
        open_weights(tmp_path / "w", PAIR)
    assert caught.value.code == "tensor.manifest"


def test_a_strided_array_is_a_defect():
    with pytest.raises(ValueError, match="contiguous"):
        flat(np.zeros((4, 4), np.float32).T[::2])


SIGNALLING = np.uint32(0x7F800001).view(np.float32)


@pytest.mark.parametrize("bad", [np.nan, -np.nan, SIGNALLING, np.inf, -np.inf, 2e18, -2e18])
def test_one_bad_value_is_found_in_any_piece(bad: float, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr("distribai.merge.weights._SCAN", 7)
    values = np.zeros(30, np.float32)
    assert all_finite(values)
    for place in (0, 6, 7, 29):
        values[:] = 0
        values[place] = bad
        assert not all_finite(values)
    assert all_finite(np.zeros(0, np.float32))
