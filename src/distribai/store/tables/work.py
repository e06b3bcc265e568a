"""Jobs and what becomes of them: data sets, rounds, tasks, accepted work, versions."""

from __future__ import annotations

from sqlalchemy import (
    JSON,
    BigInteger,
    Column,
    Double,
    ForeignKey,
    Index,
    Integer,
    LargeBinary,
    String,
    Table,
    Text,
    text,
)

from distribai.core.people import HOME
from distribai.store.tables.columns import AUTO, ID, NULLABLE_JSON, SHA, metadata

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
