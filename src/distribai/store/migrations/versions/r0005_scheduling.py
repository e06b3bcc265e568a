"""Scheduling: turns, weights and pledges; what machines were measured to have; standing.

Revision ID: 0005
Revises: 0004
"""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0005"
down_revision = "0004"
branch_labels = None
depends_on = None

AUTO = sa.BigInteger().with_variant(sa.Integer(), "sqlite")


def upgrade() -> None:
    """Every job weighs the same, no node was measured, and no operator has ordered anything."""
    op.add_column("jobs", sa.Column("weight", sa.Double, nullable=False, server_default="1"))
    op.add_column("jobs", sa.Column("retry_of", sa.String(64), nullable=False, server_default=""))
    op.add_column("nodes", sa.Column("machine", sa.JSON(none_as_null=True)))
    op.add_column(
        "nodes",
        sa.Column("ordered", sa.String(16), nullable=False, server_default="contribute"),
    )
    op.add_column("nodes", sa.Column("standing_reason", sa.Text, nullable=False, server_default=""))
    op.add_column("nodes", sa.Column("standing_at", sa.Double))
    op.create_table(
        "failures",
        sa.Column("id", AUTO, autoincrement=True, nullable=False),
        sa.Column("node_id", sa.String(64), nullable=False),
        sa.Column("job_id", sa.String(64), nullable=False),
        sa.Column("task_id", sa.String(64), nullable=False),
        sa.Column("code", sa.String(64), nullable=False),
        sa.Column("reason", sa.Text, nullable=False),
        sa.Column("at", sa.Double, nullable=False),
        sa.PrimaryKeyConstraint("id", name="pk_failures"),
        comment="attempts that failed on their node, and results that were refused",
        sqlite_autoincrement=True,
    )
    op.create_index("ix_failures_at", "failures", ["at"])
    op.create_table(
        "turns",
        sa.Column("organization_id", sa.String(64), nullable=False),
        sa.Column("level", sa.Integer, nullable=False, autoincrement=False),
        sa.Column("start", sa.Double, nullable=False),
        sa.Column("finish", sa.Double, nullable=False),
        sa.PrimaryKeyConstraint("organization_id", "level", name="pk_turns"),
        comment="the tags of start-time fair queuing by organization and level (core.turns)",
    )
    op.create_table(
        "pledges",
        sa.Column("id", AUTO, autoincrement=True, nullable=False),
        sa.Column("job_id", sa.String(64), nullable=False),
        sa.Column("account_id", sa.String(64), nullable=False),
        sa.Column("microcredits", sa.BigInteger, nullable=False),
        sa.Column("made_at", sa.Double, nullable=False),
        sa.Column("withdrawn_at", sa.Double),
        sa.ForeignKeyConstraint(["job_id"], ["jobs.id"], name="fk_pledges_job_id_jobs"),
        sa.PrimaryKeyConstraint("id", name="pk_pledges"),
        comment="credits that accounts put on a job; jobs.weight is what they make of its turn",
        sqlite_autoincrement=True,
    )
    op.create_index("ix_pledges_job_id", "pledges", ["job_id"])
