"""The grid's certificate authority, the certificates that its servers show, and those of nodes.

The CA is made once and is what every node and client pins (``distribai.tls``); its key signs
the certificates of servers and, where the grid asks for them, of nodes, and nothing else. Neither
kind passes for the other (extended key usage, and the name). ECDSA over P-256: what gRPC's TLS
accepts beside RSA (it refuses Ed25519). A server's certificate is made anew at every start, for
:data:`LEAF_DAYS`: there is none to renew, and its key is worth nothing after a restart.

::

    <keys>/ca-key         0600; only in the first directory of a grid, copied to each replica
    <keys>/ca-cert        what ``GET /api/v1/ca`` gives to anybody
    <state>/server-tls    0600; key, certificate and CA of this process
"""

from __future__ import annotations

import os
import ssl
import stat
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from ipaddress import ip_address
from pathlib import Path

import grpc
import structlog
from cryptography import x509
from cryptography.exceptions import InvalidSignature, UnsupportedAlgorithm
from cryptography.hazmat.primitives import hashes
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.hazmat.primitives.serialization import (
    Encoding,
    NoEncryption,
    PrivateFormat,
    load_pem_private_key,
)
from cryptography.x509.oid import ExtendedKeyUsageOID, NameOID

from distribai import durable
from distribai.errors import Conflict, NotAllowed, UsageError
from distribai.tls import GRID_NAME, PUBLIC, fingerprint

log = structlog.get_logger(__name__)

CURVE = ec.SECP256R1()

CA_CERT, CA_KEY, SERVER_TLS = "ca-cert", "ca-key", "server-tls"

CA_DAYS = 7300
"""Twenty years: to change it, every node needs a new join link."""

LEAF_DAYS = 730
"""A process that never restarts serves for two years."""

SKEW = timedelta(days=1)
"""How far behind a node's clock may be."""


NODE_SKEW = timedelta(minutes=10)
"""How far behind a replica's clock may be that is shown a node's certificate."""

MAX_REQUEST = 4096
"""Characters of a node's request for a certificate; one for P-256 has some 400."""


@dataclass(frozen=True, slots=True)
class Authority:
    """A grid's CA: certificate (PEM) and key."""

    cert_pem: str
    cert: x509.Certificate
    key: ec.EllipticCurvePrivateKey


@dataclass(frozen=True, slots=True)
class ServerTls:
    """What a server needs: private key and certificate chain (PEM); ``ca`` is what a join link
    says of it (a hash, or ``public``), ``ca_pem`` what can be fetched, empty for ``public``."""

    key_pem: bytes
    chain_pem: bytes
    ca: str
    ca_pem: str = ""


def ensure_authority(directory: Path, now: datetime) -> Authority:
    """The CA of a directory; made when there is none. A process that dies half-way leaves a key
    without a certificate, and the next one goes on from there.

    Raises:
        Conflict: ``grid.keys``: one of the files is missing or damaged, or the CA has ended.
        OSError: they cannot be read or written.
    """
    directory.mkdir(parents=True, exist_ok=True, mode=0o700)
    key_path, cert_path = directory / CA_KEY, directory / CA_CERT
    if not key_path.exists():
        if cert_path.exists():
            raise _unusable(key_path, "it is missing, though the certificate is there")
        durable.write(
            key_path, _pem_of(ec.generate_private_key(CURVE)), point="start.ca", mode=0o600
        )
    _close(key_path)
    try:
        key = load_pem_private_key(key_path.read_bytes(), password=None)
    except (ValueError, TypeError) as problem:
        raise _unusable(key_path, "it is no private key in PEM") from problem
    if not isinstance(key, ec.EllipticCurvePrivateKey):
        raise _unusable(key_path, "it is no elliptic-curve key")
    if not cert_path.exists():
        durable.write(cert_path, _self_signed(key, now), point="start.ca_cert")
    try:
        text = cert_path.read_text(encoding="ascii")
        cert = x509.load_pem_x509_certificate(text.encode())
    except ValueError as problem:
        raise _unusable(cert_path, "it is no certificate in PEM") from problem
    if cert.public_key() != key.public_key():
        raise _unusable(cert_path, "it belongs to another key")
    if cert.not_valid_after_utc < now:
        raise _unusable(cert_path, f"it ended on {cert.not_valid_after_utc:%Y-%m-%d}")
    return Authority(text, cert, key)


def set_aside(directory: Path) -> None:
    """Rename the CA of a directory, so that another one is made.

    Raises:
        OSError: the files cannot be renamed.
    """
    for name in (CA_CERT, CA_KEY):
        path = directory / name
        if path.exists():
            path.replace(path.with_name(f"{name}-old"))


def server_certificate(authority: Authority, hosts: Sequence[str], now: datetime) -> ServerTls:
    """A fresh key and certificate in the name :data:`~distribai.tls.GRID_NAME` and for ``hosts``
    (names and addresses, for clients that do not override the name)."""
    key = ec.generate_private_key(CURVE)
    names: list[x509.GeneralName] = [x509.DNSName(GRID_NAME)]
    names += [_general_name(host) for host in dict.fromkeys(hosts) if host != GRID_NAME]
    issuer = authority.key.public_key()
    leaf = (
        _certificate(
            GRID_NAME,
            authority.cert.subject,
            key.public_key(),
            now - SKEW,
            now + timedelta(days=LEAF_DAYS),
        )
        .add_extension(x509.BasicConstraints(ca=False, path_length=None), critical=True)
        .add_extension(x509.SubjectAlternativeName(names), critical=False)
        .add_extension(x509.ExtendedKeyUsage([ExtendedKeyUsageOID.SERVER_AUTH]), critical=False)
        .add_extension(_usage(digital_signature=True), critical=True)
        .add_extension(x509.AuthorityKeyIdentifier.from_issuer_public_key(issuer), critical=False)
        .sign(authority.key, hashes.SHA256())
    )
    chain = leaf.public_bytes(Encoding.PEM) + authority.cert_pem.encode()
    return ServerTls(_pem_of(key), chain, fingerprint(authority.cert_pem), authority.cert_pem)


def node_certificate(
    authority: Authority, node_id: str, request: str, now: datetime, lifetime_s: float
) -> x509.Certificate:
    """A certificate in the name of a node, for the key that a request (PKCS #10, in PEM) brings;
    what else the request asks for is not looked at. It begins :data:`NODE_SKEW` ago and ends after
    ``lifetime_s`` seconds.

    Raises:
        NotAllowed: ``node.certificate``: it is no such request, or not one for a P-256 key that
            has signed it.
    """
    public = _requested_key(request)
    issuer = authority.key.public_key()
    return (
        _certificate(
            node_id,
            authority.cert.subject,
            public,
            now - NODE_SKEW,
            now + timedelta(seconds=lifetime_s),
        )
        .add_extension(x509.BasicConstraints(ca=False, path_length=None), critical=True)
        .add_extension(x509.ExtendedKeyUsage([ExtendedKeyUsageOID.CLIENT_AUTH]), critical=True)
        .add_extension(_usage(digital_signature=True), critical=True)
        .add_extension(x509.AuthorityKeyIdentifier.from_issuer_public_key(issuer), critical=False)
        .sign(authority.key, hashes.SHA256())
    )


def check_shown(authority: Authority, shown: bytes, node_id: str, now: datetime) -> None:
    """Refuse a certificate (PEM; empty: none) that is not a good one of this node.

    TLS has checked all but the name. It is checked again because a TLS session that is resumed
    brings the certificate of its beginning, which nobody looks at anew.

    Raises:
        NotAllowed: ``node.certificate``.
    """
    try:
        cert = x509.load_pem_x509_certificate(shown)
        cert.verify_directly_issued_by(authority.cert)
    except (ValueError, TypeError, InvalidSignature, x509.InvalidVersion) as problem:
        raise _not_shown("is none of the grid's CA") from problem
    names = cert.subject.get_attributes_for_oid(NameOID.COMMON_NAME)
    if [name.value for name in names] != [node_id]:
        raise _not_shown("is not that of the node that wants to register")
    if not cert.not_valid_before_utc <= now < cert.not_valid_after_utc:
        raise _not_shown("has ended, or not begun")


def _not_shown(why: str) -> NotAllowed:
    return NotAllowed(
        "node.certificate",
        f"The certificate of this stream {why}.",
        "A node gets its own at the HTTP interface, with its own key: give each a state directory "
        "of its own, and see that it reaches that interface.",
    )


def _requested_key(request: str) -> ec.EllipticCurvePublicKey:
    if len(request) > MAX_REQUEST:
        raise _refused(f"it is longer than {MAX_REQUEST} characters")
    try:
        read = x509.load_pem_x509_csr(request.encode())
        public = read.public_key()
        # The curve first: a signature of a huge RSA key would take long to check.
        if not isinstance(public, ec.EllipticCurvePublicKey) or public.curve.name != CURVE.name:
            raise _refused("its key is not one of P-256")
        signed = read.is_signature_valid
    except (ValueError, UnsupportedAlgorithm, x509.InvalidVersion) as problem:
        raise _refused("it is no PKCS #10 in PEM") from problem
    if not signed:
        raise _refused("its key has not signed it")
    return public


def _refused(why: str) -> NotAllowed:
    return NotAllowed(
        "node.certificate",
        f"The request for a certificate is not accepted: {why}.",
        "Upgrade DistribAI on that machine: pip install -U distribai",
    )


def own_certificate(cert: Path, key: Path, now: datetime) -> ServerTls:
    """The operator's own certificate (a chain in PEM, the server's first) and key, which the
    authorities that nodes' systems trust vouch for.

    Raises:
        UsageError: ``config.invalid``: a file cannot be read, the two do not fit, or it has ended.
    """
    try:
        chain_pem, key_pem = cert.read_bytes(), key.read_bytes()
        ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER).load_cert_chain(cert, key)
        until = x509.load_pem_x509_certificate(chain_pem).not_valid_after_utc
    except (OSError, ValueError) as problem:  # ssl.SSLError is an OSError
        raise UsageError(
            "config.invalid",
            f"{cert} and {key} are not a certificate and its key: {problem}.",
            "Both are in PEM; the first holds the whole chain, the server's certificate first.",
            field="orchestrator.tls_cert",
        ) from problem
    if until < now:
        raise UsageError(
            "config.invalid",
            f"The certificate {cert} ended on {until:%Y-%m-%d}.",
            "Renew it; the orchestrator reads it when it starts.",
            field="orchestrator.tls_cert",
        )
    return ServerTls(key_pem, chain_pem, PUBLIC)


def grpc_credentials(tls: ServerTls, authority: Authority | None) -> grpc.ServerCredentials:
    """What the gRPC server shows, and, with an ``authority``, that clients must show a certificate
    of it: TLS refuses who has none, before any call."""
    pair = [(tls.key_pem, tls.chain_pem)]
    if authority is None:
        return grpc.ssl_server_credentials(pair)
    roots = authority.cert_pem.encode()
    return grpc.ssl_server_credentials(pair, root_certificates=roots, require_client_auth=True)


def http_context(tls: ServerTls, state_dir: Path) -> ssl.SSLContext:
    """TLS 1.3 for the HTTP server. Python reads keys from files alone, hence the one in
    ``state_dir``."""
    path = state_dir / SERVER_TLS
    durable.write(path, tls.key_pem + tls.chain_pem, point="start.tls", mode=0o600)
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.minimum_version = ssl.TLSVersion.TLSv1_3
    context.load_cert_chain(path)
    return context


def _self_signed(key: ec.EllipticCurvePrivateKey, now: datetime) -> bytes:
    name = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, "DistribAI grid CA")])
    made = (
        _certificate(
            "DistribAI grid CA", name, key.public_key(), now - SKEW, now + timedelta(days=CA_DAYS)
        )
        .add_extension(x509.BasicConstraints(ca=True, path_length=0), critical=True)
        .add_extension(_usage(key_cert_sign=True), critical=True)
        .sign(key, hashes.SHA256())
    )
    return made.public_bytes(Encoding.PEM)


def _certificate(
    name: str,
    issuer: x509.Name,
    public: ec.EllipticCurvePublicKey,
    begins: datetime,
    ends: datetime,
) -> x509.CertificateBuilder:
    return (
        x509.CertificateBuilder()
        .subject_name(x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, name)]))
        .issuer_name(issuer)
        .public_key(public)
        .serial_number(x509.random_serial_number())
        .not_valid_before(begins)
        .not_valid_after(ends)
        .add_extension(x509.SubjectKeyIdentifier.from_public_key(public), critical=False)
    )


def _usage(*, digital_signature: bool = False, key_cert_sign: bool = False) -> x509.KeyUsage:
    return x509.KeyUsage(
        digital_signature=digital_signature,
        key_cert_sign=key_cert_sign,
        crl_sign=key_cert_sign,
        content_commitment=False,
        key_encipherment=False,
        data_encipherment=False,
        key_agreement=False,
        encipher_only=False,
        decipher_only=False,
    )


def _general_name(host: str) -> x509.GeneralName:
    try:
        return x509.IPAddress(ip_address(host))
    except ValueError:
        return x509.DNSName(host)


def _pem_of(key: ec.EllipticCurvePrivateKey) -> bytes:
    return key.private_bytes(Encoding.PEM, PrivateFormat.PKCS8, NoEncryption())


def _close(path: Path) -> None:
    """Take others' rights on a key away; where that is not possible (a mounted secret), say so."""
    if os.name != "posix" or not stat.S_IMODE(path.stat().st_mode) & 0o077:
        return
    try:
        path.chmod(0o600)
        log.warning("the grid's CA key could be read by others; closed it", path=str(path))
    except OSError:
        log.warning("the grid's CA key can be read by others", path=str(path))


def _unusable(path: Path, why: str) -> Conflict:
    return Conflict(
        "grid.keys",
        f"{path} cannot be used: {why}.",
        "Bring it back from a backup, or copy it from another replica. If it is lost for good: "
        "`orchestrator start --new-ca`, and every node needs the new join link.",
    )


def utc(seconds: float) -> datetime:
    """Seconds since 1970 as a certificate's time."""
    return datetime.fromtimestamp(seconds, UTC)
