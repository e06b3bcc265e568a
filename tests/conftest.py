from __future__ import annotations

from collections.abc import Iterator

import pytest


@pytest.fixture(scope="session")
def postgres() -> Iterator[str]:
    """The URI of a migrated database on a real PostgreSQL, one server per test process."""
    # Imported here, so that tests which need no database do not pay for it.
    from tests.store.databases import run_postgres

    yield from run_postgres()


@pytest.fixture(scope="session")
def s3_endpoint() -> Iterator[str]:
    """The address of an S3 server with a bucket ``grid``, one server per test process."""
    from tests.store.buckets import run_s3

    yield from run_s3()


@pytest.fixture
def s3_environment(s3_endpoint: str, monkeypatch: pytest.MonkeyPatch) -> str:
    """The same, where ``s3://grid/...`` leads to it; its address."""
    for name, value in (
        ("AWS_ENDPOINT_URL", s3_endpoint),
        ("AWS_ACCESS_KEY_ID", "test"),
        ("AWS_SECRET_ACCESS_KEY", "test"),
        ("AWS_REGION", "us-east-1"),
    ):
        monkeypatch.setenv(name, value)
    return s3_endpoint
