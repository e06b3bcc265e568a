"""Version 0 is the same everywhere."""

import math

import numpy as np
import pytest

from distribai.core.architectures import manifest_of
from distribai.core.architectures.decoder_transformer import PROFILES
from distribai.core.plain import to_plain
from distribai.core.tensors import Init, ParameterManifest, TensorSpec
from distribai.merge.version0 import make_version0, to_bf16
from distribai.merge.weights import weights_hash
from tests.merge.support import ODD

GOLDEN_TINY = "b81d582995aa614b6a1d5d5431b3ab0338b6547f2e340edb071f1a7f60ead2f9"
GOLDEN_ODD = "1abe3423e3950ccc4d6a8beb6c89f8ddd0a96c18d351bcaa9d0fc71830332d6c"


def philox4x64_words(seed: int, stream: int, count: int) -> list[int]:
    """Philox4x64-10 written from Salmon et al. 2011, counter from 1 as numpy counts."""
    mask = (1 << 64) - 1
    words: list[int] = []
    counter = 1
    while len(words) < count:
        c, k = [counter & mask, counter >> 64, 0, 0], [seed, stream]
        for _ in range(10):
            p0, p1 = 0xD2E7470EE14C6C93 * c[0], 0xCA5A826395121157 * c[2]
            c = [(p1 >> 64) ^ c[1] ^ k[0], p1 & mask, (p0 >> 64) ^ c[3] ^ k[1], p0 & mask]
            k = [(k[0] + 0x9E3779B97F4A7C15) & mask, (k[1] + 0xBB67AE8584CAA73B) & mask]
        words += c
        counter += 1
    return words[:count]


def test_the_tiny_profile_has_its_golden_hash():
    manifest = manifest_of("decoder_transformer", to_plain(PROFILES["tiny"]))
    assert weights_hash(manifest, make_version0(manifest, 1234)) == GOLDEN_TINY


def test_every_role_and_dtype_has_its_golden_hash():
    assert weights_hash(ODD, make_version0(ODD, 2**64 - 1)) == GOLDEN_ODD


def test_values_are_those_of_an_independent_philox():
    manifest = ParameterManifest(
        (TensorSpec("a", (2,)), TensorSpec("b", (3, 7), init=Init("uniform", std=0.02)))
    )
    found = make_version0(manifest, 5)["b"].reshape(-1)
    amplitude = np.float32(0.02 * math.sqrt(3))
    for value, word in zip(found, philox4x64_words(5, 1, 21), strict=True):
        assert value == np.float32((word >> 40) * 2.0**-23 - 1) * amplitude


def test_values_do_not_depend_on_how_they_are_chunked(monkeypatch: pytest.MonkeyPatch):
    manifest = ParameterManifest((TensorSpec("a", (1000, 7), init=Init("uniform", std=1.0)),))
    whole = make_version0(manifest, 3)["a"]
    monkeypatch.setattr("distribai.merge.version0._CHUNK", 13)
    assert make_version0(manifest, 3)["a"].tobytes() == whole.tobytes()


def test_uniform_tensors_have_the_wanted_mean_range_and_deviation():
    manifest = ParameterManifest((TensorSpec("a", (400, 500), init=Init("uniform", std=0.3)),))
    values = make_version0(manifest, 8)["a"].astype(np.float64)
    assert abs(values.mean()) < 0.003
    assert abs(values.std() - 0.3) < 0.003
    assert 0.519 < np.abs(values).max() <= np.float32(0.3 * math.sqrt(3))


def test_seeds_and_tensors_differ_from_each_other():
    manifest = ParameterManifest(
        (
            TensorSpec("a", (50,), init=Init("uniform", std=1.0)),
            TensorSpec("b", (50,), init=Init("uniform", std=1.0)),
        )
    )
    one, two = make_version0(manifest, 0), make_version0(manifest, 1)
    assert not np.array_equal(one["a"], one["b"])
    assert not np.array_equal(one["a"], two["a"])


def test_arrays_are_canonical_and_share_no_storage():
    weights = make_version0(ODD, 0)
    assert list(weights) == [t.name for t in ODD.tensors]
    assert all(a.flags.c_contiguous and a.flags.owndata for a in weights.values())
    assert weights["frozen.half"].dtype == np.uint16
    assert weights["bn.num_batches_tracked"].dtype == np.int64


def test_bf16_rounds_to_nearest_even():
    values = np.array([1.0, 1 + 2**-8, 1 + 3 * 2**-8, 1 + 2**-8 + 2**-20, -0.0], np.float32)
    assert [hex(v) for v in to_bf16(values)] == ["0x3f80", "0x3f80", "0x3f82", "0x3f81", "0x8000"]


@pytest.mark.parametrize("seed", [-1, 2**64])
def test_a_seed_beyond_64_bits_is_refused(seed: int):
    with pytest.raises(ValueError, match="64-bit"):
        make_version0(ODD, seed)


@pytest.mark.parametrize(
    "spec",
    [
        TensorSpec("a", (2,), "BF16"),
        TensorSpec("a", (2,), "BF16", "float_buffer"),
        TensorSpec("a", (2,), "F32", "int_buffer"),
    ],
)
def test_a_manifest_without_exact_arithmetic_is_refused(spec: TensorSpec):
    with pytest.raises(ValueError, match="must be"):
        make_version0(ParameterManifest((spec,)), 0)


def test_an_integer_tensor_cannot_start_uniform():
    spec = TensorSpec("a", (2,), "I64", "int_buffer", Init("uniform", std=1.0))
    with pytest.raises(ValueError, match="uniform"):
        make_version0(ParameterManifest((spec,)), 0)
