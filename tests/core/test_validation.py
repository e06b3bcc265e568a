"""What is refused at the door."""

from typing import Any

import pytest

from distribai.core.architectures.decoder_transformer import PROFILES, Config
from distribai.core.plain import to_plain
from distribai.core.spec import BlobRef, DataSpec, RoundSpec
from distribai.core.validation import validate_spec
from distribai.errors import InvalidData, InvalidSpec
from tests.core.test_plan import TINY, make_spec


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
