"""The registry of codecs, and what each promises."""

from __future__ import annotations

import contextlib
import hashlib
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from distribai.core.codecs import SCALE
from distribai.core.tensors import TensorSpec
from distribai.errors import Integrity, InvalidSpec
from distribai.merge.codecs import GRAIN, codec, codecs, sparse
from distribai.merge.codecs.integers import BLOCK, STEP
from distribai.merge.codecs.sparse import HIGH, LEVELS, LOW, RUN, two_means
from tests.merge.support import ODD

NAMES = ["bf16", "fp32", "int8", "int4", "int3", "int2", "sparse", "sparse128", "sparse256"]
HALVES = {"int3": 4, "int2": 2}
"""Half of their levels."""
SIZES = st.one_of(st.integers(0, 3000), st.integers(GRAIN - 3, GRAIN + 3), st.just(3 * GRAIN + 77))


def spec_of(size: int) -> TensorSpec:
    return TensorSpec("w", (size,), "F32", "trainable")


def numbers(size: int, seed: int = 0, scale: float = 1.0) -> NDArray[np.float32]:
    rng = np.random.default_rng(seed)
    return (scale * rng.standard_normal(size)).astype(np.float32)


def through(name: str, values: NDArray[np.float32], piece: int = 0) -> NDArray[np.float32]:
    """What arrives of ``values``, read in pieces of ``piece`` elements (0: at once)."""
    how, spec = codec(name), spec_of(values.size)
    read = how.reader(spec, how.encode(values))
    step = piece or max(1, values.size)
    found = [
        read(at, min(at + step, values.size), np.empty(min(step, values.size - at), np.float32))
        for at in range(0, values.size, step)
    ]
    return np.concatenate([*found, np.empty(0, np.float32)])


def test_the_scan_finds_the_codecs():
    assert sorted(codecs()) == sorted(NAMES)


def test_an_unknown_codec_is_named_in_the_error():
    with pytest.raises(InvalidSpec, match="morse") as caught:
        codec("morse")
    assert caught.value.code == "codec.unknown"


@pytest.mark.parametrize("name", NAMES)
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


@given(name=st.sampled_from(NAMES), size=SIZES, seed=st.integers(0, 2**16))
@settings(max_examples=60, deadline=None)
def test_reading_in_pieces_gives_what_reading_at_once_gives(name: str, size: int, seed: int):
    values = numbers(size, seed)
    assert through(name, values, GRAIN).tobytes() == through(name, values).tobytes()


@given(
    name=st.sampled_from([n for n in NAMES if n not in HALVES]),
    size=SIZES,
    seed=st.integers(0, 2**16),
)
@settings(max_examples=60, deadline=None)
def test_what_was_decoded_encodes_to_the_same_values(name: str, size: int, seed: int):
    once = through(name, numbers(size, seed))
    again = through(name, once)
    tolerance = 2e-7 if name != "fp32" else 0.0
    np.testing.assert_allclose(again, once, rtol=tolerance, atol=1e-38)


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("value", [0.0, 1.0, -3.5e-5, 1e-42, 1e30])
@pytest.mark.parametrize("size", [1, 67, 1024, GRAIN + 5])
def test_constant_tensors_come_back_as_finite_as_they_were(name: str, value: float, size: int):
    values = np.full(size, value, np.float32)
    found = through(name, values)
    assert np.isfinite(found).all()
    kept = found != 0
    np.testing.assert_allclose(found[kept], values[kept], rtol=2**-8)
    if value in (0.0, 1e-42) and name != "fp32":
        return  # so small that it may be lost
    if not name.startswith("sparse") or size < 1024:
        assert kept.all() == (value != 0)


def raw_numbers(size: int) -> NDArray[np.float32]:
    """Bell-shaped values of many magnitudes, some zero, from raw random words: these, unlike a
    generator's methods, are the same with every numpy."""
    words = np.random.Philox(1).random_raw(size).view(np.uint16).reshape(size, 4)
    values = (words.sum(axis=1, dtype=np.int64) - 2 * 65535).astype(np.float32)
    values *= np.float32(0.5) ** (np.arange(size) // 300 % 40)
    values[::97] = 0
    return values


@pytest.mark.parametrize(
    ("name", "made"),
    [
        ("bf16", "19367d235e5a0645"),
        ("fp32", "7610f410c56f4767"),
        ("int8", "12d5aae361298018"),
        ("int4", "35d2eb8a6f69b96c"),
        ("int3", "3caedd454ad31166"),
        ("int2", "fb860401ec8515c3"),
        ("sparse", "34145d079e69800d"),
        ("sparse128", "9768ad11186193d4"),
        ("sparse256", "bbd9b4ff16abacc9"),
    ],
)
def test_the_same_values_always_encode_to_the_same_bytes(name: str, made: str):
    found = hashlib.sha256()
    for size in (1000, 1024, 70_000):
        for suffix, part in sorted(codec(name).encode(raw_numbers(size)).items()):
            found.update(suffix.encode() + np.ascontiguousarray(part).tobytes())
    assert found.hexdigest()[:16] == made


def test_fp32_changes_no_bit():
    values = np.float32([0.0, -0.0, 1e-45, 3.4e38, -1.5])
    how = codec("fp32")
    spec = ODD.tensors[4]
    read = how.reader(spec, how.encode(values))
    assert read(1, 4, np.empty(3, np.float32)).tobytes() == values[1:4].tobytes()


def test_bf16_rounds_to_nearest_even_like_torch():
    import torch

    values = np.concatenate(
        [numbers(5000), numbers(500, 1, 1e-39), np.float32([1.00390625, 1.01171875, -0.0])]
    )
    wanted = torch.from_numpy(values).to(torch.bfloat16).to(torch.float32).numpy()
    assert through("bf16", values).tobytes() == wanted.tobytes()


def test_bf16_never_makes_an_infinity_of_a_number():
    top = np.float32([3.4e38, -3.4e38])
    found = through("bf16", top)
    np.testing.assert_allclose(found, top, rtol=2**-7)


@pytest.mark.parametrize(("name", "largest"), [("int8", 127), ("int4", 7)])
@given(size=st.integers(1, 2000), seed=st.integers(0, 2**16), scale=st.floats(1e-30, 1e30))
@settings(max_examples=40, deadline=None)
def test_an_integers_error_is_at_most_half_a_step_of_its_block(
    name: str, largest: int, size: int, seed: int, scale: float
):
    values = numbers(size, seed, scale)
    found = through(name, values).astype(np.float64)
    for start in range(0, size, BLOCK):
        block = values[start : start + BLOCK].astype(np.float64)
        step = np.abs(block).max() / largest
        assert np.abs(found[start : start + BLOCK] - block).max() <= 0.5 * step * (1 + 1e-5)


def blocks_of(
    name: str, values: NDArray[np.float32]
) -> Iterator[tuple[NDArray[np.float64], NDArray[np.float64]]]:
    """Each block, before and after."""
    found = through(name, values)
    for start in range(0, values.size, BLOCK):
        block = slice(start, start + BLOCK)
        yield values[block].astype(np.float64), found[block].astype(np.float64)


def blocks_unlike_each_other(size: int, seed: int, scale: float) -> NDArray[np.float32]:
    """Heavy tails, rows of zeros, and outliers besides ordinary values."""
    rng = np.random.default_rng(seed)
    values = rng.standard_t(rng.integers(1, 8), size) * (rng.random(size) < rng.random())
    values[:: rng.integers(2, 999)] *= rng.choice([0, 1, 1e3])
    return (values * scale).clip(-1e36, 1e36).astype(np.float32)


@pytest.mark.parametrize("name", HALVES)
@given(size=st.integers(1024, 9000), seed=st.integers(0, 2**16))
@settings(max_examples=30, deadline=None)
def test_of_ordinary_values_just_as_much_is_sent_as_there_is(name: str, size: int, seed: int):
    """What is lost lies across what is sent, so that nothing arrives late for being sent short."""
    whole = size // BLOCK * BLOCK
    for block, found in blocks_of(name, numbers(whole, seed) if whole >= 1024 else numbers(1024)):
        assert found @ block == pytest.approx(block @ block, rel=1e-5)


@pytest.mark.parametrize("name", HALVES)
@given(size=st.integers(1024, 9000), seed=st.integers(0, 2**16), scale=st.floats(1e-20, 1e20))
@settings(max_examples=60, deadline=None)
def test_what_is_lost_of_a_block_is_less_than_the_block_whatever_it_looks_like(
    name: str, size: int, seed: int, scale: float
):
    """Else error feedback would grow without end."""
    for block, found in blocks_of(name, blocks_unlike_each_other(size, seed, scale)):
        assert np.linalg.norm(block - found) <= np.linalg.norm(block) * (1 + 1e-6)


@pytest.mark.parametrize(("name", "share"), [("int3", 0.20), ("int2", 0.37)])
def test_of_normal_values_as_much_is_lost_as_theory_says(name: str, share: float):
    values = numbers(1 << 18)
    lost = np.linalg.norm(values - through(name, values)) / np.linalg.norm(values)
    assert lost == pytest.approx(share, abs=0.01)


@pytest.mark.parametrize(("name", "half"), HALVES.items())
def test_a_block_has_as_many_levels_as_its_bits_allow_and_none_at_zero(name: str, half: int):
    for _, found in blocks_of(name, numbers(40 * BLOCK)):
        levels = np.unique(np.abs(found))
        assert len(levels) <= half
        np.testing.assert_allclose(levels / levels[0], np.arange(1, 2 * half, 2)[: len(levels)])


@pytest.mark.parametrize("name", HALVES)
def test_blocks_of_zeros_come_back_as_zeros_beside_others(name: str):
    values = numbers(8 * BLOCK)
    values[2 * BLOCK : 4 * BLOCK] = 0
    values[5 * BLOCK : 6 * BLOCK] = 1e-42
    found = through(name, values)
    assert not found[2 * BLOCK : 4 * BLOCK].any()
    assert not found[5 * BLOCK : 6 * BLOCK].any()
    assert np.count_nonzero(found) == 5 * BLOCK


@pytest.mark.parametrize("name", HALVES)
@pytest.mark.parametrize("kind", ["normal", "heavy", "still"])
def test_error_feedback_stays_bounded_over_many_rounds(name: str, kind: str):
    size = 16 * BLOCK
    kept, most = np.zeros(size, np.float32), 0.0
    for turn in range(200):
        values = numbers(size, turn)
        if kind == "heavy":
            values = blocks_unlike_each_other(size, turn, 1.0).clip(-50, 50)
        if kind == "still":  # rows that get nothing, like those of unused words
            values[BLOCK // 2 :: BLOCK] = 0
            values.reshape(-1, 64)[::2] = 0
        kept = kept + values
        most = max(most, float(np.linalg.norm(values)))
        kept = kept - through(name, kept)
    assert np.linalg.norm(kept) < 3 * most


@pytest.mark.parametrize(("name", "k"), [("sparse", 64), ("sparse128", 128), ("sparse256", 256)])
@given(size=st.integers(1024, 3 * RUN + 50), seed=st.integers(0, 2**16))
@settings(max_examples=30, deadline=None)
def test_sparse_keeps_the_largest_of_each_run_and_their_signs(
    name: str, k: int, size: int, seed: int
):
    values = numbers(size, seed)
    found = through(name, values)
    for start in range(0, size, RUN):
        run, got = values[start : start + RUN], found[start : start + RUN]
        kept = np.flatnonzero(got)
        count = -(-k * run.size // RUN)
        assert kept.size == count
        assert set(kept) == set(np.argsort(-np.abs(run), kind="stable")[:count])
        assert (np.sign(got[kept]) == np.sign(run[kept])).all()
    assert len(set(np.abs(found[found != 0]))) <= 2


def test_of_equal_magnitudes_the_first_ones_are_kept():
    values = np.tile(np.float32([0.5, -0.5]), RUN)  # two runs
    found = through("sparse", values)
    assert list(np.flatnonzero(found)) == [*range(64), *range(RUN, RUN + 64)]


def test_the_two_magnitudes_lower_the_error_to_what_two_means_can():
    sizes = np.abs(numbers(5000)) + 2
    (low, high), bound = two_means(sizes)
    wanted = min(
        sum(((part - part.mean()) ** 2).sum() for part in np.split(np.sort(sizes), [at]))
        for at in range(50, 4950, 50)
    )
    got = ((sizes - np.where(sizes > bound, high, low)) ** 2).sum()
    assert got <= 1.01 * wanted


@given(
    size=st.integers(1, 400),
    seed=st.integers(0, 2**16),
    spread=st.sampled_from([0.0, 0.3, 2.0, 20.0]),
    zeros=st.floats(0, 1),
)
@settings(max_examples=60, deadline=None)
def test_the_two_magnitudes_are_the_same_whatever_way_the_sums_are_made(
    size: int, seed: int, spread: float, zeros: float
):
    """With values of like size they are exact, with others in a written order."""
    rng = np.random.default_rng(seed)
    sizes = np.exp(spread * rng.standard_normal(size)).astype(np.float32)
    sizes[rng.random(size) < zeros] = 0
    (low, high), bound = two_means(sizes)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sparse, "EXACT", 0.0)
        assert two_means(sizes)[0].tobytes() == np.float32([low, high]).tobytes()
        assert two_means(sizes)[1] == bound


def test_bits_per_parameter_are_what_the_table_says():
    spec = spec_of(100 * RUN)
    bits = {
        name: sum(
            8 * np.dtype({"F32": "f4", "BF16": "u2", "U8": "u1"}[p.dtype]).itemsize * p.shape[0]
            for p in codec(name).parts(spec)
        )
        / spec.size
        for name in NAMES
    }
    assert bits["fp32"] == 32
    assert bits["bf16"] == 16
    wanted = {"int8": 8.125, "int4": 4.125, "int3": 3.125, "int2": 2.125}
    assert {name: bits[name] for name in wanted} == wanted
    wanted = {"sparse": 10 / 64, "sparse128": 9 / 32, "sparse256": 8 / 16}
    assert {name: bits[name] for name in wanted} == pytest.approx(wanted, abs=0.001)


@pytest.mark.parametrize(
    ("part", "change"),
    [
        (LEVELS, lambda a: np.float32([np.nan, 1])),
        (LEVELS, lambda a: np.float32([2, 1])),
        (LEVELS, lambda a: np.float32([-1, 1])),
        (HIGH, lambda a: a[::-1].copy()),
        (HIGH, lambda a: np.zeros_like(a)),
        (HIGH, lambda a: np.full_like(a, 255)),
        (HIGH, lambda a: a ^ np.uint8(1)),
        (LOW, lambda a: a[::-1].copy()),
        (LOW, lambda a: np.zeros_like(a)),
    ],
)
def test_sparse_parts_that_no_encoder_writes_are_refused(part: str, change):
    values = numbers(RUN + 1500)
    how, spec = codec("sparse"), spec_of(values.size)
    stored = dict(how.encode(values))
    stored[part] = change(stored[part])
    with pytest.raises(Integrity) as caught:
        how.reader(spec, stored)(0, values.size, np.empty(values.size, np.float32))
    assert caught.value.code == "tensor.format"


@pytest.mark.parametrize(
    ("name", "part", "step"),
    [
        *(("int4", STEP, step) for step in (np.nan, np.inf, 0.0, -1.0)),
        *((name, SCALE, step) for name in HALVES for step in (np.nan, np.inf, -1.0)),
    ],
)
def test_steps_that_no_encoder_writes_are_refused(name: str, part: str, step: float):
    values = numbers(1100)
    how, spec = codec(name), spec_of(values.size)
    stored = dict(how.encode(values))
    stored[part] = stored[part].copy()
    stored[part][2] = step
    with pytest.raises(Integrity) as caught:
        how.reader(spec, stored)(0, values.size, np.empty(values.size, np.float32))
    assert caught.value.code == "tensor.format"


@given(data=st.data(), name=st.sampled_from(NAMES))
@settings(max_examples=60, deadline=None)
def test_flipped_bytes_are_read_as_finite_numbers_of_the_declared_size_or_refused(
    data: st.DataObject, name: str
):
    values = numbers(RUN + 1111)
    how, spec = codec(name), spec_of(values.size)
    stored = {suffix: part.copy() for suffix, part in how.encode(values).items()}
    suffix = data.draw(st.sampled_from(sorted(stored)))
    line = stored[suffix].view(np.uint8)
    line[data.draw(st.integers(0, line.size - 1))] ^= data.draw(st.integers(1, 255))
    found = np.full(values.shape, 7, np.float32)
    # Anything but a refusal in the codec's own words fails the test.
    with contextlib.suppress(Integrity):
        found = how.reader(spec, stored)(0, values.size, np.empty(values.size, np.float32))
    assert found.shape == values.shape


@pytest.mark.parametrize("name", NAMES)
def test_error_feedback_loses_nothing_but_what_it_still_holds(name: str):
    """Sum of what was sent and what is kept is the sum of what was to be sent (beta = 1)."""
    how, size = codec(name), RUN + 500
    spec = spec_of(size)
    kept = np.zeros(size, np.float32)
    sent = np.zeros(size, np.float64)
    wanted = np.zeros(size, np.float64)
    for turn in range(20):
        values = numbers(size, turn)
        wanted += values
        kept = kept + values
        arrived = how.reader(spec, how.encode(kept))(0, size, np.empty(size, np.float32))
        sent += arrived
        kept = kept - arrived
    np.testing.assert_allclose(sent + kept, wanted, atol=1e-4)


def test_deltas_and_files_carry_every_codec(tmp_path: Path):
    from distribai.merge.delta import DeltaHeader, open_delta, write_delta
    from distribai.merge.weights import manifest_hash

    rng = np.random.default_rng(0)
    base = {
        t.name: (
            rng.standard_normal(t.shape).astype(np.float32)
            if t.role != "int_buffer"
            else np.zeros(t.shape, np.int64)
        )
        for t in ODD.travelling
    }
    local = {
        n: (a - a.dtype.type(1) if a.dtype == np.float32 else a.copy()) for n, a in base.items()
    }
    for name in NAMES:
        header = DeltaHeader("job_x", "task_x", 1, 0, manifest_hash(ODD), name, 10, 1)
        write_delta(tmp_path / name, ODD, base, local, header)
        delta = open_delta(tmp_path / name, ODD, header)
        for spec in ODD.travelling:
            if spec.role != "int_buffer" and spec.size:
                read = delta.packed.reader(spec)
                found = read(0, spec.size, np.empty(spec.size, np.float32))
                dense = not name.startswith("sparse") or spec.size < 1024
                assert not dense or np.abs(found - 1).max() < 0.02
