"""Every table of a grid's database, for SQLite and PostgreSQL alike.

Times are database time in seconds since 1970. JSON columns hold plain values of the domain
(``core.plain``). States are written by the commands and duties that checked them with
``core.states``; nothing else updates a ``state`` column. A new table stands in one of the modules
here and is named below: migrations, backups and moves see what ``metadata`` has.
"""

from __future__ import annotations

from distribai.store.tables.columns import metadata
from distribai.store.tables.fleet import failures, invites, nodes, sessions
from distribai.store.tables.people import accounts, api_keys, memberships, organizations, tokens
from distribai.store.tables.records import (
    blobs,
    deliveries,
    duties,
    idempotency,
    logs,
    meta,
    outbox,
    traffic,
    uploads,
    webhooks,
)
from distribai.store.tables.work import (
    datasets,
    jobs,
    pledges,
    rounds,
    submissions,
    tasks,
    turns,
    versions,
)

__all__ = [
    "accounts",
    "api_keys",
    "blobs",
    "datasets",
    "deliveries",
    "duties",
    "failures",
    "idempotency",
    "invites",
    "jobs",
    "logs",
    "memberships",
    "meta",
    "metadata",
    "nodes",
    "organizations",
    "outbox",
    "pledges",
    "rounds",
    "sessions",
    "submissions",
    "tasks",
    "tokens",
    "traffic",
    "turns",
    "uploads",
    "versions",
    "webhooks",
]
