"""A real S3 API for the tests: one server per test process, which checks no signature."""

from __future__ import annotations

from collections.abc import Iterator

CREDENTIALS = {"access_key_id": "test", "secret_access_key": "test", "region": "us-east-1"}


def run_s3() -> Iterator[str]:
    """An S3 server with an empty bucket ``grid`` while the generator lives; yields its address."""
    import boto3
    from moto.server import ThreadedMotoServer

    server = ThreadedMotoServer(ip_address="127.0.0.1", port=0, verbose=False)
    server.start()
    host, port = server.get_host_and_port()
    endpoint = f"http://{host}:{port}"
    boto3.client(
        "s3",
        endpoint_url=endpoint,
        aws_access_key_id=CREDENTIALS["access_key_id"],
        aws_secret_access_key=CREDENTIALS["secret_access_key"],
        region_name=CREDENTIALS["region"],
    ).create_bucket(Bucket="grid")
    yield endpoint
    server.stop()
