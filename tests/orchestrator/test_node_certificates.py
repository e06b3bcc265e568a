"""Nodes' certificates over real sockets: who gets through, and who is refused by TLS or after."""

from __future__ import annotations

import asyncio
import random
import socket
import ssl
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from cryptography import x509
from cryptography.hazmat.primitives import hashes
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.hazmat.primitives.serialization import Encoding, NoEncryption, PrivateFormat

from distribai import tls
from distribai.errors import NotAllowed, UsageError
from distribai.node.certificate import Certificate, Shown
from distribai.node.clock import SystemClock
from distribai.node.identity import Identity, load_or_create
from distribai.node.link import Link
from distribai.node.transport import ConnectionLost, GrpcTransport
from distribai.node.trust import Trust
from distribai.orchestrator import certificates
from distribai.orchestrator.certificates import Authority, node_certificate
from distribai.orchestrator.fleet import standing
from distribai.orchestrator.main import Orchestrator
from distribai.testing.proxy import Proxy
from distribai.wire import joinlink
from distribai.wire.joinlink import JoinLink
from distribai.wire.signing import sign_register
from distribai.wire.v1 import distribai_pb2 as pb
from distribai.wire.versions import PROTOCOL
from tests.node.helpers import eventually
from tests.orchestrator.test_channel import Daemon, made, publicly_trusted, settings

DAY_S = 86400.0


def asking(directory: Path, **changes: Any) -> Orchestrator:
    return Orchestrator(settings(directory, client_certificates="required", **changes))


@pytest.fixture
async def grid(tmp_path: Path) -> AsyncIterator[Orchestrator]:
    running = asking(tmp_path / "grid")
    await running.start()
    yield running
    await running.stop()


def authority_of(grid: Orchestrator) -> Authority:
    assert grid.grid.authority is not None
    return grid.grid.authority


def minted(authority: Authority, name: str, at: float, lifetime_s: float = DAY_S) -> Shown:
    """A certificate that the HTTP interface would not give out."""
    key = ec.generate_private_key(ec.SECP256R1())
    request = (
        x509.CertificateSigningRequestBuilder()
        .subject_name(x509.Name([]))
        .sign(key, hashes.SHA256())
        .public_bytes(Encoding.PEM)
        .decode()
    )
    cert = node_certificate(authority, name, request, certificates.utc(at), lifetime_s)
    return Shown(
        key.private_bytes(Encoding.PEM, PrivateFormat.PKCS8, NoEncryption()),
        cert.public_bytes(Encoding.PEM),
    )


class Given(Certificate):
    """A certificate of the test's choice; None: none at all."""

    def __init__(self, what: Shown | None) -> None:
        self.what, self.doubted = what, 0

    async def shown(self) -> Shown | None:
        return self.what

    def doubt(self) -> None:
        self.doubted += 1


async def first_word(link: JoinLink, directory: Path, what: Shown | None) -> str:
    """What the grid says first to who shows ``what``; empty when TLS refuses it."""
    given = Given(what)
    connection = await GrpcTransport(link.grpc, Trust(link, directory), given).connect()
    try:
        message = await connection.read()
        assert message is not None
        assert given.doubted == 0
        return str(message.WhichOneof("body"))
    except ConnectionLost:
        assert given.doubted == 1, "the node asks for another one before it comes again"
        return ""
    finally:
        await connection.close()


@asynccontextmanager
async def joined(link: JoinLink, directory: Path) -> AsyncIterator[tuple[Link, Certificate]]:
    """A node's link, as the daemon makes it."""
    identity, trust = load_or_create(directory), Trust(link, directory)
    certificate = Certificate(link, trust, identity, SystemClock(), random.Random(1))
    transport = GrpcTransport(link.grpc, trust, certificate)
    made = Link(link, transport, identity, Daemon(), SystemClock(), random.Random(1))
    running = [asyncio.ensure_future(made.run()), asyncio.ensure_future(certificate.keep())]
    try:
        yield made, certificate
    finally:
        for task in running:
            task.cancel()
        await asyncio.gather(*running, return_exceptions=True)


def serial(what: Shown | None) -> int:
    assert what is not None
    return x509.load_pem_x509_certificate(what.chain_pem).serial_number


async def test_a_node_joins_with_what_the_join_link_says_and_nothing_else(
    grid: Orchestrator, tmp_path: Path
) -> None:
    link = joinlink.parse(grid.join_link)
    assert link.certificates
    async with joined(link, tmp_path / "node") as (node, certificate):
        await eventually(lambda: node.session_token)
        what = await certificate.shown()
        assert what is not None
        cert = x509.load_pem_x509_certificate(what.chain_pem)
        assert cert.subject.rfc4514_string() == f"CN={node.node_id}"
    kept = {path.name for path in (tmp_path / "node").iterdir()}
    assert kept == {"node.key", "ca-cert"}, "the certificate's key lies nowhere"


async def test_tls_refuses_who_shows_no_good_certificate_of_this_grid(
    grid: Orchestrator, tmp_path: Path
) -> None:
    link, node = joinlink.parse(grid.join_link), tmp_path / "node"
    authority, now = authority_of(grid), time.time()
    name = load_or_create(node).node_id
    assert await first_word(link, node, minted(authority, name, now)) == "challenge"
    server = made(tmp_path / "grid", now)
    foreign = certificates.ensure_authority(tmp_path / "other", certificates.utc(now))
    for what in (
        None,
        minted(authority, name, now - 2 * DAY_S),
        minted(authority, name, now + 2 * DAY_S),
        minted(foreign, name, now),
        Shown(server.key_pem, server.chain_pem),
    ):
        assert await first_word(link, node, what) == ""
    assert list(grid.grid.fleet) == []


async def test_a_node_s_certificate_does_not_pass_for_the_grid_s(
    grid: Orchestrator, tmp_path: Path
) -> None:
    """A node that could play the grid would get other nodes' invites."""
    what = minted(authority_of(grid), tls.GRID_NAME, time.time())
    (tmp_path / "pair").write_bytes(what.key_pem + what.chain_pem)
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(tmp_path / "pair")
    with socket.create_server(("127.0.0.1", 0)) as listener:

        def impersonate() -> None:
            taken, _ = listener.accept()
            with taken, pytest.raises(ssl.SSLError):
                context.wrap_socket(taken, server_side=True).recv(1)

        serving = asyncio.ensure_future(asyncio.to_thread(impersonate))

        def dial() -> None:
            pinned = tls.pinned_context(grid.ca_pem)
            with socket.create_connection(listener.getsockname()) as raw:
                pinned.wrap_socket(raw)

        with pytest.raises(ssl.SSLCertVerificationError, match=r"purpose|mismatch"):
            await asyncio.to_thread(dial)
        await serving


async def register(link: JoinLink, directory: Path, what: Shown, who: Identity) -> pb.SessionEnd:
    """How a stream ends that shows ``what`` and registers as ``who``; an empty one: it does not."""
    connection = await GrpcTransport(link.grpc, Trust(link, directory), Given(what)).connect()
    try:
        challenge = await connection.read()
        assert challenge is not None
        nonce = challenge.challenge.nonce
        message = pb.RegisterSession(
            protocol=PROTOCOL,
            public_key=who.public_key,
            signature=sign_register(who.key, link.grid, nonce),
            invite=link.invite,
            devices=[pb.Device(type="cpu", name="test", threads=1)],
        )
        await connection.write(pb.NodeMessage(register=message))
        answer = await connection.read()
        assert answer is not None
        return answer.session_end
    finally:
        await connection.close()


async def test_a_node_cannot_act_for_another_whichever_half_it_has_of_it(
    grid: Orchestrator, tmp_path: Path
) -> None:
    link, authority, now = joinlink.parse(grid.join_link), authority_of(grid), time.time()
    mine, other = load_or_create(tmp_path / "a"), load_or_create(tmp_path / "b")
    for name, who in ((mine.node_id, other), (other.node_id, mine)):
        end = await register(link, tmp_path / "a", minted(authority, name, now), who)
        assert end.code == "node.certificate"
    assert list(grid.grid.fleet) == []
    good = minted(authority, mine.node_id, now)
    assert (await register(link, tmp_path / "a", good, mine)).code == ""


async def test_a_banned_node_gets_neither_in_nor_another_certificate(
    grid: Orchestrator, tmp_path: Path
) -> None:
    link, node = joinlink.parse(grid.join_link), tmp_path / "node"
    identity = load_or_create(node)
    held = minted(authority_of(grid), identity.node_id, time.time())
    assert (await register(link, node, held, identity)).code == ""
    await standing.set_standing(grid.grid, identity.node_id, "ban", "it lies", "operator")
    assert (await register(link, node, held, identity)).code == "node.banned"
    with pytest.raises(NotAllowed) as caught:
        await Certificate(
            link, Trust(link, node), identity, SystemClock(), random.Random(1)
        ).shown()
    assert caught.value.code == "node.banned"


async def test_a_certificate_is_renewed_before_it_ends_and_the_stream_goes_on(
    tmp_path: Path,
) -> None:
    running = asking(tmp_path / "grid", certificate_s=8.0)
    await running.start()
    try:
        link = joinlink.parse(running.join_link)
        async with joined(link, tmp_path / "node") as (node, certificate):
            await eventually(lambda: node.session_token)
            session = running.grid.fleet.of(node.node_id)
            first = serial(await certificate.shown())
            seen = {first}
            async with asyncio.timeout(180):
                while len(seen) < 2:
                    seen.add(serial(await certificate.shown()))
                    await asyncio.sleep(0.05)
            assert running.grid.fleet.of(node.node_id) is session
    finally:
        await running.stop()


async def test_the_grid_behind_a_tcp_balancer(grid: Orchestrator, tmp_path: Path) -> None:
    link = joinlink.parse(grid.join_link)
    grpc, http = (int(a.rpartition(":")[2]) for a in (link.grpc, link.http))
    async with Proxy("127.0.0.1", grpc) as front, Proxy("127.0.0.1", http) as web:
        through = replace(link, grpc=f"127.0.0.1:{front.port}", http=f"127.0.0.1:{web.port}")
        async with joined(through, tmp_path / "node") as (node, _):
            await eventually(lambda: node.session_token)
            first = node.session_token
            front.reset()
            await eventually(lambda: node.session_token != first)


async def test_a_node_with_an_older_link_finds_out_that_certificates_are_asked_for(
    grid: Orchestrator, tmp_path: Path
) -> None:
    link = replace(joinlink.parse(grid.join_link), certificates=False)
    async with joined(link, tmp_path / "node") as (node, certificate):
        await eventually(lambda: node.session_token)
        assert await certificate.shown() is not None


async def test_a_grid_that_asks_no_more_is_joined_without_one(tmp_path: Path) -> None:
    running = Orchestrator(settings(tmp_path / "grid"))
    await running.start()
    try:
        link = joinlink.parse(running.join_link)
        assert not link.certificates
        async with joined(replace(link, certificates=True), tmp_path / "node") as (node, held):
            await eventually(lambda: node.session_token)
            assert await held.shown() is None
    finally:
        await running.stop()


async def test_the_grid_s_own_ca_signs_for_nodes_beside_a_public_certificate(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    paths = publicly_trusted(tmp_path)
    monkeypatch.setenv("SSL_CERT_FILE", str(tmp_path / "roots"))
    running = asking(tmp_path / "grid", **paths)
    await running.start()
    try:
        link = joinlink.parse(running.join_link)
        assert (link.ca, link.certificates, running.ca_pem) == ("public", True, "")
        public = minted(
            certificates.ensure_authority(tmp_path / "public", certificates.utc(time.time())),
            "x",
            time.time(),
        )
        assert await first_word(link, tmp_path / "node", public) == ""
        async with joined(link, tmp_path / "node") as (node, _):
            await eventually(lambda: node.session_token)
    finally:
        await running.stop()


@pytest.mark.parametrize("changes", [{"insecure": True}, {"public_tls": True, "tls": False}])
async def test_where_tls_ends_elsewhere_no_certificates_can_be_asked_for(
    tmp_path: Path, changes: dict[str, Any]
) -> None:
    wrong = {"tls": False, **changes}
    with pytest.raises(UsageError) as caught:
        await asking(tmp_path, **wrong).start()
    assert caught.value.field == "orchestrator.client_certificates"


async def test_asking_for_certificates_is_asking_for_tls(tmp_path: Path) -> None:
    running = asking(tmp_path, tls=False)
    await running.start()
    await running.stop()
    assert running.url.startswith("https://")
