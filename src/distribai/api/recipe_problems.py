"""What is wrong with a recipe, in the words of the person who wrote it."""

from __future__ import annotations

import dataclasses
import difflib
from collections.abc import Iterable, Mapping
from typing import Any

from pydantic import BaseModel, ValidationError

from distribai.errors import InvalidSpec

_SHORT_NAMES = ("H", "inner_steps")
"""Fields of the whole recipe that are read before its model is."""

_ELSEWHERE = {"rounds.H": "Did you mean rounds.inner_steps? H stands outside of rounds."}
"""Names that exist, but not there."""

_STAGES = "One codec, or stages as a list: [{from_round: 0, codec: int4}, ...]."
"""Hint for a schedule of codecs that is neither."""

_TAGS = ("one codec", "stages")
"""What pydantic adds to a place where a field has two forms."""

_SHOWN = 10
"""Problems that are spelt out."""

_UNKNOWN = ("extra_forbidden", "unexpected_keyword_argument")
_MISSING = ("missing", "missing_argument")


def as_invalid_spec(
    problem: ValidationError, model: type[BaseModel], where: str, written_as: Mapping[str, str]
) -> InvalidSpec:
    """One error for people that names every field that is wrong.

    Args:
        problem: what pydantic found.
        model: the model that it read; from it come suggestions for misspelt fields.
        where: the recipe's name.
        written_as: what the person wrote for a dotted path, where that differs.
    """
    lines: list[str] = []
    hints: dict[str, None] = {}
    first = ""
    for error in problem.errors(include_url=False, include_context=False):
        path = _dotted(error["loc"])
        path = written_as.get(path, path)
        first = first or path
        if error["type"] in _UNKNOWN:
            lines.append(f"{path} is not a field")
            *section, name = error["loc"]
            known = [*_fields(model, section), *(() if section else _SHORT_NAMES)]
            near = _ELSEWHERE.get(path) or near_miss(str(name), known, ".".join(map(str, section)))
            hints[near] = None
        elif error["type"] in _MISSING:
            lines.append(f"{path} is missing")
        else:
            lines.append(f"{path or 'the recipe'}: {_sentence(error['msg'], error['input'])}")
            if path in ("rounds.codec_up", "rounds.codec_down"):
                hints[_STAGES] = None
    count = "a problem" if len(lines) == 1 else f"{len(lines)} problems"
    if len(lines) > _SHOWN:
        lines[_SHOWN:] = [f"and {len(lines) - _SHOWN} more"]
    hint = " ".join(h for h in hints if h) or "docs/reference/recipe.md lists all fields."
    return InvalidSpec(
        "spec.invalid", f"{where} has {count}: {'; '.join(lines)}.", hint, field=first
    )


def near_miss(name: str, known: Iterable[str], section: str = "") -> str:
    """A sentence that suggests what may have been meant, or nothing."""
    found = difflib.get_close_matches(name, list(known), n=1, cutoff=0.6)
    prefix = f"{section}." if section else ""
    return f"Did you mean {prefix}{found[0]}?" if found else ""


def _dotted(place: tuple[int | str, ...]) -> str:
    text = ""
    for part in place:
        if part in _TAGS:
            continue
        text += f"[{part}]" if isinstance(part, int) else f".{part}" if text else part
    return text


def _fields(model: type[Any], section: list[int | str]) -> list[str]:
    """Names of the fields at ``section`` inside ``model``; none when it has no fixed ones."""
    if not section:
        if issubclass(model, BaseModel):
            return list(model.model_fields)
        return (
            [f.name for f in dataclasses.fields(model)] if dataclasses.is_dataclass(model) else []
        )
    field = model.model_fields.get(str(section[0])) if issubclass(model, BaseModel) else None
    inner = None if field is None else field.annotation
    return _fields(inner, section[1:]) if isinstance(inner, type) else []


def _sentence(message: str, value: object) -> str:
    """pydantic's message with the value that it is about, if that is short."""
    shown = "" if isinstance(value, (dict, list)) else f", not {value!r:.60}"
    return message[:1].lower() + message[1:] + shown
