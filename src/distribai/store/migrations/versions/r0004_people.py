"""Accounts, organizations, keys; who did what; whose jobs, nodes, invites and uploads they are.

Jobs of earlier grids belong to the operator's organization, their nodes and invites to the
operator's account. Both are made at the next start, as are keys out of the operator's tokens.

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

ID = sa.String(64)
SHA = sa.String(64)
OURS = sa.text("account_id != ''")


def upgrade() -> None:
    """Make the tables of people, and give everything that is there to the operator."""
    _add("jobs", "organization_id", ID, "org_home")
    _add("jobs", "decision", sa.Text(), "")
    op.create_index(op.f("ix_jobs_organization_id_state"), "jobs", ["organization_id", "state"])
    _add("nodes", "account_id", ID, "acct_operator")
    op.create_index(op.f("ix_nodes_account_id"), "nodes", ["account_id"])
    _add("invites", "account_id", ID, "acct_operator")
    op.add_column("invites", sa.Column("trusted", sa.Boolean()))
    _add("invites", "note", sa.Text(), "")
    _add("tokens", "account_id", ID, "acct_operator")
    _add("outbox", "account_id", ID, "")
    _add("outbox", "key_id", ID, "")
    op.create_index(
        op.f("ix_outbox_account_id_id"),
        "outbox",
        ["account_id", "id"],
        sqlite_where=OURS,
        postgresql_where=OURS,
    )
    _people()


def _add(table: str, name: str, kind: sa.types.TypeEngine, default: object) -> None:  # type: ignore[type-arg]
    op.add_column(table, sa.Column(name, kind, nullable=False, server_default=default))  # type: ignore[arg-type]


def _people() -> None:
    op.create_table(
        "accounts",
        sa.Column("id", ID, nullable=False),
        sa.Column("name", ID, nullable=False),
        sa.Column("created_at", sa.Double(), nullable=False),
        sa.Column("closed_at", sa.Double()),
        sa.PrimaryKeyConstraint("id", name=op.f("pk_accounts")),
        sa.UniqueConstraint("name", name=op.f("uq_accounts_name")),
    )
    op.create_table(
        "organizations",
        sa.Column("id", ID, nullable=False),
        sa.Column("name", ID, nullable=False),
        sa.Column("created_at", sa.Double(), nullable=False),
        sa.Column("policy", sa.JSON(), nullable=False),
        sa.Column("quota", sa.JSON(), nullable=False),
        sa.PrimaryKeyConstraint("id", name=op.f("pk_organizations")),
        sa.UniqueConstraint("name", name=op.f("uq_organizations_name")),
    )
    op.create_table(
        "memberships",
        sa.Column("account_id", ID, nullable=False),
        sa.Column("organization_id", ID, nullable=False),
        sa.Column("role", sa.String(16), nullable=False),
        sa.Column("created_at", sa.Double(), nullable=False),
        sa.PrimaryKeyConstraint("account_id", "organization_id", name=op.f("pk_memberships")),
        _refers("memberships", "account_id", "accounts"),
        _refers("memberships", "organization_id", "organizations"),
    )
    op.create_index(op.f("ix_memberships_organization_id"), "memberships", ["organization_id"])
    op.create_table(
        "api_keys",
        sa.Column("id", ID, nullable=False),
        sa.Column("account_id", ID, nullable=False),
        sa.Column("name", sa.Text(), nullable=False),
        sa.Column("prefix", sa.String(16), nullable=False),
        sa.Column("secret_hash", SHA, nullable=False),
        sa.Column("scopes", sa.JSON(), nullable=False),
        sa.Column("created_at", sa.Double(), nullable=False),
        sa.Column("expires_at", sa.Double()),
        sa.Column("revoked_at", sa.Double()),
        sa.Column("last_used_at", sa.Double()),
        sa.PrimaryKeyConstraint("id", name=op.f("pk_api_keys")),
        sa.UniqueConstraint("secret_hash", name=op.f("uq_api_keys_secret_hash")),
        _refers("api_keys", "account_id", "accounts"),
    )
    op.create_index(op.f("ix_api_keys_account_id"), "api_keys", ["account_id"])
    op.create_table(
        "uploads",
        sa.Column("account_id", ID, nullable=False),
        sa.Column("sha256", SHA, nullable=False),
        sa.Column("size", sa.BigInteger(), nullable=False),
        sa.Column("created_at", sa.Double(), nullable=False),
        sa.PrimaryKeyConstraint("account_id", "sha256", name=op.f("pk_uploads")),
        _refers("uploads", "account_id", "accounts"),
        comment="who has sent the bytes of a blob, and so may name it",
    )


def _refers(table: str, column: str, other: str) -> sa.ForeignKeyConstraint:
    name = op.f(f"fk_{table}_{column}_{other}")
    return sa.ForeignKeyConstraint([column], [f"{other}.id"], name=name)
