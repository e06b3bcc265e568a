"""Indexes by hash: who may fetch a blob is asked at every request.

Revision ID: 0007
Revises: 0006
"""

from __future__ import annotations

from alembic import op

revision = "0007"
down_revision = "0006"
branch_labels = None
depends_on = None


def upgrade() -> None:
    """Weights, updates and deltas are found by their hash."""
    op.create_index(op.f("ix_submissions_delta_sha"), "submissions", ["delta_sha"])
    op.create_index(op.f("ix_versions_weights_sha"), "versions", ["weights_sha"])
    op.create_index(op.f("ix_versions_update_sha"), "versions", ["update_sha"])
