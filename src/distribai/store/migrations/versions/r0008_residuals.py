"""What the codec of the way down did not send, as part of a version's outer state; a node's own
accepted work, newest first.

Revision ID: 0008
Revises: 0007
"""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0008"
down_revision = "0007"
branch_labels = None
depends_on = None


def upgrade() -> None:
    """Versions so far were made without error feedback: nothing was kept."""
    for name in ("residual_sha", "residual_hash"):
        op.add_column("versions", sa.Column(name, sa.String(64), nullable=False, server_default=""))
    op.add_column(
        "versions",
        sa.Column("residual_size", sa.BigInteger, nullable=False, server_default="0"),
    )
    op.create_index(
        "ix_submissions_node_id_job_id_accepted_at",
        "submissions",
        ["node_id", "job_id", "accepted_at"],
    )
