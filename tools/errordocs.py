"""The pages about error codes: one list, and one page per family with what the program says there.

What it says and what it advises is read from the source: every place that raises an error names its
code, its message and its hint in one call. Values that are filled in stand as ``…``. Codes that are
not raised so (a record's field, a message of the wire) have their sentence alone.
"""

from __future__ import annotations

import ast
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

SOURCE = Path(__file__).resolve().parents[1] / "src" / "distribai"

FAMILIES = {
    "account": "Accounts: who somebody is on the grid.",
    "auth": "Who asks, and whether they may. Nothing was done.",
    "blob": "Bytes by their hash, on their way up or down, or where they are kept.",
    "codec": "How weights are written on the wire.",
    "config": "Settings, wherever they come from. The command ended before it did anything.",
    "data": "What is trained on.",
    "events": "Streams of events.",
    "grid": "The grid as a whole: its address, database, keys, stores, backups.",
    "http": "The HTTP interface itself.",
    "internal": "Defects of the program.",
    "invite": "Invites by which machines join.",
    "io": "Files on the disk of whoever gave the command.",
    "job": "Jobs, by name and by state.",
    "key": "API keys.",
    "limit": "How often one may ask.",
    "merge": "Making the next version of the weights.",
    "node": "Contributor machines: how they join, what they can do, how they stand.",
    "organization": "Organizations, which submit jobs.",
    "people": "Roles, names, policies and quotas.",
    "protocol": "What node and orchestrator say to each other.",
    "quota": "What an organization may use. The job was not made.",
    "spec": "What a recipe or spec asks for. Nothing was made.",
    "state": "State machines.",
    "task": "Micro-tasks, and why a result of one counts or does not.",
    "tensor": "Weights in files.",
    "usage": "The words of a command or request.",
    "webhook": "Webhooks and their deliveries.",
}
"""Every family of codes: what stands before the dot, in one sentence."""


@dataclass
class Said:
    """What is said under one code: the kinds of error, and (message, hint) pairs."""

    kinds: set[str] = field(default_factory=set)
    texts: dict[tuple[str, str], None] = field(default_factory=dict)


def family(code: str) -> str:
    """What stands before the dot."""
    return code.partition(".")[0]


def said_in_source() -> dict[str, Said]:
    """What the program says, by code."""
    from distribai import errors

    kinds = {k.__name__ for k in _kinds(errors.DistribAIError)}
    found: dict[str, Said] = defaultdict(Said)
    for path in sorted(SOURCE.rglob("*.py")):
        for call in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if not isinstance(call, ast.Call) or not call.args:
                continue
            name = getattr(call.func, "id", getattr(call.func, "attr", ""))
            code = _text(call.args[0])
            if name in kinds and code in errors.CODES:
                said = found[code]
                said.kinds.add(name)
                message = _text(call.args[1]) if len(call.args) > 1 else ""
                hint = _text(call.args[2]) if len(call.args) > 2 else ""
                if message.strip("… ."):
                    said.texts[message, hint] = None
    return found


def _text(node: ast.expr) -> str:
    """A text as the source has it, with … for what is filled in; empty when it has none."""
    if isinstance(node, ast.Constant) and isinstance(node.value, str):
        return node.value
    if isinstance(node, ast.JoinedStr):
        return "".join(
            part.value if isinstance(part, ast.Constant) and isinstance(part.value, str) else "…"
            for part in node.values
        )
    if isinstance(node, ast.BinOp) and isinstance(node.op, ast.Add):
        return (_text(node.left) or "…") + (_text(node.right) or "…")
    return ""


def _kinds(root: type[Any]) -> Iterator[type[Any]]:
    for kind in root.__subclasses__():
        if kind.__module__ == root.__module__:
            yield kind
            yield from _kinds(kind)


def index_page(note: str) -> str:
    """Every stable code, and what each kind of error means for HTTP and for scripts."""
    from distribai import errors

    text = f"""{note}# Errors

Every error has a stable code, a message, and where there is something to try, a hint. A code never
changes its meaning. On the command line `distribai errors CODE` explains one; over HTTP it is the
`code` of an `application/problem+json` answer. What stands before the dot is its family, which has
a page with what the program says under each code, and what it advises.

## Kinds

| kind | HTTP status | exit status | what it is |
|---|---|---|---|
"""
    for kind in _kinds(errors.DistribAIError):
        about = (kind.__doc__ or "").splitlines()[0]
        text += f"| `{kind.__name__}` | {kind.http_status} | {kind.exit_status} | {about} |\n"
    text += "\n## Families\n\n| family | what it is about |\n|---|---|\n"
    text += "".join(f"| [{f}](errors/{f}.md) | {FAMILIES[f]} |\n" for f in families())
    text += "\n## Codes\n\n| code | what it means |\n|---|---|\n"
    for code, sentence in sorted(errors.CODES.items()):
        where = f"errors/{family(code)}.md#{code.replace('.', '')}"
        text += f"| [`{code}`]({where}) | {sentence} |\n"
    return text


def families() -> list[str]:
    """The families that there are codes of."""
    from distribai import errors

    return sorted({family(code) for code in errors.CODES})


def family_page(name: str, note: str) -> str:
    """One family: its codes, and what is said under them."""
    from distribai import errors

    by_kind = {k.__name__: k for k in _kinds(errors.DistribAIError)}
    said = said_in_source()
    text = f"{note}# Errors: {name}\n\n{FAMILIES[name]} [All families](../errors.md#families).\n"
    for code, sentence in sorted(errors.CODES.items()):
        if family(code) != name:
            continue
        text += f"\n## {code}\n\n{sentence}\n"
        there = said.get(code, Said())
        if there.kinds:
            kinds = sorted(there.kinds)
            statuses = [
                f"`{k}` (HTTP {by_kind[k].http_status}, exit {by_kind[k].exit_status})"
                for k in kinds
            ]
            text += f"\nRaised as {', '.join(statuses)}.\n"
        if there.texts:
            text += "\n| the program says | try |\n|---|---|\n"
            rows = sorted(there.texts)
            text += "".join(f"| {_cell(message)} | {_cell(hint)} |\n" for message, hint in rows)
    return text


def _cell(text: str) -> str:
    """A text that stays one cell of a table."""
    return " ".join(text.split()).replace("|", "\\|").replace("<", "&lt;")
