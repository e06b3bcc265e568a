"""What Alembic runs: the revisions, on the connection that the caller handed over."""

from alembic import context

from distribai.store.tables import metadata

context.configure(connection=context.config.attributes["connection"], target_metadata=metadata)
context.run_migrations()
