"""Packages found by looking: one file more is one family, codec, paradigm or executor more."""

from __future__ import annotations

import importlib
import pkgutil
from types import ModuleType


def modules(package: str) -> list[ModuleType]:
    """The modules of ``package`` (its dotted name), imported, in the order of their names."""
    path = importlib.import_module(package).__path__
    names = sorted(info.name for info in pkgutil.iter_modules(path))
    return [importlib.import_module(f"{package}.{name}") for name in names]
