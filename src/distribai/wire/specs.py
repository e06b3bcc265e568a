"""A job's spec as nodes read it, older ones too."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import fields
from typing import Any

from distribai.core.plain import canonical_json, to_plain
from distribai.core.spec import JobSpec, ResourceSpec

_LATER: Mapping[str, Any] = {
    f"resources.{f.name}": f.default
    for f in fields(ResourceSpec)
    if f.name not in ("memory_mb", "device", "precision", "compile")
}
"""Fields of the spec that the first nodes did not know, with their defaults, which say nothing."""


def spec_json(spec: JobSpec) -> str:
    """The spec as a node of any version reads it: what is as by default in a later version's fields
    is left out, because an older node refuses what it does not know."""
    plain = to_plain(spec)
    del plain["snapshots"]  # what the orchestrator keeps is none of a node's business
    for path, default in _LATER.items():
        section, _, name = path.partition(".")
        if plain[section][name] == default:
            del plain[section][name]
    return canonical_json(plain)
