"""Buckets of an S3 service: how one is opened, and where it is."""

from __future__ import annotations

import os
from collections.abc import Mapping

from obstore.store import S3Store

RETRIES = 4
"""How often a request that failed for a reason that may pass is tried again."""


def is_bucket(place: object) -> bool:
    """Whether a place of blobs is a bucket, not a directory."""
    return str(place).startswith("s3://")


def endpoint_of(config: Mapping[str, str]) -> str:
    """The service's address; empty: Amazon's own."""
    return config.get("endpoint") or os.environ.get("AWS_ENDPOINT_URL", "")


def open_bucket(place: str, config: Mapping[str, str], *, retries: int = RETRIES) -> S3Store:
    """The bucket ``s3://bucket/prefix``. Nothing is contacted yet.

    Credentials, region and endpoint come from the usual ``AWS_*`` variables; ``config`` overrides
    them, with obstore's names (``endpoint``, ``region``, ``access_key_id``, ...).

    Raises:
        obstore.exceptions.BaseError, ValueError: the settings are impossible.
    """
    plain_http = endpoint_of(config).startswith("http://")
    return S3Store.from_url(
        place,
        config=dict(config),  # type: ignore[arg-type]  # keys are the caller's
        client_options={"allow_http": True} if plain_http else None,
        retry_config={"max_retries": retries},
    )
