"""A job belongs to an organization.

Revision ID: 0004
Revises: 0003
"""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0004"
down_revision = "0003"
branch_labels = None
depends_on = None


def upgrade() -> None:
    """Jobs of earlier grids belong to nobody's organization but the operator's."""
    op.add_column(
        "jobs", sa.Column("organization_id", sa.String(64), nullable=False, server_default="")
    )
