"""Which blobs the rows of a database name.

Found by the columns' forms rather than by a list of them, so that no new table is forgotten: pairs
of columns ``x_sha`` and ``x_size``, the table of blobs itself, and everywhere in a JSON column
objects that have a ``sha256`` and a ``size``.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from sqlalchemy import JSON, Table

from distribai.errors import NotFound
from distribai.store.blobs import blob_key

CLAIMS = frozenset({"tasks", "logs", "nodes", "outbox"})
"""Tables whose JSON repeats what nodes said: a blob that they name need not exist."""


class Named:
    """Blobs named so far: size in bytes by SHA-256.

    ``needed`` must exist, because the grid has checked each before it wrote the row. ``claimed``
    are only worth copying if they do. ``where`` says which table needs a blob.
    """

    def __init__(self) -> None:
        self.needed: dict[str, int] = {}
        self.claimed: dict[str, int] = {}
        self.where: dict[str, str] = {}

    def add(self, table: Table, values: tuple[Any, ...]) -> None:
        """Take in one row."""
        row = dict(zip((column.name for column in table.columns), values, strict=True))
        for name, sha256 in row.items():
            if name.endswith("_sha") and sha256 and f"{name[:-4]}_size" in row:
                self._need(table, sha256, row[f"{name[:-4]}_size"])
        if table.name == "blobs" and row.get("let_go_at") is None:
            self._need(table, row["sha256"], row["size"])
        for column in table.columns:
            if isinstance(column.type, JSON):
                for sha256, size in _references(row[column.name]):
                    if table.name in CLAIMS:
                        self.claimed[sha256] = size
                    else:
                        self._need(table, sha256, size)

    def _need(self, table: Table, sha256: str, size: int) -> None:
        self.needed[sha256] = size
        self.where.setdefault(sha256, table.name)


def _references(value: Any) -> Iterator[tuple[str, int]]:
    """(SHA-256, size) of every reference anywhere in a JSON value."""
    todo = [value]
    while todo:
        value = todo.pop()
        if isinstance(value, list):
            todo += value
        elif isinstance(value, dict):
            sha256, size = value.get("sha256"), value.get("size")
            if isinstance(sha256, str) and type(size) is int and _is_name(sha256):
                yield sha256, size
            todo += value.values()


def _is_name(sha256: str) -> bool:
    try:
        blob_key(sha256)
    except NotFound:
        return False
    return True
