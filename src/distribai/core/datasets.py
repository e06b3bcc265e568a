"""The built-in data sets by name, and what a node fetches of data; what is in the sets,
:mod:`distribai.data.builtin` knows."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

from distribai.core.spec import JobSpec
from distribai.errors import InvalidData

BUILT_IN: Final[Mapping[str, int]] = {"stdlib": 10_000_000}
"""All of them, with the bytes of text at which reading stops; a test holds the list against what
can be read."""


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


def once_bytes(spec: JobSpec, data_bytes: int | None = None) -> int:
    """What a node fetches before its first task, at most: the data's shards, of ``data_bytes`` once
    it is prepared, and the weights that training begins with where these are not made from a seed.

    Shards hold two bytes a token. Text has a token a byte at most; where a vocabulary beyond 65536
    takes four, it has far fewer. A node that has the data from an earlier job fetches none of it.
    """
    if data_bytes is None:
        files = spec.data.files
        text = sum(file.size for file in files) if files else BUILT_IN[spec.data.source]
        data_bytes = 2 * text
    return data_bytes + (spec.model.init.size if spec.model.init is not None else 0)
