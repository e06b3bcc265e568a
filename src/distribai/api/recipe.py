"""The recipe: a job as a person writes it, in YAML or JSON.

::

    name: my-model
    steps: 1000                 # inner steps per worker
    model: {profile: tiny}      # or {architecture_config: {dim: 128, ...}}
    data: {files: [a.txt]}      # or {source: stdlib}, the default
    H: 50                       # inner steps per round (also: inner_steps)
    preset: fast                # int3 both ways; also: default, silent
    optimizer: {lr: 0.003}

Everything but ``name`` and ``steps`` has a default, and all defaults are those of
:mod:`distribai.core.spec`. What the person gave and nothing would read is refused rather than
ignored. :meth:`Recipe.to_spec` makes the job spec, once the files' hashes are known.
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Mapping
from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Discriminator, Tag, ValidationError, with_config

from distribai.api import recipe_text
from distribai.api.presets import Preset, expand
from distribai.api.recipe_problems import as_invalid_spec, near_miss
from distribai.core.architectures import config_from, family
from distribai.core.codecs import CodecStage
from distribai.core.plain import from_plain, to_plain
from distribai.core.spec import (
    BlobRef,
    DataSpec,
    JobSpec,
    ModelSpec,
    OptimizerSpec,
    OuterSpec,
    Priority,
    ResourceSpec,
    RoundSpec,
    ScheduleSpec,
    SnapshotSpec,
)
from distribai.core.validation import validate_spec
from distribai.errors import InvalidSpec

DEFAULT_FAMILY = "decoder_transformer"
DEFAULT_PROFILE = "tiny"

_JOB = JobSpec(name="", model=ModelSpec("", {}), data=DataSpec(), steps=1)
"""Where the defaults are read from."""

_STRICT = ConfigDict(extra="forbid", frozen=True, strict=True)


@with_config(_STRICT)
@dataclasses.dataclass(frozen=True)
class OptimizerRecipe(OptimizerSpec):
    """The spec's fields, strictly read."""


@with_config(_STRICT)
@dataclasses.dataclass(frozen=True)
class ScheduleRecipe(ScheduleSpec):
    """The spec's fields, strictly read."""


@with_config(_STRICT)
@dataclasses.dataclass(frozen=True)
class OuterRecipe(OuterSpec):
    """The spec's fields, strictly read."""


@with_config(_STRICT)
@dataclasses.dataclass(frozen=True)
class CodecStageRecipe(CodecStage):
    """The spec's fields, strictly read."""


ScheduleOfCodecs = Annotated[
    Annotated[str, Tag("one codec")] | Annotated[tuple[CodecStageRecipe, ...], Tag("stages")],
    Discriminator(lambda value: "stages" if isinstance(value, (list, tuple)) else "one codec"),
]
"""One codec's name, or stages by round. The tags keep pydantic from trying both."""


@with_config(_STRICT)
@dataclasses.dataclass(frozen=True)
class RoundRecipe(RoundSpec):
    """The spec's fields, strictly read."""

    codec_up: ScheduleOfCodecs = _JOB.rounds.codec_up  # type: ignore[assignment]
    codec_down: ScheduleOfCodecs = _JOB.rounds.codec_down  # type: ignore[assignment]


@with_config(_STRICT)
@dataclasses.dataclass(frozen=True)
class SnapshotRecipe(SnapshotSpec):
    """The spec's fields, strictly read."""


@with_config(_STRICT)
@dataclasses.dataclass(frozen=True)
class ResourceRecipe(ResourceSpec):
    """The spec's fields, strictly read."""


class ModelRecipe(BaseModel):
    """The model: a profile of a family, or all of its knobs.

    ``vocab_size`` changes a profile's, for a tokenizer of one's own. ``init`` is a path of
    safetensors weights to start from.
    """

    model_config = _STRICT

    family: str = DEFAULT_FAMILY
    profile: str | None = None
    architecture_config: dict[str, Any] | None = None
    vocab_size: int | None = None
    init: str | None = None


class DataRecipe(BaseModel):
    """The data: paths of ``files``, or the name of a built-in data set in ``source``.

    ``tokenizer`` is the path of a ``tokenizers`` JSON; without it the model reads bytes.
    """

    model_config = _STRICT

    source: str | None = None
    files: tuple[str, ...] = ()
    format: Literal["text", "jsonl"] = _JOB.data.format
    field: str = _JOB.data.field
    tokenizer: str | None = None
    held_out: float = _JOB.data.held_out


class Recipe(BaseModel):
    """A job as a person describes it; see the module's docstring."""

    model_config = _STRICT

    name: str
    steps: int
    preset: Preset = "default"
    model: ModelRecipe = ModelRecipe()
    data: DataRecipe = DataRecipe()
    batch: int = _JOB.batch
    seq_len: int = _JOB.seq_len
    seed: int = _JOB.seed
    paradigm: str = _JOB.paradigm
    priority: Priority = _JOB.priority
    workers_min: int = _JOB.workers_min
    workers_max: int = _JOB.workers_max
    max_attempts: int = _JOB.max_attempts
    optimizer: OptimizerRecipe = OptimizerRecipe()
    schedule: ScheduleRecipe = ScheduleRecipe()
    outer: OuterRecipe = OuterRecipe()
    rounds: RoundRecipe = RoundRecipe()
    snapshots: SnapshotRecipe = SnapshotRecipe()
    resources: ResourceRecipe = ResourceRecipe()

    @property
    def paths(self) -> tuple[str, ...]:
        """Files that the recipe names, as written, each once: data, tokenizer, first weights."""
        named = (*self.data.files, self.data.tokenizer, self.model.init)
        return tuple(dict.fromkeys(path for path in named if path is not None))

    def to_spec(self, blobs: Mapping[str, BlobRef]) -> JobSpec:
        """The job spec.

        Args:
            blobs: hash and size of each of :attr:`paths`.

        Raises:
            InvalidSpec: the figures or the architecture are not possible, see
                :func:`distribai.core.validation.validate_spec`.
            KeyError: ``blobs`` lack a path.
        """
        data = DataSpec(
            source="blobs" if self.data.files else self.data.source or _JOB.data.source,
            files=tuple(blobs[path] for path in self.data.files),
            format=self.data.format,
            field=self.data.field,
            tokenizer=None if self.data.tokenizer is None else blobs[self.data.tokenizer],
            held_out=self.data.held_out,
        )
        spec = JobSpec(
            name=self.name,
            model=self._model_spec(blobs),
            data=data,
            steps=self.steps,
            batch=self.batch,
            seq_len=self.seq_len,
            seed=self.seed,
            paradigm=self.paradigm,
            priority=self.priority,
            workers_min=self.workers_min,
            workers_max=self.workers_max,
            max_attempts=self.max_attempts,
            optimizer=from_plain(OptimizerSpec, to_plain(self.optimizer)),
            schedule=from_plain(ScheduleSpec, to_plain(self.schedule)),
            outer=from_plain(OuterSpec, to_plain(self.outer)),
            rounds=from_plain(RoundSpec, to_plain(self.rounds)),
            snapshots=from_plain(SnapshotSpec, to_plain(self.snapshots)),
            resources=from_plain(ResourceSpec, to_plain(self.resources)),
        )
        validate_spec(spec)
        return spec

    def _model_spec(self, blobs: Mapping[str, BlobRef]) -> ModelSpec:
        model, knobs, profile = self.model, self.model.architecture_config, ""
        if knobs is None:
            profile = model.profile or DEFAULT_PROFILE
            knobs = _profile_knobs(model.family, profile)
            if model.vocab_size is not None:
                knobs["vocab_size"] = model.vocab_size
        config = to_plain(config_from(model.family, knobs))
        init = None if model.init is None else blobs[model.init]
        return ModelSpec(model.family, config, profile, init)


def parse_recipe(text: str, where: str) -> Recipe:
    """Read a recipe.

    Args:
        text: YAML or JSON.
        where: what to call it in messages, usually its path.

    Raises:
        InvalidSpec: ``spec.invalid`` (not well-formed, or fields that are unknown, missing or
            ill-typed: the message names all of them, ``field`` is the first one's dotted path), or
            ``spec.unused_knob``.
    """
    return recipe_of(recipe_text.load(text, where), where)


def recipe_of(values: Mapping[str, Any], where: str) -> Recipe:
    """A recipe from plain values, as :func:`parse_recipe` reads it from text.

    Raises:
        InvalidSpec: see :func:`parse_recipe`.
    """
    plain, written_as = _with_inner_steps(dict(values), where)
    plain = expand(_without_cold_start(plain))
    try:
        text = json.dumps(plain, allow_nan=False)
    except ValueError:
        raise InvalidSpec(
            "spec.invalid",
            f"{where} has a number that is not finite.",
            "NaN and infinity have no place in a recipe.",
        ) from None
    try:
        # As JSON: strict means there that lists are tuples, but 8.5 is no int and "8" neither.
        recipe = Recipe.model_validate_json(text)
    except ValidationError as problem:
        raise as_invalid_spec(problem, Recipe, where, written_as) from None
    _refuse_unused(plain, recipe)
    return recipe


def effective_text(spec: JobSpec) -> str:
    """The whole spec with all defaults filled in, as YAML to be read."""
    import yaml  # takes a while to import

    text: str = yaml.safe_dump(to_plain(spec), sort_keys=False, allow_unicode=True)
    return text


def chosen_text(spec: JobSpec) -> str:
    """What of a spec is not as by default, with its name, steps and model, as YAML to be read."""
    import yaml  # takes a while to import

    model = spec.model
    knobs = _profile_knobs(model.family, model.profile) if model.profile else {}
    usual = dataclasses.replace(_JOB, model=ModelSpec(DEFAULT_FAMILY, knobs))
    plain, default = to_plain(spec), to_plain(usual)
    chosen = {"name": spec.name, "steps": spec.steps} | _differing(plain, default)
    text: str = yaml.safe_dump(chosen, sort_keys=False, allow_unicode=True)
    return text


def _differing(values: Mapping[str, Any], usual: Mapping[str, Any]) -> dict[str, Any]:
    found = {}
    for key, value in values.items():
        other = usual.get(key)
        if isinstance(value, dict) and isinstance(other, dict):
            value = _differing(value, other)
            if not value:
                continue
        if value != other:
            found[key] = value
    return found


def _with_inner_steps(values: dict[str, Any], where: str) -> tuple[dict[str, Any], dict[str, str]]:
    """``H`` and ``inner_steps`` are short for ``rounds.inner_steps``; only one may stand there.

    Returns:
        The values without the short name, and what the person wrote for which field.
    """
    given = [name for name in ("H", "inner_steps") if name in values]
    if not given:
        return values, {}
    rounds = values.get("rounds", {})
    if not isinstance(rounds, dict):
        # Reported as it is; the short name is not what is wrong.
        return {k: v for k, v in values.items() if k not in given}, {}
    if len(given) > 1 or "inner_steps" in rounds:
        raise InvalidSpec(
            "spec.invalid",
            f"{where} gives the inner steps of a round twice.",
            "H, inner_steps and rounds.inner_steps mean the same: keep one of them.",
            field="rounds.inner_steps",
        )
    values["rounds"] = {**rounds, "inner_steps": values.pop(given[0])}
    return values, {"rounds.inner_steps": given[0]}


def _without_cold_start(values: dict[str, Any]) -> dict[str, Any]:
    """No ramp, unless it was asked for, when a job starts from trained weights (A1)."""
    model, outer = values.get("model"), values.get("outer", {})
    starts_trained = isinstance(model, dict) and model.get("init") is not None
    if starts_trained and isinstance(outer, dict):
        return {**values, "outer": {"ramp": 0, **outer}}
    return values


def _profile_knobs(family_name: str, profile: str) -> dict[str, Any]:
    profiles = family(family_name).PROFILES
    if profile not in profiles:
        raise InvalidSpec(
            "spec.model",
            f"The family {family_name!r} has no profile {profile!r}.",
            near_miss(profile, profiles) or f"Profiles: {', '.join(profiles)}.",
            field="model.profile",
        )
    knobs: dict[str, Any] = to_plain(profiles[profile])
    return knobs


def _refuse_unused(given: Mapping[str, Any], recipe: Recipe) -> None:
    """Refuse what stands in the recipe and nothing would read.

    Raises:
        InvalidSpec: ``spec.unused_knob``.
    """
    optimizer, kind = recipe.optimizer.name, recipe.schedule.kind
    data, knobs = recipe.data, recipe.model.architecture_config is not None
    unused = {
        "model.profile": ("model.architecture_config is given", knobs),
        "model.vocab_size": (
            "model.architecture_config is given: its own vocab_size counts",
            knobs,
        ),
        "data.source": ("data.files are given", bool(data.files)),
        "data.format": ("the data set is built in", not data.files),
        "data.field": ("only the format jsonl has fields", data.format != "jsonl"),
        "optimizer.muon_lr": ("the optimizer is adamw", optimizer == "adamw"),
        "optimizer.muon_momentum": ("the optimizer is adamw", optimizer == "adamw"),
        "schedule.decay": (f"the schedule is {kind}: only wsd reads it", kind != "wsd"),
        "schedule.floor": ("a constant schedule has no floor", kind == "constant"),
    }
    for path, (why, is_unused) in unused.items():
        section, name = path.split(".")
        # A null is no choice: it stands for the default.
        if is_unused and given.get(section, {}).get(name) is not None:
            raise InvalidSpec(
                "spec.unused_knob",
                f"{path} would be ignored: {why}.",
                f"Leave out {path}, or change what makes it useless.",
                field=path,
            )
