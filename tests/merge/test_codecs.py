"""The registry of codecs, and what each promises."""

import numpy as np
import pytest

from distribai.errors import InvalidSpec
from distribai.merge.codecs import codec, codecs
from tests.merge.support import ODD


def test_the_scan_finds_the_codecs():
    assert list(codecs()) == ["fp32"]


def test_an_unknown_codec_is_named_in_the_error():
    with pytest.raises(InvalidSpec, match="morse") as caught:
        codec("morse")
    assert caught.value.code == "codec.unknown"


@pytest.mark.parametrize("name", codecs())
def test_every_edge_shape_is_stored_as_its_parts_say_and_read_back(name: str):
    rng = np.random.default_rng(0)
    how = codec(name)
    for spec in ODD.tensors:
        values = rng.standard_normal(spec.size).astype(np.float32)
        stored = how.encode(values)
        parts = {p.suffix: p for p in how.parts(spec)}
        assert stored.keys() == parts.keys()
        shaped = {s: a.reshape(parts[s].shape) for s, a in stored.items()}
        found = how.reader(spec, shaped)(0, spec.size, np.empty(spec.size, np.float32))
        assert found.dtype == np.float32
        assert found.shape == (spec.size,)


def test_fp32_changes_no_bit():
    values = np.float32([0.0, -0.0, 1e-45, 3.4e38, -1.5])
    how = codec("fp32")
    spec = ODD.tensors[4]
    read = how.reader(spec, how.encode(values))
    assert read(1, 4, np.empty(3, np.float32)).tobytes() == values[1:4].tobytes()
