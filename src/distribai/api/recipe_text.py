"""The text of a recipe into plain values: YAML or JSON, strictly.

YAML is read with PyYAML's safe loader, narrowed: a key may stand only once, tags and aliases are
refused (an alias can expand a few lines into gigabytes), and unquoted words mean what YAML 1.2
says: ``1e-3`` is a number, ``no``, ``1:30`` and ``2026-01-01`` are text.
"""

from __future__ import annotations

import json
import re
from functools import cache
from typing import Any, Final

from distribai.errors import InvalidSpec

MAX_BYTES: Final = 256 << 10
"""Longest recipe."""

_SCALARS: Final = {
    "null": (r"^(~|null|Null|NULL|)$", ["~", "n", "N", ""]),
    "bool": (r"^(true|True|TRUE|false|False|FALSE)$", "tTfF"),
    "int": (r"^[-+]?(0|[1-9][0-9_]*)$", "-+0123456789"),
    "float": (
        r"^([-+]?(\.[0-9]+|[0-9]+(\.[0-9]*)?)([eE][-+]?[0-9]+)?"
        r"|[-+]?\.(inf|Inf|INF)|\.(nan|NaN|NAN))$",
        "-+.0123456789",
    ),
}
"""What an unquoted word means, by YAML 1.2's core schema, and the letters it starts with."""


class _Twice(ValueError):
    """A key stands twice in one mapping."""


def load(text: str, where: str) -> dict[str, Any]:
    """The mapping that a recipe's text holds.

    Args:
        text: YAML or JSON.
        where: what to call the text in messages, usually its path.

    Raises:
        InvalidSpec: ``spec.invalid``; too long, not well-formed, a key twice, an alias, or not a
            mapping.
    """
    if len(text.encode(errors="replace")) > MAX_BYTES:
        raise _refuse(where, f"it is longer than {MAX_BYTES >> 10} KiB")
    value = _load_json(text, where) if text.lstrip().startswith("{") else None
    if value is None:
        value = _load_yaml(text, where)
    if not isinstance(value, dict):
        raise _refuse(where, "it is not a mapping of fields")
    return value


def _load_json(text: str, where: str) -> Any:
    """The value of JSON text; None when it is something else, a YAML flow mapping perhaps."""
    try:
        return json.loads(text, object_pairs_hook=_unique)
    except _Twice as problem:
        raise _refuse(where, str(problem)) from None
    except RecursionError:
        raise _refuse(where, "it is nested too deeply") from None
    except ValueError:
        return None


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for key, value in pairs:
        if key in found:
            raise _Twice(f"the field {key!r} stands twice")
        found[key] = value
    return found


def _load_yaml(text: str, where: str) -> Any:
    import yaml  # only recipes need it, and it takes a while to import

    try:
        loader = _loader_class()(text)
        try:
            return loader.get_single_data()
        finally:
            loader.dispose()
    except RecursionError:
        raise _refuse(where, "it is nested too deeply") from None
    except (yaml.YAMLError, ValueError) as problem:
        # ValueError: a key twice, or an integer of thousands of digits.
        raise _refuse(where, " ".join(str(problem).split())) from None


@cache
def _loader_class() -> Any:
    import yaml

    class Loader(yaml.SafeLoader):
        def compose_node(self, parent: Any, index: Any) -> Any:
            event = self.peek_event()  # type: ignore[no-untyped-call]
            line = event.start_mark.line + 1
            if isinstance(event, yaml.AliasEvent):
                raise yaml.YAMLError(f"line {line} uses an alias (*name), recipes have none")
            if getattr(event, "tag", None) is not None:
                raise yaml.YAMLError(f"line {line} uses a tag (!name), recipes have none")
            return super().compose_node(parent, index)

        def construct_mapping(self, node: Any, deep: bool = False) -> Any:
            found: dict[Any, Any] = super().construct_mapping(node, deep=deep)
            if len(found) < len(node.value):
                keys = [key.value for key, _ in node.value]
                raise _Twice(f"the field {_first_repeated(keys)!r} stands twice")
            return found

    Loader.yaml_implicit_resolvers = {}
    for kind, (pattern, first) in _SCALARS.items():
        Loader.add_implicit_resolver(f"tag:yaml.org,2002:{kind}", re.compile(pattern), list(first))
    return Loader


def _first_repeated(keys: list[str]) -> str:
    """Equal keys may be written differently (1 and 1.0): then the last one is as good as any."""
    return next((key for place, key in enumerate(keys) if key in keys[:place]), keys[-1])


def _refuse(where: str, why: str) -> InvalidSpec:
    return InvalidSpec(
        "spec.invalid",
        f"{where} cannot be read as a recipe: {why}.",
        "A recipe is YAML or JSON; `distribai submit --help` shows a short one.",
    )
