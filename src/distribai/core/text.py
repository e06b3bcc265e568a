"""Words that came from outside, made fit to be stored and shown."""

from __future__ import annotations

MAX_REASON = 2000
"""Characters of a reason that are kept: a sentence, and the last words of a process."""

_KEPT = frozenset("\n\t")


def clean(text: str, limit: int, *, lines: bool = True) -> str:
    """At most ``limit`` characters of ``text``, with none that could steer a terminal.

    Whatever is not printable becomes U+FFFD: PostgreSQL stores no zero character, and an escape
    sequence in a node's name would write over an operator's screen. Line feeds and tabs stay if
    ``lines`` may be several.
    """
    kept = _KEPT if lines else frozenset[str]()
    return "".join(c if c.isprintable() or c in kept else "\ufffd" for c in text[:limit])
