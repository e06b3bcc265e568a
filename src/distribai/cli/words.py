"""Words that stand for figures: how long something lasts."""

from __future__ import annotations

import re

from distribai.errors import UsageError

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
