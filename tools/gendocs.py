"""Make the generated pages of ``docs/reference`` again; ``--check`` only says whether they differ.

The pages come from what the program itself uses: the command tree, the settings' dataclasses, the
recipe's models, the tables of error codes and of states, the application's OpenAPI description.
"""

from __future__ import annotations

import difflib
import json
import sys
import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

sys.path.insert(0, str(Path(__file__).resolve().parent))  # for who imports this by its path
import errordocs

REFERENCE = Path(__file__).resolve().parents[1] / "docs" / "reference"
NOTE = "<!-- Made by tools/gendocs.py: change the program, then `make docs`. -->\n\n"


def cli_page() -> str:
    """Every command with its arguments, and the exit statuses."""
    from distribai.cli import main

    told = (main.__doc__ or "").split("\n\n", 1)[1].strip()
    tree = main.app.generate_docs(output_format="markdown")
    title, _, rest = tree.partition("\n")
    lines = "\n".join(line.rstrip() for line in rest.strip().splitlines())
    return f"{NOTE}{title}\n\n{told}\n\n{lines}\n"


def config_page() -> str:
    """Every setting with its variable, default, bounds and help."""
    from distribai import config

    home = config.Home(Path("STATE"), Path("CONFIG"), Path("CACHE"))
    spots = config.known(home)
    text = f"""{NOTE}# Settings

The first source that says something wins: a command's flag, a `DISTRIBAI_*` variable, the section
of `./distribai.toml`, the section of the user's file, for the client's three what `orchestrator
start` left, the default. `distribai config show` tells each value and its source, and where the
user's file lies. Unknown names are refused everywhere. `STATE` is `$DISTRIBAI_HOME/state`, or the
system's place for a user's state (`~/.local/state/distribai` on Linux).

| variable | what it is |
|---|---|
"""
    text += "".join(f"| `{name}` | {what} |\n" for name, what in config.ENV_ONLY.items())
    for section, cls in config.SECTIONS.items():
        about = " ".join((cls.__doc__ or "").split()).replace("``", "`")
        text += f"\n## [{section}]\n\n{about}\n\n"
        text += "| name | variable | default | from ... to | what it is |\n|---|---|---|---|---|\n"
        for spot in spots.values():
            if spot.name.startswith(f"{section}."):
                text += _setting_row(spot, config.BOUNDS.get(spot.name))
    return text


def _setting_row(spot: Any, bounds: tuple[float, float] | None) -> str:
    key = spot.name.partition(".")[2]
    default = json.dumps(spot.default) if not isinstance(spot.default, Path) else str(spot.default)
    shown = "empty" if default in ('""', ".") else f"`{default}`"
    between = "" if bounds is None else f"{bounds[0]:g} ... {bounds[1]:g}"
    return f"| `{key}` | `{spot.variable}` | {shown} | {between} | {spot.help} |\n"


def recipe_page() -> str:
    """Every field of a recipe with its type, default and meaning."""
    from distribai.api import recipe, recipe_fields

    sizes = ", ".join(f"`{p}`" for p in recipe_fields.profiles(recipe.DEFAULT_FAMILY))
    text = f"""{NOTE}# Recipe

A recipe is YAML or JSON; [how to write one](../how-to/recipes.md). `optimizer.lr` is the field `lr`
in the section `optimizer`. `H` or `inner_steps` at the top are short for `rounds.inner_steps`.
Unknown fields are refused, and so are fields that nothing would read. With `model.init`,
`outer.ramp` is 0 unless it is given. The profiles of `{recipe.DEFAULT_FAMILY}` are
{sizes}.

| field | type | default | what it is |
|---|---|---|---|
"""
    for field in recipe_fields.fields():
        shown = f"`{field.default}`" if field.default else "required" if field.required else "none"
        text += f"| `{field.name}` | {field.kind} | {shown} | {field.meaning} |\n"
    return text


def states_page() -> str:
    """The state machines as pictures, from the tables that decide every change."""
    from distribai.core import states
    from distribai.sections import LivenessSettings

    text = f"""{NOTE}# States

The tables behind these pictures (`core/states.py`) decide every change; nothing else does. A change
and the event that tells of it are one transaction, so that what `distribai job watch` and the HTTP
interface's events show is what happened. [What survives what](../how-to/operate.md).
"""
    machines: list[tuple[str, Any, Any]] = [
        ("Jobs", states.JobState, states.JOB),
        ("Tasks", states.TaskState, states.TASK),
        ("Rounds", states.RoundState, states.ROUND),
        ("Webhooks", states.WebhookState, states.WEBHOOK),
        ("Deliveries", states.DeliveryState, states.DELIVERY),
    ]
    for title, kind, table in machines:
        text += f"\n## {title}\n\n```mermaid\nstateDiagram-v2\n    [*] --> {next(iter(kind))}\n"
        for state in kind:
            text += "".join(f"    {state} --> {nxt}\n" for nxt in kind if nxt in table[state])
            if states.is_terminal(table, state):
                text += f"    {state} --> [*]\n"
        text += "```\n\n" + _meanings(kind)
    seconds = LivenessSettings()
    axes: list[tuple[str, Any, str]] = [
        (
            "Liveness",
            states.Liveness,
            f"Silence alone moves it: degraded after {seconds.degraded_s:g} s, offline after "
            f"{seconds.offline_s:g} s (`[liveness]` in the settings), online whenever the node is "
            "heard. A node that says goodbye is offline at once. When the orchestrator starts, or "
            "a replica takes over the lead that nobody had for a while, every node that was not "
            "offline counts as heard at that moment.",
        ),
        (
            "Standing",
            states.Standing,
            "A new node is as its invite says, or else as the grid's mode does: trusted, or on "
            "probation (`distribai grid invite`). A node that fails what others can is "
            "quarantined by itself; all else is the operator's word: `distribai nodes quarantine`, "
            "`trust`, `ban`, `pardon`. " + _changes(states.STANDING),
        ),
        (
            "Intent",
            states.Intent,
            "The node says it with every heartbeat; the operator's own wish (`distribai nodes "
            "pause`, `resume`, `drain`) is kept beside it.",
        ),
    ]
    text += (
        "\n## Nodes\n\nA node has three states at once, each on an axis of its own; whether it is "
    )
    text += "idle or at work\nfollows from its leases.\n"
    for title, kind, about in axes:
        text += f"\n### {title}\n\n{about}\n\n" + _meanings(kind)
    return text


def _changes(table: Any) -> str:
    """A transition table in one line."""
    lines = [
        f"{old} to {', '.join(n for n in type(old) if n in new)}" for old, new in table.items()
    ]
    return f"From {'; from '.join(lines)}."


def _meanings(kind: Any) -> str:
    from distribai.core import states

    rows = "".join(f"| `{state}` | {states.MEANINGS[kind][state]} |\n" for state in kind)
    return "| state | what it means |\n|---|---|\n" + rows


def reasons_page() -> str:
    """What "why does nothing start?" can be answered with."""
    from distribai.core import why

    text = f"""{NOTE}# Reasons

`distribai job why ID`, `distribai nodes why NODE` and the HTTP interface's `/why` answer with
reasons: a `code`, a sentence, what to try, and until when it lasts if that is known. A code never
changes its meaning. [How to look at a grid](../how-to/operate.md#look-at-it).

| code | what it means |
|---|---|
"""
    return text + "".join(f"| `{code}` | {what} |\n" for code, what in why.CODES.items())


def openapi_page() -> str:
    """The application's own description."""
    from distribai.orchestrator.context import Grid
    from distribai.orchestrator.http.app import create_app

    nobody = SimpleNamespace(clock=time.monotonic, entropy=bytes)
    return json.dumps(create_app(cast(Grid, nobody)).openapi(), indent=2, sort_keys=True) + "\n"


PAGES: dict[str, Callable[[], str]] = {
    "cli.md": cli_page,
    "config.md": config_page,
    "recipe.md": recipe_page,
    "errors.md": partial(errordocs.index_page, NOTE),
    **{f"errors/{f}.md": partial(errordocs.family_page, f, NOTE) for f in errordocs.families()},
    "states.md": states_page,
    "reasons.md": reasons_page,
    "openapi.json": openapi_page,
}


def differences() -> Iterator[str]:
    """A unified diff for each page that is not as the program says, and what belongs to none."""
    for path in sorted((REFERENCE / "errors").glob("*")):
        if f"errors/{path.name}" not in PAGES:
            yield f"docs/reference/errors/{path.name} is about codes that are gone: delete it\n"
    for name, make in PAGES.items():
        path = REFERENCE / name
        before = path.read_text(encoding="utf-8") if path.exists() else ""
        after = make()
        if before != after:
            yield "".join(
                difflib.unified_diff(
                    before.splitlines(keepends=True),
                    after.splitlines(keepends=True),
                    f"docs/reference/{name}",
                    "as the program says",
                    n=1,
                )
            )


def main() -> int:
    """Write the pages, or with ``--check`` compare them."""
    if sys.argv[1:] == ["--check"]:
        found = list(differences())
        for diff in found:
            sys.stderr.write(diff[:4000])
        if found:
            sys.stderr.write("\ndocs/reference is not up to date: run `make docs`.\n")
        return 1 if found else 0
    (REFERENCE / "errors").mkdir(parents=True, exist_ok=True)
    for name, make in PAGES.items():
        (REFERENCE / name).write_text(make(), encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
