"""What a machine's owner wants of a node, left in its state directory for the daemon to find.

A file rather than a signal or a socket: it works on every system, for a daemon that is restarted,
and for whoever may write there and nobody else.
"""

from __future__ import annotations

from pathlib import Path
from typing import Final, Literal, get_args

from distribai import durable

Wish = Literal["contribute", "pause", "finish"]

FILE: Final = "wish"


def leave(state: Path, wish: Wish) -> None:
    """Leave a wish for the daemon of a state directory; it takes the place of an earlier one.

    Raises:
        OSError: the directory is not there, or refuses.
    """
    durable.write(state / FILE, f"{wish}\n".encode(), point="node.wish")


def read(state: Path) -> Wish | None:
    """The wish that lies there, if there is one that makes sense."""
    try:
        word = (state / FILE).read_text(encoding="ascii").strip()
    except (OSError, UnicodeDecodeError):
        return None
    return next((wish for wish in get_args(Wish) if wish == word), None)


def forget(state: Path) -> None:
    """Take a wish away: it was granted for good.

    Raises:
        OSError: the directory refuses.
    """
    (state / FILE).unlink(missing_ok=True)
