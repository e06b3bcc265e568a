"""What all tables are made of: their registry, and types of columns that recur."""

from __future__ import annotations

from sqlalchemy import JSON, BigInteger, Integer, MetaData, String

metadata = MetaData(
    naming_convention={
        "ix": "ix_%(table_name)s_%(column_0_N_name)s",
        "uq": "uq_%(table_name)s_%(column_0_N_name)s",
        "fk": "fk_%(table_name)s_%(column_0_name)s_%(referred_table_name)s",
        "pk": "pk_%(table_name)s",
    }
)

AUTO = BigInteger().with_variant(Integer(), "sqlite")
"""Key that the database counts; SQLite counts only a column of the exact type INTEGER."""

NULLABLE_JSON = JSON(none_as_null=True)
"""JSON whose None is SQL's NULL rather than JSON's null."""

ID = String(64)
SHA = String(64)
