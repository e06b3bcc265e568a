"""The generated pages say what the program does."""

from __future__ import annotations

import importlib.util
from pathlib import Path


def test_the_generated_pages_are_up_to_date() -> None:
    path = Path(__file__).parents[1] / "tools" / "gendocs.py"
    spec = importlib.util.spec_from_file_location("gendocs", path)
    assert spec is not None
    assert spec.loader is not None
    gendocs = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(gendocs)
    assert list(gendocs.differences()) == [], "run `make docs`"
