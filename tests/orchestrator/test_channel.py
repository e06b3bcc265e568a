"""TLS over real sockets: a real orchestrator, real gRPC and HTTP, and who must not get through."""

from __future__ import annotations

import asyncio
import hashlib
import random
import socket
import ssl
import threading
import time
from collections.abc import AsyncIterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import httpx
import pytest
import uvicorn
from grpc import aio, ssl_server_credentials

from distribai import tls
from distribai.client import Client
from distribai.core.devices import Device
from distribai.core.spec import BlobRef
from distribai.core.states import Intent
from distribai.errors import Conflict, DistribAIError, Integrity, Unavailable
from distribai.node.blobs import BlobClient
from distribai.node.clock import SystemClock
from distribai.node.identity import load_or_create
from distribai.node.link import Hello, Link
from distribai.node.transport import ConnectionLost, GrpcTransport
from distribai.node.trust import CA_FILE, Trust
from distribai.orchestrator import certificates
from distribai.orchestrator.certificates import ServerTls
from distribai.orchestrator.fleet import passes, supplies
from distribai.orchestrator.fleet.liveness import flush
from distribai.orchestrator.main import Orchestrator
from distribai.sections import OrchestratorSettings
from distribai.wire import joinlink
from distribai.wire.joinlink import JoinLink
from distribai.wire.v1 import distribai_pb2 as pb
from tests.node.helpers import BlobServer, eventually, serving


def settings(directory: Path, **changes: Any) -> OrchestratorSettings:
    values: dict[str, Any] = {"state_dir": directory, "grpc_port": 0, "http_port": 0, "tls": True}
    return OrchestratorSettings(**{**values, **changes})


@pytest.fixture
async def grid(tmp_path: Path) -> AsyncIterator[Orchestrator]:
    running = Orchestrator(settings(tmp_path / "grid"))
    await running.start()
    yield running
    await running.stop()


class Daemon:
    """The least that a link needs of a daemon."""

    def hello(self) -> Hello:
        return Hello("n", "test", [Device(0, "cpu", "test", 0, 1)], [], [], Intent.CONTRIBUTE)

    def heartbeat(self) -> pb.Heartbeat:
        return pb.Heartbeat(intent="contribute")

    def registered(self, ack: pb.RegisterAck) -> None: ...

    def received(self, message: pb.OrchestratorMessage) -> None: ...
    def unreachable(self, why: str, hint: str) -> None: ...


async def first_word(link: JoinLink, directory: Path) -> str:
    """What a node hears first from the address of a link."""
    connection = await GrpcTransport(link.grpc, Trust(link, directory)).connect()
    try:
        message = await connection.read()
        assert message is not None
        return str(message.WhichOneof("body"))
    finally:
        await connection.close()


def blob_client(link: JoinLink, directory: Path, token: str, **how: Any) -> BlobClient:
    return BlobClient(
        link.http_url,
        lambda: token,
        SystemClock(),
        random.Random(1),
        attempts=1,
        trust_env=False,
        verify=Trust(link, directory).context,
        **how,
    )


async def test_a_node_joins_works_and_gets_a_new_token_over_tls_alone(
    grid: Orchestrator, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def anything(*_: object) -> bool:
        return True  # what it may fetch is tried in test_supplies.py

    monkeypatch.setattr(supplies, "may_fetch", anything)
    link_text = joinlink.parse(grid.join_link)
    assert link_text.ca == tls.fingerprint(grid.ca_pem)
    assert grid.url.startswith("https://")
    node = tmp_path / "node"
    trust = Trust(link_text, node)
    link = Link(
        link_text,
        GrpcTransport(link_text.grpc, trust),
        load_or_create(node),
        Daemon(),
        SystemClock(),
        random.Random(1),
    )
    running = asyncio.ensure_future(link.run())
    blob = await grid.grid.blobs.put_bytes(b"weights")
    blobs = BlobClient(
        link_text.http_url,
        lambda: link.session_token,
        SystemClock(),
        random.Random(1),
        attempts=1,
        verify=trust.context,
    )
    try:
        await eventually(lambda: link.session_token)
        first = link.session_token
        assert passes.looks_like(first)
        await blobs.download(blob, tmp_path / "one", "job_a")
        session = grid.grid.fleet.of(link.node_id)
        assert session is not None
        session.token_until = 0.0  # as if its time had passed
        session.heard = True
        await flush(grid.grid)
        await eventually(lambda: link.session_token != first)
        await blobs.download(blob, tmp_path / "two", "job_a")
        assert (tmp_path / "two").read_bytes() == b"weights"
        assert grid.grid.fleet.of(link.node_id) is session, "the session went on"
        assert tls.fingerprint((node / CA_FILE).read_text()) == link_text.ca
    finally:
        running.cancel()
        await asyncio.wait({running})
        await blobs.close()


async def test_a_client_that_knows_the_ca_gets_through_by_any_name_of_the_address(
    grid: Orchestrator,
) -> None:
    port = grid.http_address.rpartition(":")[2]

    def ask(url: str, ca: str) -> str:
        with Client(url, grid.operator_token, ca=ca) as client:
            return client.health().mode

    for host in ("127.0.0.1", "localhost"):
        assert await asyncio.to_thread(ask, f"https://{host}:{port}", grid.ca_pem) == "trusted"
    with pytest.raises(Unavailable):
        await asyncio.to_thread(ask, grid.url, "")
    with pytest.raises(DistribAIError) as caught:
        await asyncio.to_thread(ask, grid.url.replace("https", "http"), grid.ca_pem)
    assert caught.value.code == "config.invalid"
    with pytest.raises(Integrity):
        await asyncio.to_thread(ask, grid.url, "no certificate")


async def test_less_than_was_promised_is_refused_by_both_sides(
    grid: Orchestrator, tmp_path: Path
) -> None:
    host, _, port = grid.http_address.rpartition(":")
    old = tls.pinned_context(grid.ca_pem)
    old.minimum_version = ssl.TLSVersion.TLSv1_2
    old.maximum_version = ssl.TLSVersion.TLSv1_2

    def handshake() -> None:
        with socket.create_connection((host, int(port))) as raw, old.wrap_socket(raw):
            raise AssertionError("TLS 1.2 was spoken")

    with pytest.raises(ssl.SSLError):
        await asyncio.to_thread(handshake)
    async with httpx.AsyncClient(trust_env=False) as plain:
        with pytest.raises(httpx.TransportError):
            await plain.get(f"http://{grid.http_address}/healthz")
    link = joinlink.parse(grid.join_link)
    with pytest.raises(ConnectionLost):
        await first_word(replace(link, ca=""), tmp_path / "a")
    bare = Orchestrator(settings(tmp_path / "bare", tls=False))
    await bare.start()
    try:
        stripped = joinlink.parse(bare.join_link)
        assert stripped.ca == ""
        assert await first_word(stripped, tmp_path / "b") == "challenge", "plain links still work"
        (tmp_path / "c").mkdir()
        (tmp_path / "c" / CA_FILE).write_text(grid.ca_pem)
        with pytest.raises(ConnectionLost):
            await first_word(replace(stripped, ca=link.ca), tmp_path / "c")
        with pytest.raises(ConnectionLost):
            await first_word(replace(stripped, ca=link.ca), tmp_path / "d")
    finally:
        await bare.stop()


# ------------------------------------------------------------------ impostors


class Impostor:
    """HTTPS and gRPC servers with certificates of the test's choice, which note what they are
    told."""

    def __init__(self, made: ServerTls, ca_pem: str, directory: Path) -> None:
        self.requests: list[tuple[str, dict[str, str]]] = []
        self.calls = 0
        self.send_on_to = ""
        self._made, self._ca = made, ca_pem
        directory.mkdir(exist_ok=True)
        context = certificates.http_context(made, directory)
        listener = socket.create_server(("127.0.0.1", 0))
        self._listener = listener
        config = uvicorn.Config(self, log_config=None, lifespan="off", access_log=False)
        config.ssl_context_factory = lambda *_: context
        self._http = uvicorn.Server(config)
        self._thread = threading.Thread(
            target=lambda: asyncio.run(self._http.serve(sockets=[listener]))
        )
        self.http = f"127.0.0.1:{listener.getsockname()[1]}"

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        headers = {k.decode(): v.decode() for k, v in scope["headers"]}
        self.requests.append((scope["path"], headers))
        found = scope["path"] == tls.CA_PATH
        body = self._ca.encode() if found else b""
        status = 200 if found else 404
        to: list[tuple[bytes, bytes]] = []
        if self.send_on_to and not found:
            status, to = 307, [(b"location", f"{self.send_on_to}{scope['path']}".encode())]
        await send({"type": "http.response.start", "status": status, "headers": to})
        await send({"type": "http.response.body", "body": body})

    async def __aenter__(self) -> Impostor:
        self._thread.start()
        impostor = self

        class Count(aio.ServerInterceptor):
            async def intercept_service(self, continuation: Any, details: Any) -> Any:
                impostor.calls += 1
                return await continuation(details)

        self._server = aio.server(interceptors=[Count()])
        credentials = ssl_server_credentials([(self._made.key_pem, self._made.chain_pem)])
        port = self._server.add_secure_port("127.0.0.1:0", credentials)
        self.grpc = f"127.0.0.1:{port}"
        await self._server.start()
        return self

    async def __aexit__(self, *_: object) -> None:
        self._http.should_exit = True
        await asyncio.to_thread(self._thread.join)
        self._listener.close()
        await self._server.stop(None)

    def link(self, ca: str) -> JoinLink:
        return JoinLink("h", self.grpc, self.http, "grid_test", "secret-invite", ca)


@pytest.fixture
def authority(tmp_path: Path) -> certificates.Authority:
    return certificates.ensure_authority(tmp_path / "good", certificates.utc(time.time()))


def made(directory: Path, at: float) -> ServerTls:
    """A certificate of the CA in ``directory``, made ``at`` that moment."""
    when = certificates.utc(at)
    return certificates.server_certificate(
        certificates.ensure_authority(directory, when), ["127.0.0.1"], when
    )


async def test_another_ca_than_the_link_s_is_refused_before_anything_secret_is_said(
    authority: certificates.Authority, tmp_path: Path
) -> None:
    wrong = made(tmp_path / "bad", time.time())
    pin = tls.fingerprint(authority.cert_pem)
    async with Impostor(wrong, wrong.ca_pem, tmp_path / "i") as impostor:
        with pytest.raises(Integrity) as caught:
            await first_word(impostor.link(pin), tmp_path / "node")
        assert caught.value.code == "grid.ca"
        assert not (tmp_path / "node" / CA_FILE).exists()
        assert [path for path, _ in impostor.requests] == [tls.CA_PATH]
        assert "secret-invite" not in repr(impostor.requests)
        assert "authorization" not in impostor.requests[0][1]
        assert impostor.calls == 0


async def test_a_node_ends_with_the_reason_when_the_grid_is_another_one(
    authority: certificates.Authority, tmp_path: Path
) -> None:
    wrong = made(tmp_path / "bad", time.time())
    async with Impostor(wrong, wrong.ca_pem, tmp_path / "i") as impostor:
        join = impostor.link(tls.fingerprint(authority.cert_pem))
        node = tmp_path / "node"
        transport = GrpcTransport(join.grpc, Trust(join, node))
        identity = load_or_create(node)
        link = Link(join, transport, identity, Daemon(), SystemClock(), random.Random(1))
        with pytest.raises(Integrity, match="was promised"):
            await link.run()


@pytest.mark.parametrize("which", ["foreign", "expired"])
async def test_a_server_with_a_foreign_or_ended_certificate_gets_neither_stream_nor_token(
    authority: certificates.Authority, tmp_path: Path, which: str
) -> None:
    """It can show the right CA: that is public. Its own certificate is what it lacks."""
    long_ago = time.time() - (certificates.LEAF_DAYS + 1) * 86400
    shown = (
        made(tmp_path / "bad", time.time())
        if which == "foreign"
        else made(tmp_path / "good", long_ago)
    )
    pin = tls.fingerprint(authority.cert_pem)
    async with Impostor(shown, authority.cert_pem, tmp_path / "i") as impostor:
        link = impostor.link(pin)
        with pytest.raises(ConnectionLost) as caught:
            await first_word(link, tmp_path / "node")
        said = "has not the certificate" if which == "foreign" else "has expired"
        assert said in str(caught.value)
        blobs = blob_client(link, tmp_path / "node", "token-secret")
        blob = BlobRef(hashlib.sha256(b"x").hexdigest(), 1)
        with pytest.raises(Unavailable):
            await blobs.download(blob, tmp_path / "x", "job_a")
        await blobs.close()
        assert [path for path, _ in impostor.requests] == [tls.CA_PATH]
        assert "token-secret" not in repr(impostor.requests)
        assert impostor.calls == 0


async def test_a_download_goes_on_at_an_object_store_without_the_token(
    authority: certificates.Authority, tmp_path: Path
) -> None:
    good = made(tmp_path / "good", time.time())
    async with (
        Impostor(good, good.ca_pem, tmp_path / "i") as front,
        serving(BlobServer()) as store,
    ):
        blob = store.put(b"weights")
        front.send_on_to = store.url
        link = front.link(tls.fingerprint(authority.cert_pem))
        blobs = blob_client(link, tmp_path / "node", "token-secret")
        await blobs.download(blob, tmp_path / "x", "job_a")
        await blobs.close()
        assert (tmp_path / "x").read_bytes() == b"weights"
        assert front.requests[-1][1]["authorization"] == "Bearer token-secret"
        assert "token-secret" not in repr(store.requests)


async def test_a_ca_that_was_kept_and_got_damaged_is_fetched_anew(
    grid: Orchestrator, tmp_path: Path
) -> None:
    link = joinlink.parse(grid.join_link)
    (tmp_path / "node").mkdir()
    (tmp_path / "node" / CA_FILE).write_text("torn")
    assert await first_word(link, tmp_path / "node") == "challenge"
    assert (tmp_path / "node" / CA_FILE).read_text() == grid.ca_pem


def publicly_trusted(place: Path) -> dict[str, str]:
    """Settings of an orchestrator whose certificate the roots in ``place / "roots"`` vouch for: the
    test's own authority plays the public one."""
    own = made(place / "public", time.time())
    for name, text in (("chain", own.chain_pem), ("key", own.key_pem)):
        (place / name).write_bytes(text)
    (place / "roots").write_text(own.ca_pem)
    return {"tls_cert": str(place / "chain"), "tls_key": str(place / "key")}


async def test_a_publicly_trusted_certificate_needs_no_pin(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    paths = publicly_trusted(tmp_path)
    running = Orchestrator(settings(tmp_path / "grid", tls=False, **paths))
    await running.start()
    try:
        link = joinlink.parse(running.join_link)
        assert (link.ca, running.ca_pem) == ("public", "")
        with pytest.raises(ConnectionLost):
            await first_word(link, tmp_path / "node")
        monkeypatch.setenv("SSL_CERT_FILE", str(tmp_path / "roots"))
        assert await first_word(link, tmp_path / "node") == "challenge"
        async with httpx.AsyncClient() as client:
            assert (await client.get(f"{running.url}/healthz")).status_code == 200
            assert (await client.get(f"{running.url}{tls.CA_PATH}")).status_code == 404
    finally:
        await running.stop()


# ------------------------------------------------------------------ starts


async def test_restarts_keep_the_ca_and_a_new_one_needs_a_word(tmp_path: Path) -> None:
    links = []
    for new_ca in (False, False, True, False):
        running = Orchestrator(settings(tmp_path), new_ca=new_ca)
        await running.start()
        links.append(joinlink.parse(running.join_link).ca)
        await running.stop()
    assert links[0] == links[1]
    assert links[1] != links[2] == links[3]
    for name in (certificates.CA_KEY, certificates.CA_CERT):
        (tmp_path / name).unlink()
    with pytest.raises(Conflict) as caught:
        await Orchestrator(settings(tmp_path)).start()
    assert caught.value.code == "grid.keys"
    assert "--new-ca" in caught.value.hint


async def test_listening_beyond_this_machine_is_with_tls_unless_a_word_says_otherwise(
    tmp_path: Path,
) -> None:
    for changes, scheme in (
        ({"tls": False, "host": "0.0.0.0"}, "https"),
        ({"tls": False, "host": "0.0.0.0", "insecure": True}, "http"),
    ):
        running = Orchestrator(settings(tmp_path, **changes))
        await running.start()
        try:
            link = joinlink.parse(running.join_link)
            assert link.http_url.startswith(f"{scheme}://")
            assert running.url == f"{scheme}://127.0.0.1:{running.http_address.rpartition(':')[2]}"
        finally:
            await running.stop()


async def test_the_link_names_the_addresses_at_which_others_reach_the_grid(tmp_path: Path) -> None:
    public = {"public_grpc": "grid.example:443", "public_http": "api.grid.example:443"}
    running = Orchestrator(settings(tmp_path, tls=False, public_tls=True, **public))
    await running.start()
    link = joinlink.parse(running.join_link)
    await running.stop()
    assert (link.grpc, link.http, link.ca) == ("grid.example:443", "api.grid.example:443", "public")
    assert link.host == "api.grid.example"


async def test_an_open_grid_says_so_and_stays_it(tmp_path: Path) -> None:
    from distribai.orchestrator.fleet.queries import summary

    modes = []
    for mode in ("", "open", "", "trusted"):
        running = Orchestrator(settings(tmp_path, tls=False, mode=mode))
        await running.start()
        modes.append((await summary(running.grid)).mode)
        await running.stop()
    assert modes == ["trusted", "open", "open", "trusted"]
