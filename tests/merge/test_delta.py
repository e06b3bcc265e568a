"""Deltas: what travels, and what is refused."""

import dataclasses
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from distribai.core.codecs import PARTS
from distribai.core.tensors import ParameterManifest, TensorSpec
from distribai.errors import DistribAIError, Integrity, InvalidSpec
from distribai.merge.codecs import codec
from distribai.merge.delta import KIND, open_delta, write_delta
from distribai.merge.feedback import passing
from distribai.merge.headers import to_metadata
from distribai.merge.packed import packed_layout
from distribai.merge.tensorfile import TensorWriter
from distribai.merge.version0 import make_version0
from distribai.merge.weights import Weights
from tests.merge.support import ODD, header, stored_delta, trained


def base_and_local() -> tuple[Weights, Weights]:
    base = make_version0(ODD, 1)
    return base, trained(ODD, base, 2)


def values(delta, spec: TensorSpec) -> np.ndarray:
    scratch = np.empty(spec.size, np.float32)
    return delta.packed.reader(spec)(0, spec.size, scratch).reshape(spec.shape)


def test_a_delta_is_base_minus_local_in_fp32_and_integers_travel_as_they_are(tmp_path: Path):
    base, local = base_and_local()
    delta = stored_delta(tmp_path, ODD, base, local)
    for spec in ODD.travelling:
        if spec.role == "int_buffer":
            assert delta.packed.integers(spec).tolist() == local[spec.name].reshape(-1).tolist()
        else:
            wanted = np.asarray(base[spec.name] - local[spec.name])
            assert values(delta, spec).tobytes() == wanted.tobytes()


def test_frozen_tensors_do_not_travel(tmp_path: Path):
    base, local = base_and_local()
    delta = stored_delta(tmp_path, ODD, base, local)
    assert set(delta.packed.arrays) == {t.name for t in ODD.travelling}


def test_the_header_comes_back_whole(tmp_path: Path):
    base, local = base_and_local()
    told = header(ODD, "t7", attempt=3, base_version=12, tokens=2**40, steps=9)
    write_delta(tmp_path / "d", ODD, base, local, told)
    assert open_delta(tmp_path / "d", ODD, {"job_id": "j"}).header == told


def test_the_same_training_makes_the_same_file(tmp_path: Path):
    base, local = base_and_local()
    one = write_delta(tmp_path / "a", ODD, base, local, header(ODD))
    two = write_delta(tmp_path / "b", ODD, base, local, header(ODD))
    assert one == two


@pytest.mark.parametrize(
    "changed",
    [
        {"job_id": "other"},
        {"task_id": "other"},
        {"attempt": 2},
        {"base_version": 1},
        {"tokens": 99},
        {"steps": 6},
        {"codec": "int4"},
    ],
)
def test_a_delta_made_for_something_else_is_refused(tmp_path: Path, changed: dict[str, object]):
    base, local = base_and_local()
    write_delta(tmp_path / "d", ODD, base, local, header(ODD))
    for expect in (dataclasses.replace(header(ODD), **changed), changed):  # type: ignore[arg-type]
        with pytest.raises(Integrity) as caught:
            open_delta(tmp_path / "d", ODD, expect)  # type: ignore[arg-type]
        assert caught.value.code == "tensor.manifest"


def test_a_delta_of_another_model_is_refused(tmp_path: Path):
    base, local = base_and_local()
    write_delta(tmp_path / "d", ODD, base, local, header(ODD))
    renamed = ParameterManifest((*ODD.tensors[:-1], TensorSpec("other", (9,), role="frozen")))
    with pytest.raises(Integrity) as caught:
        open_delta(tmp_path / "d", renamed, {})
    assert caught.value.code == "tensor.manifest"


def test_a_header_that_claims_another_manifest_is_refused_at_writing(tmp_path: Path):
    base, local = base_and_local()
    with pytest.raises(Integrity):
        write_delta(tmp_path / "d", ODD, base, local, header(ODD, manifest_hash="0"))
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf, 3.3e38, -1.1e18])
def test_a_diverged_training_is_refused_at_writing(tmp_path: Path, bad: float):
    base, local = base_and_local()
    local["conv"].reshape(-1)[-1] = bad
    with pytest.raises(Integrity, match="conv") as caught:
        write_delta(tmp_path / "d", ODD, base, local, header(ODD))
    assert caught.value.code == "tensor.nonfinite"
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf, 3.3e38, -1.1e18])
def test_a_file_with_values_that_are_not_finite_is_refused(tmp_path: Path, bad: float):
    write_raw(tmp_path / "d", bn_value=bad)
    with pytest.raises(Integrity, match=r"bn\.running_var") as caught:
        open_delta(tmp_path / "d", ODD, header(ODD))
    assert caught.value.code == "tensor.nonfinite"
    open_delta(tmp_path / "d", ODD, header(ODD), scan=False)


def write_raw(path: Path, bn_value: float = 0.0, **metadata: str) -> None:
    """A delta file that write_delta would not make; metadata of value "-" is left out."""
    told = to_metadata(KIND, header(ODD)) | metadata
    layout = packed_layout(ODD, codec("fp32"))
    with TensorWriter(path, layout, {k: v for k, v in told.items() if v != "-"}) as writer:
        for spec in ODD.travelling:
            kind = np.int64 if spec.role == "int_buffer" else np.float32
            fill = bn_value if spec.name == "bn.running_var" else 0
            writer.write(spec.name, 0, np.full(spec.size, fill, kind))
        writer.commit()


@pytest.mark.parametrize(
    "metadata",
    [
        {"format": "distribai.update.v1"},
        {"format": "-"},
        {"tokens": "-"},
        {"more": "1"},
        {"tokens": "-5"},
        {"tokens": "1e3"},
        {"tokens": "٣"},
        {"tokens": "9" * 40},
        {"tokens": ""},
    ],
)
def test_a_header_of_the_wrong_kind_is_refused(tmp_path: Path, metadata: dict[str, str]):
    write_raw(tmp_path / "d", **metadata)
    with pytest.raises(Integrity) as caught:
        open_delta(tmp_path / "d", ODD, {})
    assert caught.value.code == "tensor.format"


def test_an_unknown_codec_is_refused(tmp_path: Path):
    write_raw(tmp_path / "d", codec="morse")
    with pytest.raises(InvalidSpec) as caught:
        open_delta(tmp_path / "d", ODD, {})
    assert caught.value.code == "codec.unknown"


def test_a_truncated_delta_is_refused(tmp_path: Path):
    base, local = base_and_local()
    write_delta(tmp_path / "d", ODD, base, local, header(ODD))
    data = (tmp_path / "d").read_bytes()
    for size in (0, 7, 8, 100, len(data) // 2, len(data) - 1):
        (tmp_path / "d").write_bytes(data[:size])
        with pytest.raises(DistribAIError):
            open_delta(tmp_path / "d", ODD, header(ODD))


def test_local_weights_of_another_model_are_refused(tmp_path: Path):
    base, local = base_and_local()
    for bad in (
        {n: a for n, a in local.items() if n != "prime"},
        local | {"prime": local["prime"].astype(np.float16)},
        local | {"unheard.of": local["prime"]},
    ):
        with pytest.raises(Integrity) as caught:
            write_delta(tmp_path / "d", ODD, base, bad, header(ODD))
        assert caught.value.code == "tensor.manifest"


def test_base_and_local_must_not_share_storage(tmp_path: Path):
    base, local = base_and_local()
    local["matrix"] = base["matrix"][:]
    with pytest.raises(ValueError, match="share storage"):
        write_delta(tmp_path / "d", ODD, base, local, header(ODD))
    assert list(tmp_path.iterdir()) == []


def test_a_strided_local_tensor_gives_the_same_delta(tmp_path: Path):
    base, local = base_and_local()
    one = write_delta(tmp_path / "a", ODD, base, local, header(ODD))
    strided = local | {"matrix": np.asfortranarray(local["matrix"])}
    assert write_delta(tmp_path / "b", ODD, base, strided, header(ODD)) == one


def test_an_overflowing_difference_is_not_silent(tmp_path: Path):
    base, local = base_and_local()
    base["one"][0], local["one"][0] = 3e38, -3e38
    with pytest.raises(Integrity, match="one"):
        write_delta(tmp_path / "d", ODD, base, local, header(ODD))


@pytest.mark.parametrize("name", PARTS)
@given(data=st.data())
@settings(max_examples=40, deadline=None)
def test_a_changed_encoded_file_is_refused_or_holds_numbers(
    name: str, data: st.DataObject, tmp_path_factory: pytest.TempPathFactory
):
    """Whoever signs a lie gets it judged as a delta, or refused; nothing else can come of it."""
    folder = tmp_path_factory.mktemp("d")
    base = make_version0(ODD, 1)
    told = header(ODD, codec=name)
    write_delta(folder / "d", ODD, base, trained(ODD, base, 2), told)
    raw = bytearray((folder / "d").read_bytes())
    for _ in range(data.draw(st.integers(1, 4))):
        raw[data.draw(st.integers(0, len(raw) - 1))] ^= 1 << data.draw(st.integers(0, 7))
    cut = data.draw(st.sampled_from([0, 0, 1, 100]))
    (folder / "d").write_bytes(raw[: len(raw) - cut])
    try:
        delta = open_delta(folder / "d", ODD, told)
    except DistribAIError:
        return
    assert not cut
    for spec in passing(ODD).tensors:
        found = delta.packed.reader(spec)(0, spec.size, np.empty(spec.size, np.float32))
        assert np.isfinite(found).all()


@pytest.mark.parametrize("name", [n for n in PARTS if n != "int4"])
def test_a_file_in_another_codec_than_expected_is_refused(name: str, tmp_path: Path):
    base = make_version0(ODD, 1)
    write_delta(tmp_path / "d", ODD, base, trained(ODD, base, 2), header(ODD, codec=name))
    with pytest.raises(Integrity) as caught:
        open_delta(tmp_path / "d", ODD, header(ODD, codec="int4"))
    assert caught.value.code == "tensor.manifest"
