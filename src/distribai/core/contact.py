"""What stands between a node and its grid, kept on the node's disk for its owner to read."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

FILE: Final = "contact"
"""In the state directory, as long as something is wrong."""


@dataclass(frozen=True, slots=True)
class Trouble:
    """Why a node is not connected, and what to try.

    ``since`` is in seconds since 1970, by the machine's own clock. ``code`` is empty as long as the
    node goes on trying; else it has ended with that error.
    """

    since: float
    why: str
    hint: str = ""
    code: str = ""
