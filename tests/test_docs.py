"""What the pages tell people to type is understood by the program."""

from __future__ import annotations

import re
import shlex
from pathlib import Path

import pytest

from distribai.api.recipe import parse_recipe
from distribai.cli.main import app

ROOT = Path(__file__).resolve().parents[1]
PAGES = sorted([ROOT / "README.md", *(ROOT / "docs").rglob("*.md")])


def command_lines() -> list[tuple[str, str]]:
    """(page, command line) of every indented or fenced line that calls ``distribai``."""
    found = []
    for page in PAGES:
        if "reference" in page.relative_to(ROOT).parts:
            continue  # generated, and tested on its own
        for line in page.read_text(encoding="utf-8").splitlines():
            match = re.match(r"^(?:    |\$ )(distribai .*)$", line)
            if match:
                found.append((page.name, match.group(1)))
    return found


@pytest.mark.parametrize(("page", "line"), command_lines())
def test_a_documented_command_line_is_understood(page: str, line: str) -> None:
    for words in re.split(r" \| (?=distribai|decline)", line):
        tokens = [t for t in shlex.split(words, comments=True) if t != "distribai"]
        command, bound, _ = app.parse_args(
            tokens, exit_on_error=False, print_error=False, verbose=False
        )
        assert callable(command)
        assert bound is not None


def test_there_are_documented_command_lines() -> None:
    assert len(command_lines()) > 8


@pytest.mark.parametrize("page", PAGES, ids=lambda p: p.name)
def test_every_recipe_on_a_page_is_a_recipe(page: Path) -> None:
    for block in re.findall(r"```yaml\n(.*?)```", page.read_text(encoding="utf-8"), re.DOTALL):
        recipe = parse_recipe(block, page.name)
        assert recipe.steps > 0


@pytest.mark.parametrize("page", PAGES, ids=lambda p: p.name)
def test_links_between_pages_lead_somewhere(page: Path) -> None:
    for target in re.findall(r"\]\(([^)#]+?)(?:#[^)]*)?\)", page.read_text(encoding="utf-8")):
        if not re.match(r"^[a-z]+:", target):
            assert (page.parent / target).exists(), target
