"""Snapshots by cadence: a blob that nothing needs any more goes after a while.

Revision ID: 0010
Revises: 0009
"""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0010"
down_revision = "0009"
branch_labels = None
depends_on = None


def upgrade() -> None:
    """Everything so far is needed; the next look at old snapshots says what is not."""
    op.add_column("blobs", sa.Column("let_go_at", sa.Double))
    op.create_index("ix_blobs_let_go_at", "blobs", ["let_go_at"])
