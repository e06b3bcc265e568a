"""Words and figures for people, JSON for programs. Data goes to stdout, the rest to stderr."""

from __future__ import annotations

import json
import os
import re
import sys
from collections.abc import Mapping, Sequence
from typing import Annotated, Any

from cyclopts import Parameter

from distribai.errors import CODES, DistribAIError, InternalFault

Json = Annotated[
    bool,
    Parameter(name="--json", negative="", show_default=False, help="Print JSON instead of words."),
]
Watch = Annotated[
    bool,
    Parameter(
        name="--watch", negative="", show_default=False, help="Show it again on every change."
    ),
]


def data(text: str = "") -> None:
    """One line of what was asked for."""
    sys.stdout.write(text + "\n")


def note(text: str) -> None:
    """One line beside it, for a person."""
    sys.stdout.flush()
    sys.stderr.write(text + "\n")
    sys.stderr.flush()


def document(value: Any) -> None:
    """One JSON document. Pydantic models, dataclasses and plain values all go."""
    sys.stdout.write(json.dumps(plain(value), ensure_ascii=False, indent=2) + "\n")
    sys.stdout.flush()


def json_line(value: Any) -> None:
    """One JSON document on one line, for streams of them."""
    sys.stdout.write(json.dumps(plain(value), ensure_ascii=False) + "\n")
    sys.stdout.flush()


def plain(value: Any) -> Any:
    """A JSON value."""
    if hasattr(value, "model_dump"):
        return value.model_dump(mode="json")
    if isinstance(value, Mapping):
        return {k: plain(v) for k, v in value.items()}
    if isinstance(value, (list, tuple)):
        return [plain(v) for v in value]
    if hasattr(value, "__dataclass_fields__"):
        return {k: plain(getattr(value, k)) for k in value.__dataclass_fields__}
    if isinstance(value, os.PathLike):
        return os.fspath(value)
    return value


def table(columns: Sequence[str], rows: Sequence[Sequence[str]], empty: str = "") -> str:
    """Columns of text, as wide as they must be. ``empty`` is said on stderr when there are none.

    Control characters of names that others chose are shown, not obeyed.
    """
    if not rows and empty:
        note(empty)
        return ""
    shown = [tuple(visible(cell) for cell in row) for row in rows]
    widths = [max(len(c), *(len(r[i]) for r in shown)) for i, c in enumerate(columns)]
    lines = [columns, *shown]
    return "\n".join(
        "  ".join(cell.ljust(w) for cell, w in zip(line, widths, strict=True)).rstrip()
        for line in lines
    )


def facts(pairs: Sequence[tuple[str, str]]) -> str:
    """Names and values, one pair a line."""
    width = max((len(name) for name, _ in pairs), default=0)
    return "\n".join(f"{name.ljust(width)}  {visible(value)}".rstrip() for name, value in pairs)


def visible(text: str) -> str:
    """``text`` on one line without anything that a terminal would obey."""
    if text.isprintable():
        return text
    return "".join(c if c.isprintable() else f"\\x{ord(c):02x}" for c in text)


def problem(error: DistribAIError) -> None:
    """An error: what happened, what kind it is, what to try, and its code."""
    lines = [f"error: {error.message}"]
    if adds_something(CODES[error.code], error.message):
        lines.append(f"why: {CODES[error.code]}")
    if error.field:
        lines.append(f"field: {error.field}")
    if error.hint:
        lines.append(f"try: {error.hint}")
    lines.append(f"code: {error.code}")
    note("\n".join(lines))


_SMALL_WORDS = frozenset(
    re.findall(
        r"\w+",
        "a an the is are was has be can could cannot no not or and that this of it its in on to "
        "with does there",
    )
)


def adds_something(meaning: str, message: str) -> bool:
    """Whether a code's sentence says more than the message beside it does.

    Words count as the same when their first five letters are: *reached* and *reach*.
    """

    def stems(text: str) -> set[str]:
        found = re.findall(r"\w+", text.lower())
        return {word[:5] for word in found if word not in _SMALL_WORDS}

    return not stems(meaning) <= stems(message)


def traceback(error: BaseException) -> None:
    """The traceback, on stderr."""
    import traceback as tb

    note("".join(tb.format_exception(error)).rstrip())


def defect(error: BaseException, debug: bool) -> InternalFault:
    """An error that nobody foresaw, with its traceback where it can be found."""
    import time
    import traceback as tb
    from pathlib import Path

    text = "".join(tb.format_exception(error))
    name = f"{type(error).__name__}: {error}".splitlines()[0]
    if debug:
        note(text.rstrip())
        return InternalFault("internal.fault", name, "Please report it with the traceback above.")
    from distribai.config import Home

    directory = Home.find(os.environ).state / "crashes"
    path: Path | None = directory / f"{time.strftime('%Y%m%d-%H%M%S')}-{os.getpid()}.txt"
    try:
        directory.mkdir(parents=True, exist_ok=True)
        assert path is not None
        path.write_text(f"{' '.join(sys.argv)}\n\n{text}", encoding="utf-8")
    except OSError:
        note(text.rstrip())
        path = None
    where = f"with {path}" if path else "with the traceback above"
    return InternalFault("internal.fault", name, f"Please report it {where}.")


def size(count: float) -> str:
    """Bytes for people, in powers of 1000."""
    for unit in ("B", "kB", "MB", "GB"):
        if abs(count) < 999.5:
            return f"{count:.0f} {unit}" if unit == "B" or count >= 99.95 else f"{count:.1f} {unit}"
        count /= 1000
    return f"{count:.1f} TB"


def count(number: float) -> str:
    """A large number for people: 1.2M."""
    for unit in ("", "k", "M"):
        if abs(number) < 999.5:
            return f"{number:.0f}{unit}" if not unit or number >= 99.95 else f"{number:.1f}{unit}"
        number /= 1000
    return f"{number:.1f}G"


def plural(number: int, thing: str) -> str:
    """A count of things: ``1 node``, ``2 nodes``."""
    return f"{number} {thing}" if number == 1 else f"{number} {thing}s"


def duration(seconds: float | None) -> str:
    """Seconds for people: ``41s``, ``3m20s``, ``2h05m``, ``3d04h``."""
    if seconds is None:
        return "-"
    whole = max(0, round(seconds))
    if whole < 60:
        return f"{whole}s"
    if whole < 3600:
        return f"{whole // 60}m{whole % 60:02d}s"
    if whole < 86400:
        return f"{whole // 3600}h{whole % 3600 // 60:02d}m"
    return f"{whole // 86400}d{whole % 86400 // 3600:02d}h"


def loss(value: float | None) -> str:
    """A loss, or a dash."""
    return "-" if value is None else f"{value:.4f}"
