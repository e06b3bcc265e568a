"""The node's certificate against a grid that answers as the test says."""

from __future__ import annotations

import asyncio
import json
import random
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest
from cryptography import x509
from cryptography.hazmat.primitives.asymmetric import ec

from distribai.errors import DistribAIError, NotAllowed, Unavailable
from distribai.node.certificate import RENEW, RETRY_S, Certificate
from distribai.node.identity import load_or_create
from distribai.node.trust import Trust
from distribai.testing.clock import FakeClock
from distribai.wire.joinlink import JoinLink
from distribai.wire.signing import verify_certify
from tests.node.helpers import GRID, BlobServer, eventually, serving

LIFE_S = 1000.0


class Signer(BlobServer):
    """The HTTP side of a grid that signs certificates: the n-th one reads ``cert n``.

    ``answers``: (status, content type, body) to give instead, first come first served.
    """

    def __init__(self) -> None:
        super().__init__()
        self.answers: list[tuple[int, str, bytes]] = []
        self.asked: list[dict[str, Any]] = []
        self.given = 0
        self.stuck = False

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        headers = {"content-type": "application/json"}
        if self.stuck:
            await self._answer(send, 503, b"{}", headers)
        elif self.answers:
            status, kind, body = self.answers.pop(0)
            await self._answer(send, status, body, {"content-type": kind})
        elif scope["path"].endswith("/challenge"):
            await self._answer(send, 200, b'{"challenge": "c1"}', headers)
        else:
            self.asked.append(json.loads(await self._body(receive)))
            self.given += 1
            made = {"certificate": f"cert {self.given}", "lifetime_s": LIFE_S}
            await self._answer(send, 200, json.dumps(made).encode(), headers)


@pytest.fixture
async def signer() -> AsyncIterator[Signer]:
    async with serving(Signer()) as running:
        assert isinstance(running, Signer)
        yield running


class Longest(random.Random):
    """Of all waits the longest."""

    def uniform(self, a: float, b: float) -> float:
        return b


def certificate_at(
    signer: Signer, directory: Path, clock: FakeClock | None = None, *, demanded: bool = True
) -> Certificate:
    at = signer.url.removeprefix("http://")
    join = JoinLink("h", at, at, GRID, "inv_1", certificates=demanded)
    identity = load_or_create(directory)
    return Certificate(join, Trust(join, directory), identity, clock or FakeClock(), Longest())


async def test_the_node_s_key_vouches_for_a_fresh_key_each_time(
    signer: Signer, tmp_path: Path
) -> None:
    certificate = certificate_at(signer, tmp_path)
    first = await certificate.shown()
    assert await certificate.shown() is first, "one that is good is not asked for again"
    await certificate.renew()
    second = await certificate.shown()
    assert first is not None
    assert second is not None
    assert (first.chain_pem, second.chain_pem) == (b"cert 1", b"cert 2")
    assert first.key_pem != second.key_pem
    public = load_or_create(tmp_path).public_key
    for asked in signer.asked:
        assert (asked["challenge"], asked["invite"]) == ("c1", "inv_1")
        assert bytes.fromhex(asked["public_key"]) == public
        verify_certify(public, bytes.fromhex(asked["signature"]), GRID, "c1", asked["request"])
        request = x509.load_pem_x509_csr(asked["request"].encode())
        assert request.is_signature_valid
        assert isinstance(request.public_key().curve, ec.SECP256R1)  # type: ignore[union-attr]


async def test_a_refusal_ends_the_node_with_the_grid_s_reason(
    signer: Signer, tmp_path: Path
) -> None:
    body = json.dumps({"code": "node.invite", "detail": "Used up.", "hint": "Ask."}).encode()
    signer.answers = [(403, "application/problem+json", body)]
    with pytest.raises(NotAllowed) as caught:
        await certificate_at(signer, tmp_path).shown()
    assert (caught.value.code, caught.value.message) == ("node.invite", "Used up.")


JSON = "application/json"


@pytest.mark.parametrize(
    "answer",
    [
        (503, JSON, b"{}"),
        (429, JSON, b"{}"),
        (401, JSON, b"{}"),
        (403, "text/html", b"<html>a proxy's page</html>"),
        (200, "text/html", b"<html>a hotel's page</html>"),
        (200, JSON, b"[]"),
        (200, JSON, b"{}"),
        (200, JSON, b'{"challenge": ""}'),
        (200, JSON, b'{"challenge": 5}'),
    ],
)
async def test_what_is_no_answer_of_a_grid_may_pass(
    signer: Signer, tmp_path: Path, answer: tuple[int, str, bytes]
) -> None:
    for demanded in (True, False):
        signer.answers = [answer]
        certificate = certificate_at(signer, tmp_path, demanded=demanded)
        if demanded:
            with pytest.raises(Unavailable):
                await certificate.shown()
            assert await certificate.shown() is not None, "it asks again"
        else:
            assert await certificate.shown() is None, "nobody has asked for one"
            assert signer.answers, "so none is fetched"


@pytest.mark.parametrize("life", ["null", "0", "-1", '"long"', "1e999"])
async def test_a_certificate_without_a_sensible_end_is_none(
    signer: Signer, tmp_path: Path, life: str
) -> None:
    made = f'{{"certificate": "x", "lifetime_s": {life}}}'.encode()
    signer.answers = [(200, JSON, b'{"challenge": "c"}'), (200, JSON, made)]
    with pytest.raises(Unavailable):
        await certificate_at(signer, tmp_path).shown()


async def test_nobody_listening_is_said(signer: Signer, tmp_path: Path) -> None:
    certificate = certificate_at(signer, tmp_path)
    certificate._join = JoinLink("h", "127.0.0.1:1", "127.0.0.1:1", GRID, certificates=True)
    with pytest.raises(Unavailable, match="no certificate now"):
        await certificate.shown()


async def test_a_grid_that_asks_for_none_is_shown_none(signer: Signer, tmp_path: Path) -> None:
    certificate = certificate_at(signer, tmp_path)
    assert await certificate.shown() is not None
    signer.answers = [(404, JSON, b"{}")]
    await certificate.renew()
    assert await certificate.shown() is None
    assert not signer.answers


async def test_without_tls_a_cut_connection_raises_no_doubt(signer: Signer, tmp_path: Path) -> None:
    certificate = certificate_at(signer, tmp_path, demanded=False)
    certificate.doubt()
    assert await certificate.shown() is None
    assert not signer.asked


async def test_the_next_one_comes_before_the_present_one_ends_and_is_tried_for_again(
    signer: Signer, tmp_path: Path
) -> None:
    clock = FakeClock()
    certificate = certificate_at(signer, tmp_path, clock)

    async def serial() -> bytes:
        held = await certificate.shown()
        assert held is not None
        return held.chain_pem

    keeping = asyncio.ensure_future(certificate.keep())
    try:
        assert await serial() == b"cert 1"
        await eventually(lambda: clock.sleeping)
        signer.stuck = True
        await clock.advance(RENEW[1] * LIFE_S - 1)
        assert clock.sleeping
        await clock.advance(1)
        await eventually(lambda: clock.sleeping)
        assert await serial() == b"cert 1", "as long as there is no other"
        signer.stuck = False
        await clock.advance(RETRY_S)
        await eventually(lambda: signer.given == 2 and clock.sleeping)
        assert await serial() == b"cert 2"
        body = json.dumps({"code": "node.banned", "detail": "Out."}).encode()
        signer.answers = [(403, "application/problem+json", body)]
        await clock.advance(LIFE_S)
        with pytest.raises(DistribAIError) as caught:
            await asyncio.wait_for(keeping, 60)
        assert caught.value.code == "node.banned"
    finally:
        keeping.cancel()
        await asyncio.wait({keeping})
