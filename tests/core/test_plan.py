"""What a job takes, and what is refused at the door."""

import dataclasses
from typing import Any

import pytest

from distribai.core import plan as module
from distribai.core.architectures import families, manifest_of
from distribai.core.architectures.decoder_transformer import PROFILES, Config, activation_bytes
from distribai.core.plain import to_plain
from distribai.core.plan import parameter_count, plan, task_memory_mb, validate_spec
from distribai.core.spec import BlobRef, DataSpec, JobSpec, ModelSpec, RoundSpec
from distribai.errors import InvalidData, InvalidSpec

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
    spec = make_spec(rounds__inner_steps=100)
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
    assert (found.data_parallel_ratio, found.epochs, found.data_bytes) == (None, None, None)
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


def test_the_default_spec_of_every_profile_is_valid() -> None:
    for config in PROFILES.values():
        validate_spec(make_spec(model__config=to_plain(config)))


@pytest.mark.parametrize(
    ("field", "value", "code"),
    [
        ("name", "", "spec.invalid"),
        ("name", "x" * 101, "spec.invalid"),
        ("steps", 0, "spec.steps"),
        ("steps", -5, "spec.steps"),
        ("batch", 0, "spec.plan"),
        ("seq_len", 0, "spec.plan"),
        ("seed", -1, "spec.plan"),
        ("workers_min", 0, "spec.workers"),
        ("workers_max", 0, "spec.workers"),
        ("workers_max", 10_001, "spec.workers"),
        ("max_attempts", 0, "spec.plan"),
        ("paradigm", "diloko", "spec.paradigm"),
        ("data.held_out", 0.0, "spec.plan"),
        ("data.held_out", 0.51, "spec.plan"),
        ("data.held_out", float("nan"), "spec.plan"),
        ("resources.memory_mb", -1, "spec.plan"),
        ("optimizer.lr", 0.0, "spec.plan"),
        ("optimizer.lr", float("inf"), "spec.plan"),
        ("optimizer.lr", float("nan"), "spec.plan"),
        ("optimizer.betas", (0.9,), "spec.plan"),
        ("optimizer.betas", (0.9, 1.0), "spec.plan"),
        ("optimizer.eps", 0.0, "spec.plan"),
        ("optimizer.clip", 0.0, "spec.plan"),
        ("optimizer.weight_decay", -0.1, "spec.plan"),
        ("optimizer.muon_lr", 0.0, "spec.plan"),
        ("optimizer.muon_momentum", 1.0, "spec.plan"),
        ("schedule.warmup", -1, "spec.plan"),
        ("schedule.floor", 1.5, "spec.plan"),
        ("schedule.decay", -0.1, "spec.plan"),
        ("outer.eta", 0.0, "spec.plan"),
        ("outer.mu", 1.0, "spec.plan"),
        ("outer.ramp", -1, "spec.plan"),
        ("rounds.inner_steps", 0, "spec.plan"),
        ("rounds.min_inner_steps", 0.0, "spec.plan"),
        ("rounds.quorum", 0.0, "spec.plan"),
        ("rounds.quorum", 1.1, "spec.plan"),
        ("rounds.grace_min", -1.0, "spec.plan"),
        ("rounds.grace_max", 1.0, "spec.plan"),
        ("rounds.codec_up", "int5", "codec.unknown"),
        ("rounds.codec_down", "fp16", "codec.unknown"),
    ],
)
def test_impossible_figures_are_refused_by_name(field: str, value: object, code: str) -> None:
    with pytest.raises(InvalidSpec) as caught:
        validate_spec(make_spec(**{field.replace(".", "__"): value}))
    assert (caught.value.code, caught.value.field) == (code, field)
    assert caught.value.hint


def test_workers_must_form_a_range() -> None:
    with pytest.raises(InvalidSpec, match=r"workers_max is 3: .*workers_min \(4\)") as caught:
        validate_spec(make_spec(workers_min=4, workers_max=3))
    assert caught.value.code == "spec.workers"


@pytest.mark.parametrize(
    "data",
    [
        DataSpec(source="blobs"),
        DataSpec(source="stdlib", files=(BlobRef("0" * 64, 1),)),
        DataSpec(format="jsonl", field=""),
    ],
)
def test_data_that_contradicts_itself_is_refused(data: DataSpec) -> None:
    with pytest.raises(InvalidSpec) as caught:
        validate_spec(make_spec(data=data))
    assert caught.value.code == "spec.invalid"


def test_a_data_set_that_nobody_has_is_refused_as_when_it_is_submitted() -> None:
    with pytest.raises(InvalidData) as caught:
        validate_spec(make_spec(data=DataSpec(source="stdlob")))
    assert (caught.value.code, caught.value.field) == ("data.missing", "data.source")


@pytest.mark.parametrize(
    "knobs",
    [
        {"layers": 10**12},
        {"dim": 2**40, "heads": 2**20},
        {"vocab_size": 10**30},
    ],
)
def test_a_model_too_large_to_plan_is_refused_without_building_it(knobs: dict[str, Any]) -> None:
    with pytest.raises(InvalidSpec) as caught:
        validate_spec(make_spec(model__config={**TINY, **knobs}))
    assert caught.value.code == "spec.model_too_large"


def test_a_model_larger_than_the_largest_node_is_refused() -> None:
    spec = make_spec(model__config=to_plain(PROFILES["xl"]))
    validate_spec(spec, memory_cap_bytes=16 * 10**9)
    with pytest.raises(InvalidSpec, match=r"the largest has 4\.0 GB") as caught:
        validate_spec(spec, memory_cap_bytes=4 * 10**9)
    assert caught.value.code == "spec.model_too_large"


@pytest.mark.parametrize(
    ("knobs", "field"),
    [
        ({"heads": 3}, "heads"),
        ({"layers": 0}, "layers"),
        ({"vocab_size": 256}, "vocab_size"),
        ({"dropout": 0.1}, ""),
    ],
)
def test_an_impossible_architecture_is_refused(knobs: dict[str, Any], field: str) -> None:
    with pytest.raises(InvalidSpec) as caught:
        validate_spec(make_spec(model__config={**TINY, **knobs}))
    assert caught.value.code == "spec.model"
    assert caught.value.field.endswith(field)


def test_a_small_vocabulary_is_fine_with_a_tokenizer_of_its_own() -> None:
    validate_spec(
        make_spec(
            model__config=to_plain(Config(dim=8, layers=1, heads=2, ffn_dim=8, vocab_size=50)),
            data=DataSpec(tokenizer=BlobRef("0" * 64, 1)),
            rounds=RoundSpec(inner_steps=1),
        )
    )
