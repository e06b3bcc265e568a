"""From flags or a recipe file to a spec whose files have hashes, and those files to the grid."""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from distribai.api.recipe import Recipe, parse_recipe, recipe_of
from distribai.cli import output
from distribai.client import Client
from distribai.client.transfer import hash_of
from distribai.core.spec import BlobRef, JobSpec
from distribai.errors import Ambiguous, InvalidData, NotFound, UsageError


@dataclass(frozen=True)
class Prepared:
    """A job ready to be sent: its spec, and its files by path."""

    spec: JobSpec
    files: Mapping[Path, BlobRef]

    def upload(self, client: Client) -> None:
        """Bring the files to the grid; at once for those that it has."""
        for path, ref in self.files.items():
            progress = _UploadLine(path, ref.size)
            client.upload(path, progress.told)
            progress.done()


def recipe_values(
    *,
    name: str,
    steps: int,
    profile: str,
    data: Sequence[str],
    optional: Mapping[str, Any],
    inner_steps: int | None,
    lr: float | None,
) -> dict[str, Any]:
    """The recipe that the flags of ``job create`` stand for; flags not given stay defaults."""
    values: dict[str, Any] = {"name": name, "steps": steps, "model": {"profile": profile}}
    values |= {key: value for key, value in optional.items() if value is not None}
    if len(data) == 1 and not Path(data[0]).exists() and "/" not in data[0] and "." not in data[0]:
        values["data"] = {"source": data[0]}
    elif data:
        values["data"] = {"files": list(data)}
        if all(path.endswith(".jsonl") for path in data):
            values["data"]["format"] = "jsonl"
    if inner_steps is not None:
        values["inner_steps"] = inner_steps
    if lr is not None:
        values["optimizer"] = {"lr": lr}
    return values


def from_values(values: Mapping[str, Any], where: str) -> Prepared:
    """A job from flags; paths are relative to the working directory.

    Raises:
        InvalidSpec: the figures are not possible.
        InvalidData: a file is missing or empty.
    """
    return _prepare(recipe_of(values, where), Path())


def from_file(path: str) -> Prepared:
    """A job from a recipe; ``-`` is stdin. Paths in it are relative to the recipe's directory.

    Raises:
        UsageError: the file cannot be read.
        InvalidSpec: the recipe is not well formed or not possible.
        InvalidData: a file of the recipe is missing or empty.
    """
    if path == "-":
        return _prepare(parse_recipe(sys.stdin.read(), "stdin"), Path())
    file = Path(path)
    try:
        text = file.read_text(encoding="utf-8")
    except OSError as problem:
        raise UsageError(
            "io.file",
            f"The recipe {path} cannot be read: {problem.strerror or problem}.",
            "Give the path of a recipe; `distribai submit --help` shows a short one.",
        ) from problem
    except UnicodeDecodeError as problem:
        raise UsageError(
            "io.file", f"The recipe {path} is not UTF-8 text.", "Recipes are YAML or JSON."
        ) from problem
    return _prepare(parse_recipe(text, path), file.parent)


def _prepare(recipe: Recipe, base: Path) -> Prepared:
    refs: dict[str, BlobRef] = {}
    files: dict[Path, BlobRef] = {}
    for named in recipe.paths:
        path = base / Path(named).expanduser()
        if not path.is_file():
            raise InvalidData(
                "data.missing",
                f"There is no file {path}.",
                "Built-in data sets go by their name, like `stdlib`; paths in a recipe are "
                "relative to the recipe.",
            )
        refs[named] = hash_of(path)
        if refs[named].size == 0:
            raise InvalidData("data.empty", f"{path} is empty.", "Give a file with text in it.")
        files[path] = refs[named]
    _check_length(recipe, refs)
    return Prepared(recipe.to_spec(refs), files)


def _check_length(recipe: Recipe, refs: Mapping[str, BlobRef]) -> None:
    """Refuse files that are too short whatever stands in them, before anything is sent.

    Without a tokenizer a byte is a token and each document has one more at its end; JSON Lines hold
    fewer tokens than bytes. The orchestrator counts exactly (``data.shards``).

    Raises:
        InvalidData: ``data.too_short``.
    """
    data = recipe.data
    if data.tokenizer is not None or not data.files:
        return
    size = sum(refs[named].size for named in data.files)
    least = 2 * recipe.seq_len + 1
    if size + len(data.files) < least:
        raise InvalidData(
            "data.too_short",
            f"The files hold {output.plural(size, 'byte')}: one training sequence and one held-out "
            f"sequence of {recipe.seq_len} take {least}.",
            "Give more data, or a smaller `seq_len`.",
            field="seq_len",
        )


def namesake(client: Client, name: str) -> str:
    """What to tell of earlier jobs of the same name before another is made; empty if none is."""
    try:
        other = client.job(name)
    except NotFound:
        return ""
    except Ambiguous:
        return f"Other jobs are called {output.visible(name)} too: use this one's id."
    if other.name != name:  # a beginning of an id
        return ""
    return (
        f"Job {other.id} is called {output.visible(name)} too and is {other.state}: use the id of "
        "the one that you mean."
    )


class _UploadLine:
    """One line about an upload that takes a while; on a terminal it counts."""

    def __init__(self, path: Path, size: int) -> None:
        self._path = path
        self._live = sys.stderr.isatty() and size > 4 << 20
        self._size = size

    def told(self, done: int, total: int) -> None:
        if self._live:
            share = 100 * done // max(total, 1)
            sys.stderr.write(f"\rUploading {self._path.name}: {share}% of {output.size(total)} ")
            sys.stderr.flush()

    def done(self) -> None:
        if self._live:
            sys.stderr.write("\n")
        else:
            output.note(f"Uploaded {self._path.name} ({output.size(self._size)}).")
