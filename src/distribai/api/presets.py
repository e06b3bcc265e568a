"""Settings of rounds by name, and what follows from a choice: all written out at the door.

``preset: silent`` in a recipe stands for figures. They are put where the person gave none, so that
what is stored, and what every node gets, holds figures only. How the presets were chosen is in
``docs/explanation/silence.md``.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final, Literal

from distribai.core.codecs import SPARSE_K

Preset = Literal["default", "fast", "silent"]

PRESETS: Final[Mapping[str, Mapping[str, Mapping[str, Any]]]] = {
    "default": {},
    "fast": {"rounds": {"codec_up": "int3", "codec_down": "int3"}},
    "silent": {"rounds": {"inner_steps": 150, "codec_up": "int2", "codec_down": "int3"}},
}
"""Fields by section that a preset stands for; everything else is as by default."""

_LEGS = ("codec_up", "codec_down")


def expand(values: Mapping[str, Any]) -> dict[str, Any]:
    """Plain values of a recipe with its preset's figures written out, and plain averaging where
    anything is sparse: momentum on top of it was measured worse (A3). What was given stays."""
    named = PRESETS.get(str(values.get("preset")), {})
    values = {**values, **{section: _filled(values, section, named[section]) for section in named}}
    rounds = values.get("rounds")
    if isinstance(rounds, dict) and any(_sparse(rounds.get(leg)) for leg in _LEGS):
        values["outer"] = _filled(values, "outer", {"eta": 1.0, "mu": 0.0})
    return values


def _filled(values: Mapping[str, Any], section: str, usual: Mapping[str, Any]) -> Any:
    """A section with ``usual`` where nothing was given; as it is where it is no section."""
    given = values.get(section, {})
    return {**usual, **given} if isinstance(given, dict) else given


def _sparse(schedule: Any) -> bool:
    """Whether unchecked values name a sparse codec."""
    if isinstance(schedule, str):
        return schedule in SPARSE_K
    stages = schedule if isinstance(schedule, list) else []
    return any(isinstance(s, dict) and str(s.get("codec")) in SPARSE_K for s in stages)
