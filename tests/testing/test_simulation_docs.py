"""The page on simulations shows programs that run."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

PAGE = Path(__file__).resolve().parents[2] / "docs" / "how-to" / "simulate.md"


def test_the_examples_on_the_page_run(capsys: pytest.CaptureFixture[str]) -> None:
    blocks = re.findall(r"```python\n(.*?)```", PAGE.read_text(encoding="utf-8"), re.DOTALL)
    assert len(blocks) == 2
    names: dict[str, object] = {}
    for block in blocks:
        exec(compile(block, str(PAGE), "exec"), names)
    told = capsys.readouterr().out.splitlines()
    assert re.fullmatch(r"goodput 0\.\d+, at most [01]\.\d+ was possible", told[0])
    assert re.fullmatch(r"2 rounds in \d+ virtual seconds", told[1])
    assert told[2].startswith("waiting for all: 0.")
