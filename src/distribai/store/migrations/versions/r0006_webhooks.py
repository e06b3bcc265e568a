"""Webhooks and their deliveries; idempotency keys for everything that can be created.

Revision ID: 0006
Revises: 0005
"""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0006"
down_revision = "0005"
branch_labels = None
depends_on = None


def upgrade() -> None:
    """Keys of earlier grids made jobs, and only the operator could make those."""
    op.create_table(
        "webhooks",
        sa.Column("id", sa.String(64), nullable=False),
        sa.Column("url", sa.Text(), nullable=False),
        sa.Column("kinds", sa.JSON(), nullable=False),
        sa.Column("state", sa.String(16), nullable=False),
        sa.Column("reason", sa.Text(), nullable=False),
        sa.Column("key_id", sa.String(16), nullable=False),
        sa.Column("created_at", sa.Double(), nullable=False),
        sa.Column("created_by", sa.Text(), nullable=False),
        sa.Column("cursor", sa.String(64), nullable=False),
        sa.Column("failures", sa.Integer(), nullable=False),
        sa.Column("failing_since", sa.Double(), nullable=True),
        sa.Column("next_at", sa.Double(), nullable=False),
        sa.Column("delivered_at", sa.Double(), nullable=True),
        sa.PrimaryKeyConstraint("id", name=op.f("pk_webhooks")),
        comment="no secret: that follows from a key file and the id",
    )
    op.create_index(op.f("ix_webhooks_state"), "webhooks", ["state"])
    op.create_table(
        "deliveries",
        sa.Column(
            "id",
            sa.BigInteger().with_variant(sa.Integer(), "sqlite"),
            autoincrement=True,
            nullable=False,
        ),
        sa.Column("webhook_id", sa.String(64), nullable=False),
        sa.Column("event_id", sa.BigInteger(), nullable=True),
        sa.Column("cursor", sa.String(64), nullable=False),
        sa.Column("kind", sa.String(32), nullable=False),
        sa.Column("state", sa.String(16), nullable=False),
        sa.Column("attempts", sa.Integer(), nullable=False),
        sa.Column("status", sa.Integer(), nullable=True),
        sa.Column("reason", sa.Text(), nullable=False),
        sa.Column("seconds", sa.Double(), nullable=True),
        sa.Column("created_at", sa.Double(), nullable=False),
        sa.Column("attempted_at", sa.Double(), nullable=True),
        sa.Column("ended_at", sa.Double(), nullable=True),
        sa.ForeignKeyConstraint(
            ["webhook_id"], ["webhooks.id"], name=op.f("fk_deliveries_webhook_id_webhooks")
        ),
        sa.PrimaryKeyConstraint("id", name=op.f("pk_deliveries")),
        comment="one event to one webhook; without an event: a test",
        sqlite_autoincrement=True,
    )
    op.create_index(
        op.f("ix_deliveries_webhook_id_state_id"), "deliveries", ["webhook_id", "state", "id"]
    )
    op.create_index(
        op.f("ix_deliveries_webhook_id_event_id"),
        "deliveries",
        ["webhook_id", "event_id"],
        unique=True,
    )
    _wider_keys()


def _wider_keys() -> None:
    """A new table for the old one: SQLite cannot change a primary key in place."""
    op.rename_table("idempotency", "idempotency_before")
    if op.get_bind().dialect.name == "postgresql":  # there its index has a name of its own
        op.execute("ALTER INDEX pk_idempotency RENAME TO pk_idempotency_before")
    op.create_table(
        "idempotency",
        sa.Column("owner", sa.String(64), nullable=False),
        sa.Column("scope", sa.String(16), nullable=False),
        sa.Column("key", sa.String(255), nullable=False),
        sa.Column("fingerprint", sa.String(64), nullable=False),
        sa.Column("object_id", sa.String(64), nullable=False),
        sa.Column("created_at", sa.Double(), nullable=False),
        sa.PrimaryKeyConstraint("owner", "scope", "key", name=op.f("pk_idempotency")),
        comment="what a caller's idempotency key made; keys of different callers do not meet",
    )
    op.execute(
        "INSERT INTO idempotency (owner, scope, key, fingerprint, object_id, created_at) "
        "SELECT 'operator', 'jobs', key, fingerprint, job_id, created_at FROM idempotency_before"
    )
    op.drop_table("idempotency_before")
