"""Accounts, organizations, and what proves who somebody is."""

from __future__ import annotations

from sqlalchemy import JSON, Boolean, Column, Double, ForeignKey, Index, String, Table, Text

from distribai.core.people import OPERATOR
from distribai.store.tables.columns import ID, SHA, metadata

# One-time logins, and the operator's tokens of earlier grids until the next start.
tokens = Table(
    "tokens",
    metadata,
    Column("token_hash", SHA, primary_key=True),
    Column("kind", String(16), nullable=False),
    Column("created_at", Double, nullable=False),
    Column("expires_at", Double),
    Column("revoked", Boolean, nullable=False, default=False),
    Column("account_id", ID, nullable=False, default=OPERATOR, server_default=OPERATOR),
)


accounts = Table(
    "accounts",
    metadata,
    Column("id", ID, primary_key=True),
    Column("name", String(64), nullable=False, unique=True),
    Column("created_at", Double, nullable=False),
    Column("closed_at", Double),
)


organizations = Table(
    "organizations",
    metadata,
    Column("id", ID, primary_key=True),
    Column("name", String(64), nullable=False, unique=True),
    Column("created_at", Double, nullable=False),
    Column("policy", JSON, nullable=False),
    Column("quota", JSON, nullable=False),
)


memberships = Table(
    "memberships",
    metadata,
    Column("account_id", ForeignKey("accounts.id"), primary_key=True),
    Column("organization_id", ForeignKey("organizations.id"), primary_key=True),
    Column("role", String(16), nullable=False),
    Column("created_at", Double, nullable=False),
    Index(None, "organization_id"),
)


api_keys = Table(
    "api_keys",
    metadata,
    Column("id", ID, primary_key=True),
    Column("account_id", ForeignKey("accounts.id"), nullable=False),
    Column("name", Text, nullable=False),
    Column("prefix", String(16), nullable=False),
    Column("secret_hash", SHA, nullable=False, unique=True),
    Column("scopes", JSON, nullable=False),
    Column("created_at", Double, nullable=False),
    Column("expires_at", Double),
    Column("revoked_at", Double),
    Column("last_used_at", Double),
    Index(None, "account_id"),
)
