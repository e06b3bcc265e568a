"""The built-in data sets by name; what is in them, :mod:`distribai.data.builtin` knows."""

from __future__ import annotations

from typing import Final

from distribai.errors import InvalidData

BUILT_IN: Final = ("stdlib",)
"""All of them; a test holds the list against what can be read."""


def check_built_in(name: str) -> None:
    """Refuse a data set that is not built in.

    Raises:
        InvalidData: ``data.missing``.
    """
    if name not in BUILT_IN:
        raise InvalidData(
            "data.missing",
            f"There is no built-in data set {name!r}.",
            f"Built in: {', '.join(BUILT_IN)}. Files of your own go into `data.files`.",
            field="data.source",
        )
