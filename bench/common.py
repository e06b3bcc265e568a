"""What all benchmarks share: facts, alternating samples, tables, the final JSON line."""

from __future__ import annotations

import importlib.metadata
import json
import os
import platform
import statistics
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TextIO

ROOT = Path(__file__).resolve().parent.parent
NOISY = 0.05
"""Spread of repeated A against A above which a result is marked noisy."""

_stream: TextIO = sys.stdout


def use_stdout(yes: bool) -> None:
    """Where tables and remarks go: stdout, or stderr when stdout is for the JSON line alone."""
    global _stream
    _stream = sys.stdout if yes else sys.stderr


def say(text: str = "") -> None:
    """A line for people."""
    print(text, file=_stream, flush=True)


def table(headers: Sequence[str], rows: Sequence[Sequence[object]]) -> None:
    """Print a table; floats with four significant digits, numbers to the right."""
    texts = [[_cell(v) for v in row] for row in rows]
    widths = [max(map(len, column)) for column in zip(headers, *texts, strict=True)]
    right = [all(isinstance(r[i], (int, float)) for r in rows) for i in range(len(headers))]

    def line(cells: Sequence[str]) -> str:
        padded = (
            c.rjust(w) if r else c.ljust(w) for c, w, r in zip(cells, widths, right, strict=True)
        )
        return "  ".join(padded).rstrip()

    say(line(headers))
    say("  ".join("-" * w for w in widths))
    for cells in texts:
        say(line(cells))


def _cell(value: object) -> str:
    return f"{value:.4g}" if isinstance(value, float) else str(value)


def commit() -> str:
    """The checkout's commit, with ``+`` when tracked files differ; ``unknown`` outside git."""

    def git(*words: str) -> str:
        command = ["git", "-C", str(ROOT), *words]
        return subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()

    try:
        changed = git("status", "--porcelain", "--untracked-files=no")
        return git("rev-parse", "HEAD") + ("+" if changed else "")
    except (OSError, subprocess.CalledProcessError):
        return "unknown"


def machine_facts() -> dict[str, Any]:
    """CPU, cores, versions, load average at the time of the call."""
    return {
        "cpu": _cpu_name(),
        "cores": os.cpu_count(),
        "system": platform.platform(),
        "python": platform.python_version(),
        "numpy": _version("numpy"),
        "torch": _version("torch"),
        "load_average": [round(v, 2) for v in os.getloadavg()] if hasattr(os, "getloadavg") else [],
    }


def _cpu_name() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.processor()
    names = [line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.processor()


def _version(package: str) -> str:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return ""


@dataclass(frozen=True)
class Samples:
    """Figures by name, one a repetition; ``reference`` was measured twice in each.

    ``spread`` is the median over repetitions of how much the reference's two figures differ,
    relative: repeated A against A.
    """

    figures: Mapping[str, list[float]]
    again: list[float]
    reference: str

    @property
    def spread(self) -> float:
        """Relative spread of A against A."""
        pairs = zip(self.figures[self.reference], self.again, strict=True)
        return statistics.median(abs(a / b - 1) for a, b in pairs)

    @property
    def noisy(self) -> bool:
        """Whether the spread is above what a ratio can be trusted with."""
        return self.spread > NOISY

    def ratio(self, name: str) -> float:
        """Median over repetitions of ``name`` over the mean of the reference around it."""
        rows = zip(self.figures[name], self.figures[self.reference], self.again, strict=True)
        return statistics.median(2 * b / (a + c) for b, a, c in rows)

    def rounded(self) -> dict[str, list[float]]:
        """All figures for the JSON line, six significant digits."""
        named = {**self.figures, f"{self.reference} again": self.again}
        return {name: [float(f"{v:.6g}") for v in values] for name, values in named.items()}


def alternate(
    measures: Mapping[str, Callable[[], float]], reference: str, repetitions: int, warm_up: int = 1
) -> Samples:
    """Measure things alternately: reference, the others, reference again; and so on.

    Args:
        measures: by name, what runs once and returns its figure (seconds, or a rate).
        reference: the name of A.
        repetitions: how often.
        warm_up: repetitions before, thrown away.
    """
    others = [name for name in measures if name != reference]
    figures: dict[str, list[float]] = {name: [] for name in measures}
    again: list[float] = []
    for i in range(warm_up + repetitions):
        # The others take turns in going first, so that none always runs in another's wake.
        shift = i % max(1, len(others))
        row = {reference: measures[reference]()}
        row |= {name: measures[name]() for name in others[shift:] + others[:shift]}
        last = measures[reference]()
        if i >= warm_up:
            again.append(last)
            for name, value in row.items():
                figures[name].append(value)
    return Samples(figures, again, reference)


def json_line(result: Mapping[str, Any]) -> str:
    """The final line: one JSON object, no NaN."""
    return json.dumps(result, allow_nan=False)
