"""Nodes, their sessions and failures, and what lets them in."""

from __future__ import annotations

from sqlalchemy import (
    JSON,
    BigInteger,
    Boolean,
    Column,
    Double,
    ForeignKey,
    Index,
    Integer,
    LargeBinary,
    String,
    Table,
    Text,
)

from distribai.core.people import OPERATOR
from distribai.store.tables.columns import AUTO, ID, NULLABLE_JSON, SHA, metadata

nodes = Table(
    "nodes",
    metadata,
    Column("id", ID, primary_key=True),
    Column("public_key", LargeBinary, nullable=False),
    Column("name", Text, nullable=False, default=""),
    Column("liveness", String(16), nullable=False),
    Column("standing", String(16), nullable=False),
    Column("intent", String(16), nullable=False),
    Column("intent_reason", Text, nullable=False, default="", server_default=""),
    Column("software", Text, nullable=False, default=""),
    Column("devices", JSON, nullable=False),
    Column("invite_id", ID, nullable=False, default=""),
    Column("account_id", ID, nullable=False, default=OPERATOR, server_default=OPERATOR),
    Column("joined_at", Double, nullable=False),
    Column("last_heard_at", Double, nullable=False),
    Column("bytes_up", BigInteger, nullable=False, default=0),
    Column("bytes_down", BigInteger, nullable=False, default=0),
    Column("machine", NULLABLE_JSON),
    Column(
        "ordered", String(16), nullable=False, default="contribute", server_default="contribute"
    ),
    Column("standing_reason", Text, nullable=False, default="", server_default=""),
    Column("standing_at", Double),
    Index(None, "liveness"),
    Index(None, "account_id"),
)


failures = Table(
    "failures",
    metadata,
    Column("id", AUTO, primary_key=True, autoincrement=True),
    Column("node_id", ID, nullable=False),
    Column("job_id", ID, nullable=False),
    Column("task_id", ID, nullable=False),
    Column("code", String(64), nullable=False),
    Column("reason", Text, nullable=False),
    Column("at", Double, nullable=False),
    Index(None, "at"),
    comment="attempts that failed on their node, and results that were refused",
    sqlite_autoincrement=True,
)


sessions = Table(
    "sessions",
    metadata,
    Column("id", ID, primary_key=True),
    Column("node_id", ForeignKey("nodes.id"), nullable=False),
    Column("token_hash", SHA, nullable=False, unique=True),
    Column("holder", ID, nullable=False),
    # When its node registered last: began it, or took it up again.
    Column("created_at", Double, nullable=False),
    Column("ended_at", Double),
    Index(None, "node_id"),
)


# Each lets nodes in, for the account that they will belong to.
invites = Table(
    "invites",
    metadata,
    Column("id", ID, primary_key=True),
    Column("secret_hash", SHA, nullable=False, unique=True),
    Column("created_at", Double, nullable=False),
    Column("expires_at", Double),
    Column("uses_left", Integer),
    Column("revoked", Boolean, nullable=False, default=False),
    Column("account_id", ID, nullable=False, default=OPERATOR, server_default=OPERATOR),
    # Whether its nodes are trusted from the beginning; nothing: as the grid's mode says.
    Column("trusted", Boolean),
    Column("note", Text, nullable=False, default="", server_default=""),
)
