"""Events of one node are found by an index.

Revision ID: 0002
Revises: 0001
"""

from __future__ import annotations

from alembic import op

revision = "0002"
down_revision = "0001"
branch_labels = None
depends_on = None


def upgrade() -> None:
    """Add the index."""
    op.create_index(op.f("ix_outbox_node_id_id"), "outbox", ["node_id", "id"])
