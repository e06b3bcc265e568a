"""Many values in one parameter, so that a statement is the same however many there are.

``IN (?, ?, ...)`` is a new statement for every number of values: each is compiled, prepared and
planned anew, and beyond some thousands it is refused. Here the values travel as one JSON text, and
the database makes rows of it: ``json_each`` in SQLite, ``jsonb_to_recordset`` in PostgreSQL.
"""

from __future__ import annotations

import json
from collections.abc import Collection, Mapping, Sequence
from typing import Any, Final

from sqlalchemy import (
    BigInteger,
    ColumnElement,
    Double,
    FromClause,
    Integer,
    Text,
    bindparam,
    cast,
    column,
    func,
    select,
    type_coerce,
)
from sqlalchemy.dialects.postgresql import JSONB
from sqlalchemy.types import TypeEngine

from distribai.store.engine import Tx

TEXT: Final[TypeEngine[Any]] = Text()
INTEGER: Final[TypeEngine[Any]] = Integer()
BIG: Final[TypeEngine[Any]] = BigInteger()
DOUBLE: Final[TypeEngine[Any]] = Double[float]()


def rows(
    tx: Tx, name: str, columns: Mapping[str, TypeEngine[Any]], values: Sequence[Mapping[str, Any]]
) -> FromClause:
    """``values`` as a table ``name`` with ``columns`` (:data:`TEXT`, :data:`INTEGER`,
    :data:`BIG`, :data:`DOUBLE`); every value has all of them."""
    parameter = bindparam(None, json.dumps(list(values), allow_nan=False), Text(), unique=True)
    if tx.dialect == "sqlite":
        each = func.json_each(parameter).table_valued("value", name=f"{name}_each")
        picked = [
            type_coerce(func.json_extract(each.c.value, f"$.{key}"), kind).label(key)
            for key, kind in columns.items()
        ]
        return select(*picked).select_from(each).subquery(name)
    made = func.jsonb_to_recordset(cast(parameter, JSONB(none_as_null=True)))
    listed = [column(key, kind) for key, kind in columns.items()]
    return made.table_valued(*listed, name=name).render_derived(with_types=True)


def among(tx: Tx, wanted: ColumnElement[str], values: Collection[str]) -> ColumnElement[bool]:
    """Whether ``wanted`` is one of ``values``."""
    found = rows(tx, "listed", {"id": TEXT}, [{"id": v} for v in values])
    return wanted.in_(select(found.c.id))
