"""Addresses that the grid signs, and whether it signs any."""

from __future__ import annotations

import os
import re
from pathlib import Path
from urllib.parse import parse_qs, quote, urlsplit

import httpx
import pytest
from botocore.auth import S3SigV4QueryAuth
from botocore.awsrequest import AWSRequest
from botocore.credentials import Credentials

from distribai.errors import NotFound, UsageError
from distribai.store.blobs import BlobStore, blob_key
from distribai.store.presigning import LIFETIME, presigner
from tests.store.buckets import CREDENTIALS

SHA = "ab" * 32


async def test_who_has_the_address_gets_the_blob_or_a_range_of_it(
    s3_endpoint: str, tmp_path: Path
) -> None:
    place, s3 = f"s3://grid/{tmp_path.name}", {**CREDENTIALS, "endpoint": s3_endpoint}
    data = os.urandom(100_000)
    ref = await BlobStore.open(place, tmp_path, max_bytes=1 << 20, s3=s3).put_bytes(data)
    signs = presigner(place, "on", s3=s3)
    assert signs is not None
    address = await signs.address(ref.sha256)
    async with httpx.AsyncClient(trust_env=False) as http:
        assert (await http.get(address)).content == data
        some = await http.get(address, headers={"Range": "bytes=99990-"})
        assert (some.status_code, some.content) == (206, data[-10:])
        assert some.headers["content-range"] == "bytes 99990-99999/100000"
        assert (await http.get(await signs.address(SHA))).status_code == 404


async def test_the_signature_is_over_the_key_the_method_and_a_short_time() -> None:
    """Checked against botocore's: the S3 server of the tests checks none."""
    s3 = {**CREDENTIALS, "endpoint": "https://store.example:9000"}
    signs = presigner("s3://grid/a/b", "auto", s3=s3)
    assert signs is not None
    address = urlsplit(await signs.address(SHA))
    assert (address.scheme, address.netloc) == ("https", "store.example:9000")
    assert address.path == f"/grid/a/b/{blob_key(SHA)}"
    query = {k: v[0] for k, v in parse_qs(address.query).items()}
    assert query["X-Amz-Expires"] == str(int(LIFETIME.total_seconds())) == "120"
    signature = query.pop("X-Amz-Signature")
    signed = "&".join(f"{k}={quote(v, safe='')}" for k, v in sorted(query.items()))
    auth = S3SigV4QueryAuth(Credentials("test", "test"), "s3", "us-east-1")
    url = f"https://{address.netloc}{address.path}?{signed}"
    request = AWSRequest("GET", url, headers={"host": address.netloc})
    request.context.update(timestamp=query["X-Amz-Date"])
    canonical = auth.canonical_request(request)
    assert auth.signature(auth.string_to_sign(request, canonical), request) == signature


async def test_others_may_reach_the_store_by_another_name() -> None:
    s3 = {**CREDENTIALS, "endpoint": "http://minio:9000"}
    assert presigner("s3://grid", "auto", s3=s3) is None
    signs = presigner("s3://grid", "auto", "https://blobs.grid.example", s3=s3)
    assert signs is not None
    assert (await signs.address(SHA)).startswith("https://blobs.grid.example/grid/sha256/ab/")


@pytest.mark.parametrize(
    ("place", "endpoint", "choice", "signs"),
    [
        ("s3://grid", "", "auto", True),
        ("s3://grid", "", "off", False),
        ("s3://grid", "https://store.example", "auto", True),
        ("s3://grid", "http://store.example", "auto", False),
        ("s3://grid", "http://store.example", "on", True),
        ("s3://grid", "https://127.0.0.1:9000", "auto", False),
        ("s3://grid", "https://[::1]:9000", "auto", False),
        ("s3://grid", "https://localhost", "auto", False),
        ("s3://grid", "http://127.0.0.1:9000", "on", True),
        ("/srv/blobs", "", "auto", False),
        ("/srv/blobs", "", "off", False),
    ],
)
def test_it_signs_by_itself_only_where_others_can_reach_the_store_and_nobody_can_listen(
    monkeypatch: pytest.MonkeyPatch, place: str, endpoint: str, choice: str, signs: bool
) -> None:
    monkeypatch.setenv("AWS_ENDPOINT_URL", endpoint)
    assert (presigner(place, choice, s3=CREDENTIALS) is not None) is signs


def test_settings_that_cannot_be_followed_are_refused() -> None:
    for place, public in (("/srv/blobs", ""), ("s3://grid", "blobs.example:443")):
        with pytest.raises(UsageError, match=re.compile("presign|public_blobs")) as caught:
            presigner(place, "on", public, s3=CREDENTIALS)
        assert caught.value.code == "config.invalid"


async def test_what_is_no_blob_s_name_is_not_signed() -> None:
    signs = presigner("s3://grid", "on", s3=CREDENTIALS)
    assert signs is not None
    with pytest.raises(NotFound):
        await signs.address("../secret")
