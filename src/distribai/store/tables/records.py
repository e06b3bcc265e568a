"""What the grid writes down of itself: facts, events, logs, duties, blobs, bytes, webhooks."""

from __future__ import annotations

from sqlalchemy import (
    JSON,
    BigInteger,
    Column,
    Double,
    ForeignKey,
    Index,
    Integer,
    String,
    Table,
    Text,
    text,
)

from distribai.store.tables.columns import AUTO, ID, SHA, metadata

meta = Table(
    "meta",
    metadata,
    Column("key", String(64), primary_key=True),
    Column("value", Text, nullable=False),
    comment="single facts of the grid: its id, the outbox's epoch",
)


idempotency = Table(
    "idempotency",
    metadata,
    Column("owner", String(64), primary_key=True),
    Column("scope", String(16), primary_key=True),
    Column("key", String(255), primary_key=True),
    Column("fingerprint", SHA, nullable=False),
    Column("object_id", ID, nullable=False),
    Column("created_at", Double, nullable=False),
    comment="what a caller's idempotency key made; keys of different callers do not meet",
)


uploads = Table(
    "uploads",
    metadata,
    Column("account_id", ForeignKey("accounts.id"), primary_key=True),
    Column("sha256", SHA, primary_key=True),
    Column("size", BigInteger, nullable=False),
    Column("created_at", Double, nullable=False),
    comment="who has sent the bytes of a blob, and so may name it",
)


outbox = Table(
    "outbox",
    metadata,
    Column("id", AUTO, primary_key=True, autoincrement=True),
    Column("epoch", Integer, nullable=False),
    Column("xid", BigInteger, nullable=False),
    Column("at", Double, nullable=False),
    Column("kind", String(32), nullable=False),
    Column("job_id", ID, nullable=False, default=""),
    Column("task_id", ID, nullable=False, default=""),
    Column("node_id", ID, nullable=False, default=""),
    Column("data", JSON, nullable=False),
    Column("account_id", ID, nullable=False, default="", server_default=""),
    Column("key_id", ID, nullable=False, default="", server_default=""),
    Index(None, "epoch", "xid", "id"),
    Index(None, "job_id", "id"),
    Index(None, "node_id", "id"),
    # Most events are nobody's doing: the audit reads the others alone.
    Index(
        None,
        "account_id",
        "id",
        sqlite_where=text("account_id != ''"),
        postgresql_where=text("account_id != ''"),
    ),
    comment="every state change, written in its own transaction",
    sqlite_autoincrement=True,
)


logs = Table(
    "logs",
    metadata,
    Column("id", AUTO, primary_key=True, autoincrement=True),
    Column("at", Double, nullable=False),
    Column("level", String(16), nullable=False),
    Column("message", Text, nullable=False),
    Column("job_id", ID, nullable=False, default=""),
    Column("task_id", ID, nullable=False, default=""),
    Column("node_id", ID, nullable=False, default=""),
    Column("fields", JSON, nullable=False),
    Index(None, "job_id", "id"),
    sqlite_autoincrement=True,
)


duties = Table(
    "duties",
    metadata,
    Column("name", String(64), primary_key=True),
    Column("holder", ID, nullable=False),
    Column("fence", BigInteger, nullable=False),
    Column("lease_until", Double, nullable=False),
)


blobs = Table(
    "blobs",
    metadata,
    Column("sha256", SHA, primary_key=True),
    Column("size", BigInteger, nullable=False),
    Column("kind", String(16), nullable=False),
    Column("job_id", ID, nullable=False, default=""),
    Column("created_at", Double, nullable=False),
    # Since when nothing needs it any more; nothing: it is needed.
    Column("let_go_at", Double),
    Index(None, "let_go_at"),
)


traffic = Table(
    "traffic",
    metadata,
    Column("job_id", ID, primary_key=True),
    Column("node_id", ID, primary_key=True),
    Column("kind", String(16), primary_key=True),
    Column("up", BigInteger, nullable=False),
    Column("down", BigInteger, nullable=False),
)


webhooks = Table(
    "webhooks",
    metadata,
    Column("id", ID, primary_key=True),
    Column("url", Text, nullable=False),
    Column("kinds", JSON, nullable=False),
    Column("state", String(16), nullable=False),
    Column("reason", Text, nullable=False, default=""),
    Column("key_id", String(16), nullable=False),
    Column("created_at", Double, nullable=False),
    Column("created_by", Text, nullable=False),
    Column("cursor", String(64), nullable=False),
    Column("failures", Integer, nullable=False, default=0),
    Column("failing_since", Double),
    Column("next_at", Double, nullable=False),
    Column("delivered_at", Double),
    Index(None, "state"),
    comment="no secret: that follows from a key file and the id",
)


deliveries = Table(
    "deliveries",
    metadata,
    Column("id", AUTO, primary_key=True, autoincrement=True),
    Column("webhook_id", ForeignKey("webhooks.id"), nullable=False),
    Column("event_id", BigInteger),
    Column("cursor", String(64), nullable=False, default=""),
    Column("kind", String(32), nullable=False),
    Column("state", String(16), nullable=False),
    Column("attempts", Integer, nullable=False, default=0),
    Column("status", Integer),
    Column("reason", Text, nullable=False, default=""),
    Column("seconds", Double),
    Column("created_at", Double, nullable=False),
    Column("attempted_at", Double),
    Column("ended_at", Double),
    Index(None, "webhook_id", "state", "id"),
    Index(None, "webhook_id", "event_id", unique=True),
    comment="one event to one webhook; without an event: a test",
    sqlite_autoincrement=True,
)
