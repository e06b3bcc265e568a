"""Updates: written, applied, refused."""

from pathlib import Path

import numpy as np
import pytest

from distribai.errors import Integrity
from distribai.merge import update as module
from distribai.merge.delta import write_delta
from distribai.merge.update import UpdateHeader, apply_update, write_update
from distribai.merge.version0 import make_version0
from distribai.merge.weights import Weights
from tests.merge.support import ODD, blank, header, same, trained

HEADER = UpdateHeader("j", 4, ODD.hash, "fp32")


def some_update() -> Weights:
    update = trained(ODD, make_version0(ODD, 2), 3)
    return {n: np.asarray(a) for n, a in update.items()}


def test_an_update_is_subtracted_and_integers_are_replaced(tmp_path: Path):
    canonical, update = make_version0(ODD, 1), some_update()
    before = {n: a.copy() for n, a in canonical.items()}
    write_update(tmp_path / "u", ODD, update, HEADER)
    new = apply_update(ODD, canonical, tmp_path / "u", expect=HEADER)
    assert same(canonical, before)
    for spec in ODD.tensors:
        old = canonical[spec.name]
        if spec.role == "frozen":
            wanted = old
        elif spec.role == "int_buffer":
            wanted = update[spec.name]
        else:
            wanted = np.asarray(old - update[spec.name])
        assert new[spec.name].tobytes() == wanted.tobytes()
        assert not np.shares_memory(new[spec.name], old)


def test_in_place_and_chunks_change_no_bit(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    canonical = make_version0(ODD, 1)
    write_update(tmp_path / "u", ODD, some_update(), HEADER)
    new = apply_update(ODD, canonical, tmp_path / "u")
    monkeypatch.setattr(module, "CHUNK", 5)
    assert apply_update(ODD, canonical, tmp_path / "u", in_place=True) is canonical
    assert same(canonical, new)


@pytest.mark.parametrize("expect", [{"version": 5}, {"job_id": "k"}, {"codec": "int4"}])
def test_another_update_than_expected_is_refused_untouched(tmp_path: Path, expect: dict):
    canonical = make_version0(ODD, 1)
    write_update(tmp_path / "u", ODD, some_update(), HEADER)
    with pytest.raises(Integrity) as caught:
        apply_update(ODD, canonical, tmp_path / "u", expect=expect, in_place=True)
    assert caught.value.code == "tensor.manifest"
    assert same(canonical, make_version0(ODD, 1))


def test_a_delta_is_not_an_update(tmp_path: Path):
    base = make_version0(ODD, 1)
    write_delta(tmp_path / "d", ODD, base, trained(ODD, base, 2), header(ODD))
    with pytest.raises(Integrity) as caught:
        apply_update(ODD, base, tmp_path / "d")
    assert caught.value.code == "tensor.format"


def test_a_truncated_update_is_refused_untouched(tmp_path: Path):
    canonical = make_version0(ODD, 1)
    write_update(tmp_path / "u", ODD, some_update(), HEADER)
    data = (tmp_path / "u").read_bytes()
    (tmp_path / "u").write_bytes(data[:-1])
    with pytest.raises(Integrity):
        apply_update(ODD, canonical, tmp_path / "u", in_place=True)
    assert same(canonical, make_version0(ODD, 1))


def test_an_update_for_another_model_is_refused(tmp_path: Path):
    with pytest.raises(Integrity):
        write_update(tmp_path / "u", ODD, some_update(), UpdateHeader("j", 4, "0", "fp32"))
    _, momentum, _ = blank(ODD)
    with pytest.raises(Integrity):
        write_update(tmp_path / "u", ODD, momentum, HEADER)
    assert list(tmp_path.iterdir()) == []
