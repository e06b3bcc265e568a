"""What deltas and updates say of themselves, as strings in the safetensors metadata."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any, TypeVar

from distribai.errors import Integrity

T = TypeVar("T")

Claims = Mapping[str, str | int]
"""Header fields by name that must have exactly these values; others may have any."""

_FORMAT = "format"


def to_metadata(kind: str, header: Any) -> dict[str, str]:
    """Metadata of a header dataclass whose fields are str and non-negative int."""
    fields = {f.name: str(getattr(header, f.name)) for f in dataclasses.fields(header)}
    return {_FORMAT: kind, **fields}


def from_metadata(kind: str, cls: type[T], metadata: Mapping[str, str]) -> T:
    """The header that metadata hold.

    Raises:
        Integrity: ``tensor.format``: another kind of file, or a missing, unknown or ill-typed
            field.
    """
    if metadata.get(_FORMAT) != kind:
        raise _wrong(f"it is {metadata.get(_FORMAT)!r}, not {kind!r}")
    fields = dataclasses.fields(cls)  # type: ignore[arg-type]
    if metadata.keys() != {_FORMAT, *(f.name for f in fields)}:
        raise _wrong("its header has other fields")
    values: dict[str, str | int] = {}
    for field in fields:
        text = metadata[field.name]
        if field.type == "int":
            if not (text.isascii() and text.isdigit() and len(text) <= 18):
                raise _wrong(f"{field.name} is {text[:40]!r}, not a number")
            values[field.name] = int(text)
        else:
            values[field.name] = text
    return cls(**values)


def require(header: Any, claims: object) -> None:
    """Compare a header with :data:`Claims`, or with a whole header dataclass.

    Raises:
        Integrity: ``tensor.manifest``: a field has another value.
    """
    wanted = claims if isinstance(claims, Mapping) else _fields(claims)
    for name, value in wanted.items():
        found = getattr(header, name)
        if found != value:
            raise Integrity(
                "tensor.manifest", f"The file was made for {name} {found!r}, not {value!r}."
            )


def _fields(header: Any) -> dict[str, Any]:
    return {f.name: getattr(header, f.name) for f in dataclasses.fields(header)}


def _wrong(why: str) -> Integrity:
    return Integrity("tensor.format", f"Not the kind of tensor file that was expected: {why}.")
