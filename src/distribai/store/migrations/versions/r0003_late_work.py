"""Accepted work names the version that it started from; a task that failed rests for a while.

Revision ID: 0003
Revises: 0002
"""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0003"
down_revision = "0002"
branch_labels = None
depends_on = None


def upgrade() -> None:
    """Add the columns; until now everything was merged into the round of its own version."""
    op.add_column(
        "submissions",
        sa.Column("base_version", sa.Integer(), nullable=False, server_default="0"),
    )
    op.execute("UPDATE submissions SET base_version = round")
    op.add_column("tasks", sa.Column("not_before", sa.Double(), nullable=True))
