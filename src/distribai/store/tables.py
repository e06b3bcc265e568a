"""Every table of a grid's database, for SQLite and PostgreSQL alike.

Times are database time in seconds since 1970. JSON columns hold plain values of the domain
(``core.plain``). States are written by the commands and duties that checked them with
``core.states``; nothing else updates a ``state`` column.
"""

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
    MetaData,
    String,
    Table,
    Text,
    text,
)

from distribai.core.people import HOME, OPERATOR

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

meta = Table(
    "meta",
    metadata,
    Column("key", String(64), primary_key=True),
    Column("value", Text, nullable=False),
    comment="single facts of the grid: its id, the outbox's epoch",
)

jobs = Table(
    "jobs",
    metadata,
    Column("id", ID, primary_key=True),
    Column("name", Text, nullable=False),
    Column("state", String(16), nullable=False),
    Column("reason", Text, nullable=False, default=""),
    Column("spec", JSON, nullable=False),
    Column("priority", String(4), nullable=False),
    Column("created_at", Double, nullable=False),
    Column("created_by", Text, nullable=False),
    Column("organization_id", ID, nullable=False, default=HOME, server_default=HOME),
    # Why the organization's policy accepted it at once, or left it to the operator.
    Column("decision", Text, nullable=False, default="", server_default=""),
    Column("weight", Double, nullable=False, default=1.0, server_default="1"),
    Column("retry_of", ID, nullable=False, default="", server_default=""),
    Column("decided_at", Double),
    Column("started_at", Double),
    Column("ended_at", Double),
    Column("version", Integer, nullable=False),
    Column("rounds_total", Integer, nullable=False),
    Column("parameters", BigInteger, nullable=False),
    Column("manifest_hash", SHA, nullable=False),
    Column("dataset_key", ForeignKey("datasets.key"), nullable=False),
    Column("plan", JSON, nullable=False),
    Column("pool_cursor", BigInteger, nullable=False, default=0),
    Column("pool_returned", JSON, nullable=False),
    Column("tokens", BigInteger, nullable=False, default=0),
    Index(None, "state", "created_at"),
    Index(None, "name"),
    Index(None, "organization_id", "state"),
)

datasets = Table(
    "datasets",
    metadata,
    Column("key", SHA, primary_key=True),
    Column("manifest_sha", SHA, nullable=False),
    Column("manifest_size", BigInteger, nullable=False),
    Column("figures", JSON, nullable=False),
    Column("created_at", Double, nullable=False),
    comment="prepared data by fingerprint of (data spec, sequence length, seed)",
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

rounds = Table(
    "rounds",
    metadata,
    Column("job_id", ForeignKey("jobs.id"), primary_key=True),
    Column("number", Integer, primary_key=True),
    Column("take", Integer, primary_key=True),
    Column("state", String(16), nullable=False),
    Column("reason", Text, nullable=False, default=""),
    Column("members", JSON, nullable=False),
    Column("steps", Integer, nullable=False),
    Column("opened_at", Double, nullable=False),
    Column("deadline_at", Double),
    Column("closed_at", Double),
    Column("manifest", NULLABLE_JSON),
    Index(None, "state"),
)

tasks = Table(
    "tasks",
    metadata,
    Column("id", ID, primary_key=True),
    Column("seq", BigInteger, nullable=False),
    Column("job_id", ForeignKey("jobs.id"), nullable=False),
    Column("round", Integer, nullable=False),
    Column("take", Integer, nullable=False),
    Column("phase", String(16), nullable=False),
    Column("state", String(16), nullable=False),
    Column("reason", Text, nullable=False, default=""),
    Column("slot", Integer, nullable=False, default=0),
    Column("member_id", ID, nullable=False, default=""),
    Column("member_device", Integer, nullable=False, default=0),
    Column("node_id", ID, nullable=False, default=""),
    Column("device", Integer, nullable=False, default=0),
    Column("attempt", Integer, nullable=False, default=0),
    Column("failures", Integer, nullable=False, default=0),
    Column("lease_until", Double),
    Column("deadline_at", Double),
    Column("samples", JSON, nullable=False),
    Column("steps", Integer, nullable=False, default=0),
    Column("inner_step_offset", Integer, nullable=False, default=0),
    Column("params", JSON, nullable=False),
    Column("outcome", NULLABLE_JSON),
    Column("outcome_hash", SHA, nullable=False, default=""),
    Column("signature", LargeBinary),
    Column("causes", JSON, nullable=False),
    Column("progress", NULLABLE_JSON),
    Column("created_at", Double, nullable=False),
    Column("leased_at", Double),
    Column("submitted_at", Double),
    Column("ended_at", Double),
    Column("not_before", Double),
    Index(None, "state"),
    Index(None, "job_id", "round", "take"),
    Index(None, "job_id", "seq", unique=True),
    Index(None, "node_id", "state"),
    # One task per device, whatever two schedulers believe.
    Index(
        "uq_tasks_leased_device",
        "node_id",
        "device",
        unique=True,
        sqlite_where=text("state = 'leased'"),
        postgresql_where=text("state = 'leased'"),
    ),
)

submissions = Table(
    "submissions",
    metadata,
    Column("task_id", ForeignKey("tasks.id"), primary_key=True),
    Column("job_id", ForeignKey("jobs.id"), nullable=False),
    # Round and take that it is merged in; late work started from an older version.
    Column("round", Integer, nullable=False),
    Column("take", Integer, nullable=False),
    Column("base_version", Integer, nullable=False, server_default="0"),
    Column("phase", String(16), nullable=False),
    Column("node_id", ForeignKey("nodes.id"), nullable=False),
    Column("attempt", Integer, nullable=False),
    Column("delta_sha", SHA, nullable=False, default=""),
    Column("delta_size", BigInteger, nullable=False, default=0),
    Column("samples", JSON, nullable=False),
    Column("steps", Integer, nullable=False),
    Column("tokens", BigInteger, nullable=False),
    Column("metrics", JSON, nullable=False),
    Column("outcome", JSON, nullable=False),
    Column("signature", LargeBinary, nullable=False),
    Column("accepted_at", Double, nullable=False),
    Index(None, "job_id", "round", "take"),
    Index(None, "delta_sha"),
    Index(None, "node_id", "job_id", "accepted_at"),
    comment="accepted work: the primary key lets a task count once whatever else goes wrong",
)

versions = Table(
    "versions",
    metadata,
    Column("job_id", ForeignKey("jobs.id"), primary_key=True),
    Column("version", Integer, primary_key=True),
    Column("weights_hash", SHA, nullable=False),
    # Empty, like momentum and residual: its snapshot was let go (core.snapshots).
    Column("weights_sha", SHA, nullable=False),
    Column("weights_size", BigInteger, nullable=False),
    Column("update_sha", SHA, nullable=False, default=""),
    Column("update_size", BigInteger, nullable=False, default=0),
    Column("outer_sha", SHA, nullable=False, default=""),
    Column("outer_size", BigInteger, nullable=False, default=0),
    Column("outer_hash", SHA, nullable=False, default=""),
    # What the codec of the way down did not send: the other half of the outer state.
    Column("residual_sha", SHA, nullable=False, default="", server_default=""),
    Column("residual_size", BigInteger, nullable=False, default=0, server_default="0"),
    Column("residual_hash", SHA, nullable=False, default="", server_default=""),
    Column("manifest", JSON, nullable=False),
    Column("contributors", Integer, nullable=False, default=0),
    Column("tokens", BigInteger, nullable=False, default=0),
    Column("held_out_loss", Double),
    Column("created_at", Double, nullable=False),
    # Who may fetch a blob is asked by its hash.
    Index(None, "weights_sha"),
    Index(None, "update_sha"),
)

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

turns = Table(
    "turns",
    metadata,
    Column("organization_id", ID, primary_key=True),
    Column("level", Integer, primary_key=True, autoincrement=False),
    Column("start", Double, nullable=False),
    Column("finish", Double, nullable=False),
    comment="the tags of start-time fair queuing by organization and level (core.turns)",
)

pledges = Table(
    "pledges",
    metadata,
    Column("id", AUTO, primary_key=True, autoincrement=True),
    Column("job_id", ForeignKey("jobs.id"), nullable=False),
    Column("account_id", ID, nullable=False),
    Column("microcredits", BigInteger, nullable=False),
    Column("made_at", Double, nullable=False),
    Column("withdrawn_at", Double),
    Index(None, "job_id"),
    comment="credits that accounts put on a job; jobs.weight is what they make of its turn",
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

# One-time logins, and the operator's tokens of earlier grids until the next start.
tokens = Table(
    "tokens",
    metadata,
    Column("token_hash", SHA, primary_key=True),
    Column("kind", String(16), nullable=False),
    Column("created_at", Double, nullable=False),
    Column("expires_at", Double),
    Column("revoked", Boolean, nullable=False, default=False),
    Column("account_id", ID, nullable=False, default=OPERATOR, server_default=OPERATOR),
)

accounts = Table(
    "accounts",
    metadata,
    Column("id", ID, primary_key=True),
    Column("name", String(64), nullable=False, unique=True),
    Column("created_at", Double, nullable=False),
    Column("closed_at", Double),
)

organizations = Table(
    "organizations",
    metadata,
    Column("id", ID, primary_key=True),
    Column("name", String(64), nullable=False, unique=True),
    Column("created_at", Double, nullable=False),
    Column("policy", JSON, nullable=False),
    Column("quota", JSON, nullable=False),
)

memberships = Table(
    "memberships",
    metadata,
    Column("account_id", ForeignKey("accounts.id"), primary_key=True),
    Column("organization_id", ForeignKey("organizations.id"), primary_key=True),
    Column("role", String(16), nullable=False),
    Column("created_at", Double, nullable=False),
    Index(None, "organization_id"),
)

api_keys = Table(
    "api_keys",
    metadata,
    Column("id", ID, primary_key=True),
    Column("account_id", ForeignKey("accounts.id"), nullable=False),
    Column("name", Text, nullable=False),
    Column("prefix", String(16), nullable=False),
    Column("secret_hash", SHA, nullable=False, unique=True),
    Column("scopes", JSON, nullable=False),
    Column("created_at", Double, nullable=False),
    Column("expires_at", Double),
    Column("revoked_at", Double),
    Column("last_used_at", Double),
    Index(None, "account_id"),
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
