"""Databases: the embedded SQLite and PostgreSQL, behind one small face."""

from __future__ import annotations


class Database:
    """One database; ``write()`` and ``read()`` give transactions."""
