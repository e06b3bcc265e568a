"""Parameter manifests: counts, names and refused dimensions, without torch."""

from __future__ import annotations

import dataclasses

import pytest

from distribai.core.architectures import config_from, families, manifest_of
from distribai.core.architectures import decoder_transformer as dt
from distribai.core.plain import to_plain
from distribai.core.tensors import ParameterManifest, TensorSpec
from distribai.errors import InvalidSpec

WANTED = {"tiny": 0.4, "small": 1.5, "base": 7, "medium": 19, "large": 115, "xl": 305}


def test_the_scan_finds_every_family() -> None:
    assert list(families()) == ["decoder_transformer"]


@pytest.mark.parametrize("profile", WANTED)
def test_a_profile_has_about_the_promised_size(profile: str) -> None:
    count = dt.manifest(dt.PROFILES[profile]).parameters / 1e6
    assert count == pytest.approx(WANTED[profile], rel=0.1)


def test_an_untied_head_grouped_keys_and_qk_norm_show_in_the_manifest() -> None:
    plain = {
        "dim": 16,
        "layers": 1,
        "heads": 4,
        "kv_heads": 2,
        "ffn_dim": 24,
        "tied": False,
        "qk_norm": True,
    }
    shapes = {t.name: t.shape for t in manifest_of("decoder_transformer", plain).tensors}
    assert shapes["head.weight"] == (257, 16)
    assert shapes["blocks.0.attn.k.weight"] == (8, 16)
    assert shapes["blocks.0.attn.q_norm.weight"] == (4,)
    hidden = dt.hidden_matrices(config_from("decoder_transformer", plain))
    assert "blocks.0.ffn.down.weight" in hidden
    assert not hidden & {"embed.weight", "head.weight", "norm.weight"}


@pytest.mark.parametrize(
    ("knob", "value"),
    [
        ("heads", 3),
        ("heads", 0),
        ("kv_heads", 3),
        ("kv_heads", -1),
        ("dim", -4),
        ("layers", 0),
        ("window", -1),
        ("rope_theta", 0.5),
        ("heads", 128),
    ],
)
def test_impossible_dimensions_are_refused_with_the_knob(knob: str, value: float) -> None:
    config = dataclasses.replace(dt.PROFILES["tiny"], **{knob: value})
    with pytest.raises(InvalidSpec) as caught:
        dt.check(config)
    assert caught.value.code == "spec.model"
    assert caught.value.field == f"model.architecture_config.{knob}"


def test_an_unknown_knob_and_an_unknown_family_are_refused() -> None:
    plain = {**to_plain(dt.PROFILES["tiny"]), "experts": 8}
    with pytest.raises(InvalidSpec, match="unknown field 'experts'"):
        config_from("decoder_transformer", plain)
    with pytest.raises(InvalidSpec, match="no model family"):
        manifest_of("perceptron", {})


def test_the_manifest_hash_follows_every_detail_and_names_are_unique() -> None:
    one = ParameterManifest((TensorSpec("a", (2, 3)),))
    assert one.hash != ParameterManifest((TensorSpec("a", (3, 2)),)).hash
    assert one.hash != ParameterManifest((TensorSpec("a", (2, 3), role="frozen"),)).hash
    assert one.hash == ParameterManifest((TensorSpec("a", (2, 3)),)).hash
    with pytest.raises(ValueError, match="twice"):
        ParameterManifest((TensorSpec("a", ()), TensorSpec("a", ())))


def test_frozen_tensors_do_not_travel() -> None:
    manifest = ParameterManifest(
        (
            TensorSpec("a", (2,)),
            TensorSpec("b", (2,), role="frozen"),
            TensorSpec("c", (), "I64", "int_buffer"),
        )
    )
    assert [t.name for t in manifest.travelling] == ["a", "c"]
    assert manifest.parameters == 2
