"""Recipes: what people write, and what they hear when it cannot be run."""

import contextlib
import dataclasses
import json
from typing import Any

import pytest
import yaml
from hypothesis import given, settings
from hypothesis import strategies as st

from distribai.api import recipe_fields, recipe_text
from distribai.api.presets import PRESETS
from distribai.api.recipe import Recipe, chosen_text, effective_text, parse_recipe, recipe_of
from distribai.core.architectures.decoder_transformer import PROFILES
from distribai.core.plain import from_plain, to_plain
from distribai.core.spec import BlobRef, DataSpec, JobSpec, ModelSpec
from distribai.errors import InvalidSpec

BLOB = BlobRef("ab" * 32, 7)


def refused(text: str, code: str = "spec.invalid") -> InvalidSpec:
    """The error that a recipe, or the spec it makes, is refused with."""
    with pytest.raises(InvalidSpec) as caught:
        parse_recipe(text, "job.yaml").to_spec({"a.txt": BLOB})
    assert caught.value.code == code
    return caught.value


def with_base(text: str) -> str:
    return f"name: x\nsteps: 100\n{text}"


def test_name_and_steps_are_enough_and_all_defaults_are_the_specs() -> None:
    spec = recipe_of({"name": "my-model", "steps": 1000}, "the command").to_spec({})
    tiny = ModelSpec("decoder_transformer", to_plain(PROFILES["tiny"]), "tiny")
    assert spec == JobSpec("my-model", tiny, DataSpec(), 1000)


def test_everything_can_be_said_in_a_recipe() -> None:
    """Each field of the spec is reached, so that a new one cannot be forgotten here."""
    recipe = parse_recipe(FULL, "job.yaml")
    assert recipe.paths == ("a.jsonl", "b.jsonl", "tok.json", "first.safetensors")
    refs = {path: BlobRef(f"{i:064x}", i + 1) for i, path in enumerate(recipe.paths)}
    spec = recipe.to_spec(refs)
    assert spec.data.files == (refs["a.jsonl"], refs["b.jsonl"])
    assert (spec.data.tokenizer, spec.model.init) == (refs["tok.json"], refs["first.safetensors"])
    plain = JobSpec("", ModelSpec("", {}), DataSpec(), 0)
    same = [
        f"{section.name}.{f.name}"
        for section in dataclasses.fields(spec)
        if dataclasses.is_dataclass(getattr(spec, section.name))
        for f in dataclasses.fields(getattr(spec, section.name))
        if getattr(getattr(spec, section.name), f.name)
        == getattr(getattr(plain, section.name), f.name)
    ]
    same += [
        f.name for f in dataclasses.fields(spec) if getattr(spec, f.name) == getattr(plain, f.name)
    ]
    # There is one kind and paradigm so far, and floor and the Muon knobs exclude others.
    assert set(same) == {
        "kind",
        "paradigm",
        "optimizer.name",
        "model.profile",
    }


FULL = """
name: full
steps: 1_000
batch: 4
seq_len: 128
seed: 3
paradigm: diloco
priority: P0
workers_min: 2
workers_max: 5
max_attempts: 7
inner_steps: 20
model:
  family: decoder_transformer
  architecture_config: {dim: 64, layers: 1, heads: 2, ffn_dim: 96, vocab_size: 1000}
  init: first.safetensors
data:
  files: [a.jsonl, b.jsonl]
  format: jsonl
  field: body
  tokenizer: tok.json
  held_out: 0.1
optimizer: {lr: 1e-3, betas: [0.8, 0.99], eps: 1e-9, weight_decay: 0, clip: 2, muon_lr: 0.01,
  muon_momentum: 0.85}
schedule: {kind: wsd, warmup: 5, floor: 0.1, decay: 0.3}
outer: {eta: 0.7, mu: 0.9, ramp: 4, ending: 3}
rounds: {min_inner_steps: 0.5, quorum: 0.75, grace_min: 1, grace_max: 60, staleness: 2,
  moments: fresh, codec_up: int8, codec_down: [{from_round: 0, codec: bf16}]}
snapshots: {every: 5, keep: 7}
resources:
  {memory_mb: 900, device: cpu, precision: bf16, compile: true, host_memory_mb: 1000,
   disk_mb: 100, gflops: 1.5, link_mbps: 2.5, standing: trusted, isolation: L1}
"""


def test_json_is_as_good_as_yaml() -> None:
    as_json = json.dumps(yaml.safe_load(FULL.replace("1_000", "1000").replace("1e-", "1.0e-")))
    assert parse_recipe(as_json, "job.json") == parse_recipe(FULL, "job.yaml")
    tabbed = '{\n\t"name": "x",\n\t"steps": 3\n}'
    assert parse_recipe(tabbed, "job.json").steps == 3
    assert parse_recipe("{name: x, steps: 3}", "job.yaml").name == "x"


def test_a_profile_may_change_its_vocabulary() -> None:
    recipe = parse_recipe(with_base("model: {profile: small, vocab_size: 300}"), "job.yaml")
    model = recipe.to_spec({}).model
    assert (model.profile, model.config["vocab_size"], model.config["dim"]) == ("small", 300, 192)


@pytest.mark.parametrize("short", ["H: 7", "inner_steps: 7", "rounds: {inner_steps: 7}"])
def test_inner_steps_have_a_short_name(short: str) -> None:
    assert parse_recipe(with_base(short), "job.yaml").rounds.inner_steps == 7


def test_a_preset_is_written_out_as_figures() -> None:
    fast = parse_recipe(with_base("preset: fast"), "r").to_spec({})
    assert (fast.rounds.codec_up, fast.rounds.codec_down) == ("int3", "int3")
    assert "fast" not in effective_text(fast)
    plain = parse_recipe(with_base(""), "r").to_spec({})
    assert parse_recipe(with_base("preset: default"), "r").to_spec({}) == plain
    assert dataclasses.replace(fast, rounds=plain.rounds) == plain


@pytest.mark.parametrize("preset", PRESETS)
def test_every_preset_makes_a_job_and_yields_to_what_is_given(preset: str) -> None:
    text = f"preset: {preset}\nH: 7\nrounds: {{codec_down: bf16}}"
    rounds = parse_recipe(with_base(text), "r").to_spec({}).rounds
    assert (rounds.inner_steps, rounds.codec_down) == (7, "bf16")


def test_an_unknown_preset_is_refused() -> None:
    assert "preset" in refused(with_base("preset: loud")).message


def test_codecs_may_change_by_round() -> None:
    stages = "[{from_round: 0, codec: int4}, {from_round: 20, codec: int2}]"
    rounds = f"rounds: {{inner_steps: 1, codec_up: {stages}}}"
    spec = parse_recipe(with_base(rounds), "r").to_spec({})
    assert [spec.codec_up_of(n) for n in (0, 19, 20)] == ["int4", "int4", "int2"]
    assert from_plain(JobSpec, to_plain(spec)) == spec


def test_a_wrong_schedule_is_named_by_its_field() -> None:
    def wrong(value: str, code: str = "spec.invalid") -> InvalidSpec:
        return refused(with_base(f"rounds: {{codec_up: {value}}}"), code)

    assert "rounds.codec_up: " in wrong("5").message
    assert wrong("[{from_round: 0, codec: int4, k: 1}]").field == "rounds.codec_up[0].k"
    assert "rounds.codec_up[0].from_round is missing" in wrong("[{codec: int4}]").message
    assert wrong("morse", "codec.unknown").field == "rounds.codec_up"
    late = wrong("[{from_round: 3, codec: int4}]", "spec.plan")
    assert late.field == "rounds.codec_up[0].from_round"


def test_sparse_rounds_average_unless_something_else_is_asked_for() -> None:
    sparse = "rounds: {codec_up: [{from_round: 0, codec: int4}, {from_round: 9, codec: sparse}]}\n"
    outer = parse_recipe(with_base(sparse), "r").outer
    assert (outer.eta, outer.mu) == (1.0, 0.0)
    outer = parse_recipe(with_base(sparse + "outer: {mu: 0.5}"), "r").outer
    assert (outer.eta, outer.mu) == (1.0, 0.5)
    assert parse_recipe(with_base("rounds: {codec_up: int2}"), "r").outer.mu == 0.8


def test_inner_steps_under_two_names_are_refused() -> None:
    for text in ("H: 7\ninner_steps: 7", "H: 7\nrounds: {inner_steps: 7}"):
        assert "twice" in refused(with_base(text)).message


def test_trained_weights_start_without_the_cold_start() -> None:
    started = "model: {init: w.safetensors}\n"
    assert parse_recipe(with_base(started), "r").outer.ramp == 0
    assert parse_recipe(with_base(started + "outer: {ramp: 3}"), "r").outer.ramp == 3
    assert parse_recipe(with_base(""), "r").outer.ramp == 8


def test_all_problems_are_named_at_once_by_what_the_person_wrote() -> None:
    problem = refused(
        "name: 5\nstep: 10\nH: 1.5\nbatch: true\nseed: '3'\noptimizer: {lrr: 1, lr: a}\n"
        "data: {files: [1]}\nschedule: {kind: cosin}\n"
    )
    for words in (
        "job.yaml has 10 problems",
        "name: input should be a valid string, not 5",
        "steps is missing",
        "step is not a field",
        "H: input should be a valid integer, not 1.5",
        "batch: input should be a valid integer, not True",
        "seed: input should be a valid integer, not '3'",
        "optimizer.lrr is not a field",
        "optimizer.lr: input should be a valid number",
        "data.files[0]: input should be a valid string",
        "schedule.kind: input should be 'cosine', 'wsd' or 'constant', not 'cosin'",
    ):
        assert words in problem.message
    assert problem.field == "name"
    assert "Did you mean steps?" in problem.hint
    assert "Did you mean optimizer.lr?" in problem.hint


def test_very_many_problems_are_counted() -> None:
    problem = refused(with_base(f"data: {{files: {list(range(500))}}}"))
    assert "500 problems" in problem.message
    assert "and 490 more" in problem.message
    assert len(problem.message) < 1500


@pytest.mark.parametrize(
    ("text", "field", "hint"),
    [
        ("inner_step: 5", "inner_step", "Did you mean inner_steps?"),
        ("rounds: {qorum: 1}", "rounds.qorum", "Did you mean rounds.quorum?"),
        ("rounds: {H: 30}", "rounds.H", "Did you mean rounds.inner_steps?"),
        ("rounds: {codec_up: {0: int4}}", "rounds.codec_up", "stages as a list"),
        ("model: {profil: tiny}", "model.profil", "Did you mean model.profile?"),
        ("zzz: 1", "zzz", "docs/reference/recipe.md"),
        ("rounds: 3\nH: 4", "rounds", "docs/reference/recipe.md"),
        ("optimizer:", "optimizer", "docs/reference/recipe.md"),
    ],
)
def test_a_wrong_field_is_named_with_what_may_have_been_meant(
    text: str, field: str, hint: str
) -> None:
    problem = refused(with_base(text))
    assert problem.field == field
    assert hint in problem.hint


@pytest.mark.parametrize(
    ("text", "field"),
    [
        ("model: {profile: tiny, architecture_config: {dim: 8}}", "model.profile"),
        ("model: {vocab_size: 300, architecture_config: {dim: 8}}", "model.vocab_size"),
        ("data: {source: stdlib, files: [a.txt]}", "data.source"),
        ("data: {format: text}", "data.format"),
        ("data: {files: [a.txt], field: body}", "data.field"),
        ("optimizer: {name: adamw, muon_lr: 0.1}", "optimizer.muon_lr"),
        ("optimizer: {name: adamw, muon_momentum: 0.1}", "optimizer.muon_momentum"),
        ("schedule: {decay: 0.1}", "schedule.decay"),
        ("schedule: {kind: constant, floor: 0.1}", "schedule.floor"),
    ],
)
def test_a_knob_that_nothing_would_read_is_refused(text: str, field: str) -> None:
    problem = refused(with_base(text), "spec.unused_knob")
    assert problem.field == field


@pytest.mark.parametrize(
    ("text", "code", "field"),
    [
        ("steps: 0", "spec.steps", "steps"),
        ("model: {profile: tinny}", "spec.model", "model.profile"),
        ("model: {family: rnn}", "spec.model", "model.family"),
        (
            "model: {architecture_config: {dim: 8, layers: 1, heads: 3, ffn_dim: 8}}",
            "spec.model",
            "model.architecture_config.heads",
        ),
        (
            "model: {architecture_config: {dim: 8, layers: 1, heads: 2, ffn_dim: 8, drop: 1}}",
            "spec.model",
            "model.architecture_config",
        ),
        ("model: {vocab_size: 10}", "spec.model", "model.architecture_config.vocab_size"),
        ("workers_min: 9\nworkers_max: 3", "spec.workers", "workers_max"),
        ("paradigm: dilocko", "spec.paradigm", "paradigm"),
        ("rounds: {codec_up: int5}", "codec.unknown", "rounds.codec_up"),
        (
            "model: {vocab_size: 999999999999}",
            "spec.model_too_large",
            "model.architecture_config.vocab_size",
        ),
    ],
)
def test_what_cannot_run_is_refused_with_its_own_code(text: str, code: str, field: str) -> None:
    base = "name: x\n" if text.startswith("steps") else with_base("")
    assert refused(base + text, code).field == field


@pytest.mark.parametrize(
    ("text", "why"),
    [
        ("", "not a mapping"),
        ("- a", "not a mapping"),
        ("just words", "not a mapping"),
        ("a: [", "flow node"),
        ("a: 1\na: 2", "'a' stands twice"),
        ("b: {a: 1, a: 2}", "'a' stands twice"),
        ("1: 2\n1.0: 3", "stands twice"),
        ('{"a": 1, "a": 2}', "'a' stands twice"),
        ("a: &x [1]\nb: *x", "line 2 uses an alias"),
        ("a: !!python/object:os.system {}", "line 1 uses a tag"),
        ("a: !!timestamp 99", "uses a tag"),
        ("a: 1\n---\nb: 2", "single document"),
        ("? {a: 1}\n: 2", "unhashable"),
        ("[" * 20_000, "nested too deeply"),
        ('{"a":' * 20_000, "nested too deeply"),
        ("a: " + "9" * 5000, "digits"),
        ("a: \x00", "special characters"),
        ("a: " + "x" * recipe_text.MAX_BYTES, "longer than 256 KiB"),
    ],
)
def test_text_that_is_no_recipe_is_refused_with_the_reason(text: str, why: str) -> None:
    problem = refused(text)
    assert "job.yaml cannot be read as a recipe" in problem.message
    assert why in problem.message


def test_nan_and_half_characters_are_refused() -> None:
    assert "not finite" in refused(with_base("optimizer: {lr: .nan}")).message
    assert "not finite" in refused(with_base("model: {architecture_config: {dim: .inf}}")).message
    assert "invalid JSON" in refused('name: "\\ud800"\nsteps: 1').message


def test_unquoted_words_mean_what_yaml_1_2_says() -> None:
    text = (
        "a: 1e-3\nb: no\nc: 1:30\nd: 2026-01-01\ne: .5\nf: -3\ng: true\nh: ~\ni:\nj: '5'\nk: 0x10"
    )
    assert recipe_text.load(text, "r") == {
        "a": 0.001,
        "b": "no",
        "c": "1:30",
        "d": "2026-01-01",
        "e": 0.5,
        "f": -3,
        "g": True,
        "h": None,
        "i": None,
        "j": "5",
        "k": "0x10",
    }


VALUES: st.SearchStrategy[Any] = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5),
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.dictionaries(
            st.sampled_from([*Recipe.model_fields, "lr", "profile", "x"]), inner, max_size=4
        )
    ),
    max_leaves=8,
)


@settings(max_examples=150, deadline=None)
@given(st.dictionaries(st.sampled_from([*Recipe.model_fields, "H", "x"]), VALUES, max_size=6))
def test_whatever_stands_in_a_recipe_it_is_read_or_refused(values: dict[str, Any]) -> None:
    with contextlib.suppress(InvalidSpec):
        assert isinstance(recipe_of({"name": "x", "steps": 1, **values}, "recipe"), Recipe)


@settings(max_examples=100, deadline=None)
@given(st.text(alphabet="ab:{}[],-\n '\"&*!#|>?1.e~", max_size=40))
def test_any_text_is_a_mapping_or_refused(text: str) -> None:
    with contextlib.suppress(InvalidSpec):
        assert isinstance(recipe_text.load(text, "r"), dict)


def test_the_effective_text_shows_the_whole_spec() -> None:
    spec = recipe_of({"name": "déjà", "steps": 10}, "r").to_spec({})
    text = effective_text(spec)
    assert "déjà" in text
    assert from_plain(JobSpec, yaml.safe_load(text)) == spec


def test_the_chosen_text_shows_only_what_is_not_as_by_default() -> None:
    values = {"name": "x", "steps": 1, "H": 20, "model": {"profile": "small", "vocab_size": 300}}
    assert yaml.safe_load(chosen_text(recipe_of(values, "r").to_spec({}))) == {
        "name": "x",
        "steps": 1,
        "model": {"profile": "small", "config": {"vocab_size": 300}},
        "rounds": {"inner_steps": 20},
    }
    knobs = to_plain(PROFILES["tiny"])
    values = {"name": "x", "steps": 5, "model": {"architecture_config": knobs}}
    assert yaml.safe_load(chosen_text(recipe_of(values, "r").to_spec({})))["model"] == {
        "config": knobs
    }


def test_every_field_of_a_recipe_has_a_meaning_and_no_other_has_one() -> None:
    told = {field.name: field for field in recipe_fields.fields()}
    assert set(told) == set(recipe_fields.MEANINGS)
    assert told["name"].required
    assert (told["rounds.quorum"].kind, told["rounds.quorum"].default) == ("number", "0.5")
    assert (told["model.init"].kind, told["data.files"].kind) == ("text", "list: text")
