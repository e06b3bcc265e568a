"""Frozen dataclasses to and from plain JSON values, strictly.

Only what specs need: dataclasses, str, int, float, bool, ``None``, enums, ``tuple[X, ...]``,
``Mapping[str, X]`` and unions with ``None``. Unknown and missing fields are refused. The canonical
text (sorted keys, no spaces) is what gets hashed.
"""

from __future__ import annotations

import dataclasses
import functools
import hashlib
import json
import types
import typing
from collections.abc import Mapping
from enum import Enum
from typing import Any, TypeVar

T = TypeVar("T")

Plain = Any
"""A JSON value: dict, list, str, int, float, bool or None."""


def to_plain(value: object) -> Plain:
    """A JSON value of a frozen dataclass (or of anything it may contain)."""
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return {f.name: to_plain(getattr(value, f.name)) for f in dataclasses.fields(value)}
    if isinstance(value, Enum):
        return value.value
    if isinstance(value, Mapping):
        return {str(k): to_plain(v) for k, v in value.items()}
    if isinstance(value, (tuple, list)):
        return [to_plain(v) for v in value]
    if value is None or isinstance(value, (str, int, float, bool)):
        return value
    raise TypeError(f"{type(value).__name__} has no plain form")


def from_plain(cls: type[T], value: Plain, path: str = "") -> T:
    """Build ``cls`` from a JSON value.

    Raises:
        ValueError: an unknown, missing or ill-typed field; the message names its dotted path.
    """
    return typing.cast(T, _read(cls, value, path))


def canonical_json(value: object) -> str:
    """The one text of a value: sorted keys, no spaces, no NaN."""
    return json.dumps(to_plain(value), sort_keys=True, separators=(",", ":"), allow_nan=False)


def fingerprint(value: object) -> str:
    """SHA-256 (hex) of :func:`canonical_json`."""
    return hashlib.sha256(canonical_json(value).encode()).hexdigest()


def _read(kind: Any, value: Plain, path: str) -> Any:
    if dataclasses.is_dataclass(kind) and isinstance(kind, type):
        return _read_dataclass(kind, value, path)
    origin = typing.get_origin(kind)
    if origin in (typing.Union, types.UnionType):
        return _read_union(kind, value, path)
    if origin is tuple:
        item = typing.get_args(kind)[0]
        if not isinstance(value, list):
            raise ValueError(f"{path or 'value'}: expected a list")
        return tuple(_read(item, v, f"{path}[{i}]") for i, v in enumerate(value))
    if origin is not None and isinstance(origin, type) and issubclass(origin, Mapping):
        item = typing.get_args(kind)[1]
        if not isinstance(value, dict):
            raise ValueError(f"{path or 'value'}: expected a mapping")
        return {k: _read(item, v, f"{path}.{k}") for k, v in value.items()}
    if origin is typing.Literal:
        if value not in typing.get_args(kind):
            raise ValueError(f"{path}: expected one of {typing.get_args(kind)}, not {value!r}")
        return value
    return _read_scalar(kind, value, path)


def _read_dataclass(kind: Any, value: Plain, path: str) -> Any:
    if not isinstance(value, dict):
        raise ValueError(f"{path or kind.__name__}: expected a mapping")
    fields, hints = _fields_of(kind)
    unknown = sorted(set(value) - set(fields))
    if unknown:
        raise ValueError(f"{path or kind.__name__}: unknown field {unknown[0]!r}")
    found: dict[str, Any] = {}
    for name, field in fields.items():
        where = f"{path}.{name}" if path else name
        if name in value:
            found[name] = _read(hints[name], value[name], where)
        elif field.default is dataclasses.MISSING and (
            field.default_factory is dataclasses.MISSING
        ):
            raise ValueError(f"{where}: missing")
    return kind(**found)


@functools.cache
def _fields_of(kind: Any) -> tuple[dict[str, dataclasses.Field[Any]], dict[str, Any]]:
    """The fields and their types: found out once, for it takes longer than reading a value."""
    return {f.name: f for f in dataclasses.fields(kind)}, typing.get_type_hints(kind)


def _read_union(kind: Any, value: Plain, path: str) -> Any:
    options = typing.get_args(kind)
    if value is None:
        if type(None) in options:
            return None
        raise ValueError(f"{path}: must not be null")
    problems = []
    for option in options:
        if option is type(None):
            continue
        try:
            return _read(option, value, path)
        except ValueError as problem:
            problems.append(str(problem))
    raise ValueError("; or ".join(problems))


def _read_scalar(kind: Any, value: Plain, path: str) -> Any:
    if kind is Any or kind is object:
        return value
    if isinstance(kind, type) and issubclass(kind, Enum):
        try:
            return kind(value)
        except ValueError as problem:
            raise ValueError(f"{path}: {problem}") from problem
    if kind is float and isinstance(value, int) and not isinstance(value, bool):
        return float(value)
    if not isinstance(kind, type) or not isinstance(value, kind):
        raise ValueError(f"{path}: expected {getattr(kind, '__name__', kind)}, not {value!r}")
    if kind is int and isinstance(value, bool):
        raise ValueError(f"{path}: expected int, not {value!r}")
    return value
