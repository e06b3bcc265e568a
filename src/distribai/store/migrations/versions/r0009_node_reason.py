"""A node says why it takes no tasks.

Revision ID: 0009
Revises: 0008
"""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0009"
down_revision = "0008"
branch_labels = None
depends_on = None


def upgrade() -> None:
    """Add the column; nothing was said until now."""
    op.add_column("nodes", sa.Column("intent_reason", sa.Text(), nullable=False, server_default=""))
