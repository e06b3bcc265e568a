"""``distribai config``: what the settings are and where they came from."""

from __future__ import annotations

from pathlib import Path

from cyclopts import App

from distribai.cli import output

app = App(name="config", help="Look at the settings.")


@app.command
def show(*, as_json: output.Json = False) -> None:
    """Show every setting with its value and its source.

    Sources, the first one that says something wins: a command's flag, a DISTRIBAI_* variable,
    ./distribai.toml, the user's file, what `orchestrator start` left, the default.
    """
    from distribai.cli.connection import resolve

    settings = resolve()
    rows = []
    for item in settings:
        shown = "" if _unset(item.value) else output.plain(item.value)
        if item.name.endswith("token") and shown:
            shown = "(hidden)"
        rows.append({"name": item.name, "value": shown, "source": item.source})
    if as_json:
        output.document(rows)
        return
    words = [(r["name"], _words(r["value"]), r["source"]) for r in rows]
    output.data(output.table(("SETTING", "VALUE", "SOURCE"), words))
    output.note(f"User file: {settings.home.config_file}")


def _words(value: object) -> str:
    return {True: "true", False: "false"}[value] if isinstance(value, bool) else str(value)


def _unset(value: object) -> bool:
    """Whether a path is the empty one: it would print as ``.``, and that is a place."""
    return isinstance(value, Path) and value == Path()
