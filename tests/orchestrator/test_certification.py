"""Who gets a certificate, and whose certificate is good for whom: without sockets."""

from __future__ import annotations

import base64
from datetime import UTC, datetime, timedelta

import pytest
from cryptography import x509
from cryptography.hazmat.primitives import hashes
from cryptography.hazmat.primitives.asymmetric import ec, rsa
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
from cryptography.hazmat.primitives.serialization import Encoding
from cryptography.x509.oid import ExtendedKeyUsageOID, NameOID
from hypothesis import given
from hypothesis import settings as how_often
from hypothesis import strategies as st

from distribai.core.ids import node_id
from distribai.errors import DistribAIError, NotAllowed
from distribai.orchestrator import callers, certificates
from distribai.orchestrator.certificates import Authority, check_shown, node_certificate
from distribai.orchestrator.fleet import certification, passes, standing
from distribai.orchestrator.fleet.certification import Wanted
from distribai.store.statements import invites
from distribai.wire.signing import sign_certify
from tests.orchestrator.harness import FakeNode, World, breathe

NOW = datetime(2026, 5, 1, tzinfo=UTC)
NODE = "node_" + "a" * 32
DAY_S = 86400.0


def requested(
    key: ec.EllipticCurvePrivateKey | rsa.RSAPrivateKey | None = None, name: str = "anybody"
) -> str:
    """A request in PEM."""
    subject = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, name)])
    signer = key or ec.generate_private_key(ec.SECP256R1())
    made = x509.CertificateSigningRequestBuilder().subject_name(subject)
    return made.sign(signer, hashes.SHA256()).public_bytes(Encoding.PEM).decode()


@pytest.fixture(scope="module")
def authority(tmp_path_factory: pytest.TempPathFactory) -> Authority:
    return certificates.ensure_authority(tmp_path_factory.mktemp("ca"), NOW)


@pytest.fixture(scope="module")
def foreign(tmp_path_factory: pytest.TempPathFactory) -> Authority:
    return certificates.ensure_authority(tmp_path_factory.mktemp("other"), NOW)


def shown(authority: Authority, name: str = NODE, at: datetime = NOW) -> bytes:
    """A node's certificate in PEM."""
    return node_certificate(authority, name, requested(), at, DAY_S).public_bytes(Encoding.PEM)


# ------------------------------------------------------------------ the certificate


def test_a_node_s_certificate_is_for_its_id_and_for_clients_alone(authority: Authority) -> None:
    key = ec.generate_private_key(ec.SECP256R1())
    made = node_certificate(authority, NODE, requested(key, "grid.distribai"), NOW, DAY_S)
    assert made.subject.rfc4514_string() == f"CN={NODE}", "what the request says is not believed"
    assert made.public_key() == key.public_key()
    assert made.not_valid_before_utc == NOW - certificates.NODE_SKEW
    assert made.not_valid_after_utc == NOW + timedelta(seconds=DAY_S)
    found = made.extensions
    assert list(found.get_extension_for_class(x509.ExtendedKeyUsage).value) == [
        ExtendedKeyUsageOID.CLIENT_AUTH
    ]
    assert not found.get_extension_for_class(x509.BasicConstraints).value.ca
    with pytest.raises(x509.ExtensionNotFound):
        found.get_extension_for_class(x509.SubjectAlternativeName)


@pytest.mark.parametrize(
    ("request_", "why"),
    [
        ("", "PKCS #10"),
        ("no request", "PKCS #10"),
        ("-----BEGIN CERTIFICATE REQUEST-----\nAAAA\n-----END CERTIFICATE REQUEST-----\n", "PKCS"),
        (requested(ec.generate_private_key(ec.SECP384R1())), "P-256"),
        (requested(rsa.generate_private_key(65537, 2048)), "P-256"),
        ("x" * (certificates.MAX_REQUEST + 1), "longer"),
    ],
    ids=["nothing", "words", "garbage", "P-384", "RSA", "long"],
)
def test_what_is_no_request_for_a_p_256_key_is_refused(
    authority: Authority, request_: str, why: str
) -> None:
    with pytest.raises(NotAllowed, match=why) as caught:
        node_certificate(authority, NODE, request_, NOW, DAY_S)
    assert caught.value.code == "node.certificate"


def test_a_request_that_its_key_has_not_signed_is_refused(authority: Authority) -> None:
    der = bytearray(x509.load_pem_x509_csr(requested().encode()).public_bytes(Encoding.DER))
    der[der.index(b"anybody")] ^= 1
    spoilt = x509.load_der_x509_csr(bytes(der)).public_bytes(Encoding.PEM).decode()
    with pytest.raises(NotAllowed, match="has not signed"):
        node_certificate(authority, NODE, spoilt, NOW, DAY_S)


GOOD_REQUEST = requested()


@how_often(max_examples=100, deadline=None)
@given(st.integers(0, 10_000), st.binary(max_size=4), st.integers(0, 4))
def test_no_spoilt_request_is_more_than_refused(
    authority: Authority, at: int, junk: bytes, cut: int
) -> None:
    good = x509.load_pem_x509_csr(GOOD_REQUEST.encode())
    der = good.public_bytes(Encoding.DER)
    spot = at % len(der)
    spoilt = base64.encodebytes(der[:spot] + junk + der[spot + cut :]).decode()
    label = "CERTIFICATE REQUEST"
    try:
        made = node_certificate(
            authority, NODE, f"-----BEGIN {label}-----\n{spoilt}-----END {label}-----\n", NOW, DAY_S
        )
    except NotAllowed as problem:
        said = problem.code
    else:
        said = "node.certificate" if made.public_key() == good.public_key() else "another key"
    assert said == "node.certificate"


@how_often(max_examples=100, deadline=None)
@given(st.binary(max_size=300), st.integers(0, 10_000))
def test_no_bytes_shown_are_more_than_refused(
    authority: Authority, foreign: Authority, junk: bytes, at: int
) -> None:
    good = shown(authority)
    spoilt = good[: at % len(good)] + junk + good[at % len(good) :]
    for pem in (junk, spoilt, b"", shown(foreign)):
        if refused(authority, pem):
            continue
        # Junk before, after or within a line may leave the certificate what it is.
        assert x509.load_pem_x509_certificate(pem) == x509.load_pem_x509_certificate(good)


def refused(authority: Authority, pem: bytes) -> bool:
    try:
        check_shown(authority, pem, NODE, NOW)
    except NotAllowed as problem:
        return problem.code == "node.certificate"
    return False


def test_a_certificate_is_good_for_its_node_and_its_time(
    authority: Authority, foreign: Authority
) -> None:
    pem = shown(authority)
    check_shown(authority, pem, NODE, NOW)
    check_shown(authority, pem, NODE, NOW - certificates.NODE_SKEW)
    end = NOW + timedelta(seconds=DAY_S)
    server = certificates.server_certificate(authority, ["127.0.0.1"], NOW)
    for what, node, at in (
        (pem, "node_" + "b" * 32, NOW),
        (pem, NODE, end),
        (pem, NODE, NOW - certificates.NODE_SKEW - timedelta(seconds=1)),
        (shown(foreign), NODE, NOW),
        (server.chain_pem, NODE, NOW),
        (authority.cert_pem.encode(), NODE, NOW),
        (b"", NODE, NOW),
    ):
        with pytest.raises(NotAllowed) as caught:
            check_shown(authority, what, node, at)
        assert caught.value.code == "node.certificate"


# ------------------------------------------------------------------ who gets one


def asking(world: World) -> Authority:
    """Let a grid ask its nodes for certificates."""
    when = certificates.utc(world.time.now)
    made = certificates.ensure_authority(world.root / "keys", when)
    world.grid.authority = made
    return made


async def wanted(world: World, key: Ed25519PrivateKey, **changes: object) -> Wanted:
    """What a node with this key sends; ``changes`` spoil it after it was signed."""
    challenge = await certification.challenge(world.grid)
    request = requested()
    values: dict[str, object] = {
        "public_key": key.public_key().public_bytes_raw(),
        "challenge": challenge,
        "request": request,
        "signature": sign_certify(key, world.grid.grid_id, challenge, request),
        "invite": world.invite,
    }
    return Wanted(**{**values, **changes})  # type: ignore[arg-type]


async def code(world: World, what: Wanted) -> str:
    """Why there is no certificate; empty when there is one."""
    try:
        await certification.certify(world.grid, what)
    except DistribAIError as problem:
        return problem.code
    return ""


async def test_a_grid_that_asks_for_none_gives_none(world: World) -> None:
    for call in (
        certification.challenge(world.grid),
        certification.certify(world.grid, Wanted(bytes(32), "", "", bytes(64))),
    ):
        with pytest.raises(DistribAIError) as caught:
            await call
        assert caught.value.code == "grid.missing"


async def test_who_may_join_gets_one_and_nobody_else(any_world: World) -> None:
    authority = asking(any_world)
    stranger = Ed25519PrivateKey.generate()
    assert await code(any_world, await wanted(any_world, stranger, invite="")) == "node.invite"
    assert await code(any_world, await wanted(any_world, stranger, invite="x")) == "node.invite"
    made = await certification.certify(any_world.grid, await wanted(any_world, stranger))
    assert made.lifetime_s == any_world.grid.settings.certificate_s
    name = node_id(stranger.public_key().public_bytes_raw())
    now = certificates.utc(any_world.time.now)
    check_shown(authority, made.certificate.encode(), name, now)


async def test_an_invite_is_looked_at_and_used_up_by_registering_alone(world: World) -> None:
    asking(world)
    secret = "once-only-invite"
    async with world.grid.db.write() as tx:
        await invites.add_invite(tx, "inv_once", certification.hash_secret(secret), uses_left=1)
    key = Ed25519PrivateKey.generate()
    for _ in range(2):
        assert await code(world, await wanted(world, key, invite=secret)) == ""
    async with world.grid.db.write() as tx:
        assert await invites.use_invite(tx, certification.hash_secret(secret)) is not None
    assert await code(world, await wanted(world, key, invite=secret)) == "node.invite"


async def test_a_known_node_needs_no_invite_a_banned_one_gets_nothing(world: World) -> None:
    node = await world.node("a")
    asking(world)
    assert await code(world, await wanted(world, node.key, invite="")) == ""
    await standing.set_standing(world.grid, node.id, "quarantine", "it lies", "operator")
    await breathe()
    assert await code(world, await wanted(world, node.key, invite="")) == "", "its stream says why"
    await standing.set_standing(world.grid, node.id, "ban", "it lies", "operator")
    assert await code(world, await wanted(world, node.key)) == "node.banned"


async def test_a_certificate_is_for_the_key_that_signed_here_and_now(world: World) -> None:
    token = (await world.node("b")).token
    asking(world)
    key, other = Ed25519PrivateKey.generate(), Ed25519PrivateKey.generate()
    good = await wanted(world, key)
    elsewhere = sign_certify(key, "grid_other", good.challenge, good.request)
    public = other.public_key().public_bytes_raw()
    for changes in (
        {"public_key": public},
        {"public_key": bytes(32)},
        {"public_key": b"short"},
        {"signature": bytes(64)},
        {"signature": elsewhere},
        {"request": requested()},
    ):
        assert await code(world, await wanted(world, key, **changes)) == "node.key", changes
    for challenge in ("", "x", "a.b.c", token, good.challenge[:-2], "x" * 3000):
        signature = sign_certify(key, world.grid.grid_id, challenge, good.request)
        spoilt = await wanted(
            world, key, challenge=challenge, request=good.request, signature=signature
        )
        assert await code(world, spoilt) == "auth.invalid", challenge[:20]
    assert await code(world, good) == ""
    world.time.now += passes.CHALLENGE_S
    assert await code(world, good) == "auth.invalid", "an old challenge"


async def test_a_challenge_opens_no_blobs(world: World) -> None:
    asking(world)
    with pytest.raises(DistribAIError) as caught:
        await callers.verify_token(world.grid, await certification.challenge(world.grid))
    assert caught.value.code == "auth.invalid"


async def test_another_replica_takes_the_answer_to_a_challenge(any_world: World) -> None:
    """All that it needs lies in the database, and the CA is the same."""
    authority = asking(any_world)
    key = Ed25519PrivateKey.generate()
    answer = await wanted(any_world, key)
    second = await World(any_world.root, any_world.url, any_world.time, seed=7).open()
    try:
        second.grid.authority = authority
        assert await code(second, answer) == ""
    finally:
        await second.close()


# ------------------------------------------------------------------ the stream


async def test_a_stream_is_taken_with_its_node_s_good_certificate_alone(world: World) -> None:
    authority = asking(world)
    now = certificates.utc(world.time.now)
    node, other = FakeNode(world, "a"), FakeNode(world, "b")

    async def end(pem: bytes) -> str:
        node.shown = pem
        await node.connect()
        await node.vanish()
        assert node.end is None or node.end.retry
        return "" if node.end is None else str(node.end.code)

    for pem in (
        b"",
        shown(authority, other.id, now),
        shown(authority, node.id, now - timedelta(days=2)),
        shown(authority, node.id, now + timedelta(days=2)),
    ):
        assert await end(pem) == "node.certificate"
    assert world.grid.fleet.of(node.id) is None
    assert await end(shown(authority, node.id, now)) == ""
    await standing.set_standing(world.grid, node.id, "ban", "it lies", "operator")
    node.shown = shown(authority, node.id, now)
    await node.connect()
    assert node.end is not None
    assert (node.end.code, node.end.retry) == ("node.banned", False)


async def test_where_none_are_asked_for_none_is_looked_at(world: World) -> None:
    node = FakeNode(world, "a")
    node.shown = b"anything"
    await node.connect()
    assert node.end is None
    await node.vanish()
