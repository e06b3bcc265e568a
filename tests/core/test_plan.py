"""What a job takes."""

import dataclasses
from typing import Any

import pytest

from distribai.core import plan as module
from distribai.core.architectures import families, manifest_of
from distribai.core.architectures.decoder_transformer import PROFILES, activation_bytes
from distribai.core.datasets import BUILT_IN
from distribai.core.plain import to_plain
from distribai.core.plan import parameter_count, plan, task_memory_mb
from distribai.core.spec import BlobRef, DataSpec, JobSpec, ModelSpec

TINY = to_plain(PROFILES["tiny"])


def make_spec(**changes: Any) -> JobSpec:
    """A valid spec; ``a__b=value`` changes a field of a section."""
    spec = JobSpec("job", ModelSpec("decoder_transformer", TINY), DataSpec(), steps=1000)
    for key, value in changes.items():
        section, _, field = key.rpartition("__")
        if section:
            value = dataclasses.replace(getattr(spec, section), **{field: value})
        spec = dataclasses.replace(spec, **{section or field: value})
    return spec


@pytest.mark.parametrize("name", PROFILES)
def test_parameters_are_counted_without_a_manifest(name: str) -> None:
    plain = to_plain(PROFILES[name])
    spec = make_spec(model__config=plain)
    assert parameter_count(spec) == manifest_of("decoder_transformer", plain).parameters


@pytest.mark.parametrize(
    "knobs", [{"tied": False}, {"qk_norm": True}, {"kv_heads": 2}, {"layers": 1}]
)
def test_every_knob_counts(knobs: dict[str, Any]) -> None:
    plain = to_plain(dataclasses.replace(PROFILES["tiny"], **knobs))
    spec = make_spec(model__config=plain)
    assert parameter_count(spec) == manifest_of("decoder_transformer", plain).parameters


def test_every_family_offers_what_planning_needs() -> None:
    for found in families().values():
        for config in found.PROFILES.values():
            assert found.parameters(config) > 0
            assert found.activation_bytes(config, 1, 64) > 0


def test_bytes_follow_the_count_of_a_ring() -> None:
    """A9: at H = 100 and K = 4, fp32 rounds move 150 times less."""
    spec = make_spec(rounds__inner_steps=100, rounds__codec_up="fp32", rounds__codec_down="fp32")
    parameters = parameter_count(spec)
    found = plan(spec, parameters, 4, 140_000)
    assert found.data_parallel_ratio == pytest.approx(150, rel=0.01)
    assert (found.rounds, found.tasks, found.evaluations) == (10, 40, 11)
    assert found.bytes_up == pytest.approx(10 * 4 * parameters, rel=0.01)
    assert found.bytes_down == pytest.approx(found.bytes_up, rel=0.01)
    assert found.bytes_total == 4 * (found.bytes_up + found.bytes_down)
    assert found.tokens == 1000 * 8 * 64 * 4
    assert found.epochs == pytest.approx(1000 * 8 * 4 / 140_000)


def test_a_single_node_has_no_ring_and_unprepared_data_no_epochs() -> None:
    found = plan(make_spec(), 10, 1)
    assert (found.data_parallel_ratio, found.epochs) == (None, None)
    with pytest.raises(ValueError, match="at least one node"):
        plan(make_spec(), 10, 0)


def test_memory_is_state_and_activations() -> None:
    spec = make_spec()
    found = plan(spec, parameter_count(spec), 2)
    state = 24 * parameter_count(spec)
    activations = activation_bytes(PROFILES["tiny"], spec.batch, spec.seq_len)
    assert found.memory_bytes == state + activations + module.RUNTIME_BYTES
    assert task_memory_mb(spec) << 20 < found.memory_bytes + (1 << 20)
    assert task_memory_mb(make_spec(resources__memory_mb=123)) == 123


def test_checkpointing_takes_less_memory() -> None:
    large = PROFILES["large"]
    saving = dataclasses.replace(large, checkpointing=True)
    assert activation_bytes(saving, 8, 64) < activation_bytes(large, 8, 64) / 3


def test_what_is_fetched_once_is_the_data_and_the_weights_to_begin_with() -> None:
    assert plan(make_spec(), 10, 1).once_bytes == 2 * BUILT_IN["stdlib"]
    assert plan(make_spec(), 10, 1, data_bytes=5).once_bytes == 5
    files = (BlobRef("0" * 64, 100), BlobRef("1" * 64, 20))
    own = make_spec(data__source="blobs", data__files=files, model__init=BlobRef("2" * 64, 7))
    assert plan(own, 10, 1).once_bytes == 2 * 120 + 7
