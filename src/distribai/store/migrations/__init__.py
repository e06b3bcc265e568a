"""Alembic revisions of the store, run by :func:`distribai.store.migrate.migrate`."""
