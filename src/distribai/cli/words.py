"""Words that several commands share: lengths of time as they are written, whose word a job waits
for."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

from distribai.errors import UsageError

if TYPE_CHECKING:
    from distribai.client import Client

SECONDS = {"s": 1, "m": 60, "h": 3600, "d": 86400, "w": 604800}


def seconds(text: str) -> float | None:
    """Seconds of ``30d``, ``12h``, ``90m``, ``45s``, ``2w``; empty text is None.

    Raises:
        UsageError: ``usage.invalid``.
    """
    if not text:
        return None
    match = re.fullmatch(r"([0-9]{1,9})([smhdw])", text)
    if match is None or int(match.group(1)) == 0:
        raise UsageError(
            "usage.invalid", f"{text[:40]!r} is no length of time.", "Write 30d, 12h or 90m."
        )
    return float(int(match.group(1)) * SECONDS[match.group(2)])


def waits_words(client: Client, job_id: str, at_once: str = "") -> str:
    """Whose word a submitted job waits for, and how it is given, to whoever asks; ``at_once`` is a
    command that would have given it."""
    if client.people.me().operator:
        sooner = f" (`{at_once}` gives it at once)" if at_once else ""
        return f"It waits for the operator's word: distribai job accept {job_id}{sooner}"
    return "It waits for an operator of the grid to accept it: ask one."
