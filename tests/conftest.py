from __future__ import annotations

from collections.abc import Iterator

import pytest


@pytest.fixture(scope="session")
def postgres() -> Iterator[str]:
    """The URI of a migrated database on a real PostgreSQL, one server per test process."""
    # Imported here, so that tests which need no database do not pay for it.
    from tests.store.databases import run_postgres

    yield from run_postgres()
