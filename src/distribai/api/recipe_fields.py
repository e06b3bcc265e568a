"""Every field of a recipe with what it means: the reference of recipes is made from this."""

from __future__ import annotations

import dataclasses
import json
import types
import typing
from collections.abc import Iterator, Mapping
from typing import Any, Final

from pydantic import BaseModel
from pydantic_core import PydanticUndefined

from distribai.api.recipe import DEFAULT_PROFILE, Recipe
from distribai.core.architectures import family
from distribai.core.codecs import PARTS

_CODECS: Final = ", ".join(f"`{name}`" for name in PARTS)

MEANINGS: Final[Mapping[str, str]] = {
    "name": "What people call the job; 1 to 100 printable characters.",
    "steps": "Inner steps that each worker makes in all.",
    "preset": "Settings of rounds by name; what else is given in the recipe goes first.",
    "model.family": "The family of architectures.",
    "model.profile": f"A size of the family; `{DEFAULT_PROFILE}` when nothing else is given.",
    "model.architecture_config": "All of the family's knobs, instead of a profile.",
    "model.vocab_size": "Size of the vocabulary, instead of the profile's.",
    "model.init": "Path of safetensors weights to start from; without it the seed makes them.",
    "data.source": "Name of a built-in data set; `stdlib` when no files are given.",
    "data.files": "Paths of the files to train on, relative to the recipe, in this order.",
    "data.format": "What the files hold: plain text, or JSON Lines.",
    "data.field": "With `jsonl`, the name of the field with the text.",
    "data.tokenizer": "Path of a `tokenizers` JSON; without it the model reads bytes.",
    "data.held_out": "Share of the sequences that training never touches, up to 0.5.",
    "batch": "Sequences per worker and step.",
    "seq_len": "Tokens that each sequence predicts.",
    "seed": "Seed of the first weights and of the order of the data.",
    "paradigm": "How the nodes work together.",
    "priority": "Which job gets nodes first: `P0` before `P3`.",
    "workers_min": "Nodes that the job waits for.",
    "workers_max": "Nodes that it uses at most.",
    "max_attempts": "How often a task may be tried before the job fails.",
    "optimizer.name": "The inner optimizer; `muon` takes the hidden matrices, AdamW the rest.",
    "optimizer.lr": "Peak learning rate of AdamW.",
    "optimizer.betas": "AdamW's two decay rates, each at least 0 and below 1.",
    "optimizer.eps": "AdamW's term against division by zero.",
    "optimizer.weight_decay": "Decoupled weight decay.",
    "optimizer.clip": "Largest norm of the gradient; what is longer is shortened to it.",
    "optimizer.muon_lr": "Peak learning rate of Muon.",
    "optimizer.muon_momentum": "Momentum of Muon.",
    "schedule.kind": "Course of the learning rate after the warm-up.",
    "schedule.warmup": "Inner steps over which the learning rate rises; 0 for none.",
    "schedule.floor": "The last learning rate's share of the peak.",
    "schedule.decay": "With `wsd`, the share of all steps that the rate falls over.",
    "outer.eta": "Step size of the outer optimizer.",
    "outer.mu": "Momentum of the outer optimizer.",
    "outer.ramp": "First rounds that lead from averaging to `eta` and `mu`; 0 for none.",
    "outer.ending": "Last rounds that lead back to averaging; 0 for none.",
    "rounds.inner_steps": "Inner steps per round; `H` and `inner_steps` are short for it.",
    "rounds.min_inner_steps": "Least share of the inner steps that a slow node is given.",
    "rounds.quorum": "Share of the expected results that starts the grace.",
    "rounds.grace_min": "Shortest grace for the others, in seconds.",
    "rounds.grace_max": "Longest grace for the others, in seconds.",
    "rounds.staleness": "Versions by which late work may be behind and still count; 0 for none.",
    "rounds.moments": "Whether a node keeps its optimizer's moments or starts fresh each round.",
    "rounds.codec_up": f"How deltas travel to the orchestrator: {_CODECS}.",
    "rounds.codec_down": "How updates travel to the nodes, likewise.",
    "snapshots.every": "Of each so many versions one keeps its whole weights; 1 to 64.",
    "snapshots.keep": "How many of these are kept, the newest; one of about 64 stays.",
    "resources.memory_mb": "Memory of a device (VRAM) in MiB at least; 0: the planner's estimate.",
    "resources.device": "The kind of device that the job needs.",
    "resources.precision": "Numbers to compute with; `auto` takes what the device is good at.",
    "resources.compile": "Whether to compile the model with torch first.",
    "resources.host_memory_mb": "Main memory of the machine in MiB, beside an accelerator's own.",
    "resources.disk_mb": "Free disk in MiB that the machine must have.",
    "resources.gflops": "Measured speed that a device must have: 10^9 fp32 operations a second.",
    "resources.link_mbps": "Measured link that a machine must have: 10^6 bits a second.",
    "resources.standing": "`trusted`: no nodes on probation.",
    "resources.isolation": "Level of isolation that a machine must offer at least.",
}
"""A sentence for each field, by dotted name."""


@dataclasses.dataclass(frozen=True, slots=True)
class Field:
    """One field of the recipe, in words. ``default`` is JSON; empty when there is none."""

    name: str
    kind: str
    default: str
    required: bool
    meaning: str


def fields() -> Iterator[Field]:
    """Every field, in the order of the recipe.

    Raises:
        KeyError: a field has no sentence in :data:`MEANINGS`.
    """
    yield from _walk(Recipe, "")


def profiles(family_name: str) -> tuple[str, ...]:
    """The sizes of a family."""
    return tuple(family(family_name).PROFILES)


def _walk(model: type[Any], prefix: str) -> Iterator[Field]:
    for name, kind, default in _entries(model):
        if isinstance(kind, type) and (
            issubclass(kind, BaseModel) or dataclasses.is_dataclass(kind)
        ):
            yield from _walk(kind, f"{prefix}{name}.")
            continue
        required = default is PydanticUndefined
        shown = "" if required or default in (None, ()) else json.dumps(default)
        yield Field(prefix + name, _words(kind), shown, required, MEANINGS[prefix + name])


def _entries(model: type[Any]) -> Iterator[tuple[str, Any, Any]]:
    """Name, type and default of each field of a pydantic model or a dataclass."""
    if issubclass(model, BaseModel):
        for name, field in model.model_fields.items():
            yield name, field.annotation, field.default
    else:
        hints = typing.get_type_hints(model)
        for item in dataclasses.fields(model):
            yield item.name, hints[item.name], item.default


_NAMES: Final[Mapping[Any, str]] = {
    str: "text",
    int: "whole number",
    float: "number",
    bool: "`true` or `false`",
}


def _words(kind: Any) -> str:
    """A type, for people."""
    origin, inner = typing.get_origin(kind), typing.get_args(kind)
    if origin is typing.Literal:
        return ", ".join(f"`{value}`" for value in inner)
    if origin in (types.UnionType, typing.Union):
        return " or ".join(_words(part) for part in inner if part is not type(None))
    if origin is tuple:
        return f"list: {_words(inner[0])}"
    if dataclasses.is_dataclass(kind):
        return f"{{{', '.join(f.name for f in dataclasses.fields(kind))}}}"
    return "mapping" if origin is dict else _NAMES[kind]
