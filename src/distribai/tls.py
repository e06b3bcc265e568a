"""The client's half of the grid's TLS: one certificate authority, pinned, and no other.

A grid is reached at addresses that nobody certifies: a home network's, a port that is forwarded, a
name that changes. So its servers' certificates bear one fixed name, :data:`GRID_NAME`, signed by
the grid's own CA, and whoever connects trusts that CA alone. Which CA it is, says its SHA-256 in
the join link: the certificate itself is fetched over a connection that proves nothing, and refused
unless it has that hash. Nothing secret is sent before.
"""

from __future__ import annotations

import hashlib
import ssl
from typing import Any

from distribai.errors import Integrity, Unavailable

GRID_NAME = "grid.distribai"
"""The name in every grid's server certificates; no public authority signs it."""

PUBLIC = "public"
"""In place of a CA's hash: the authorities that the system trusts vouch for the host's own name."""

CA_PATH = "/api/v1/ca"
"""Where a grid's HTTP interface gives its CA certificate to anybody."""

CERTIFICATES_PATH = "/api/v1/certificates"
"""Where a grid that asks its nodes for certificates signs them; below it, ``/challenge``."""

MAX_CA_BYTES = 64 << 10
FETCH_S = 15.0


class PinnedContext(ssl.SSLContext):
    """TLS 1.3 that trusts one CA, and asks for :data:`GRID_NAME` whatever host is dialled.

    The name is put in below the HTTP library, so that it also holds through a proxy's tunnel.
    """

    def wrap_socket(self, *args: Any, **kwargs: Any) -> ssl.SSLSocket:
        """As :class:`ssl.SSLContext`, under the grid's name."""
        return super().wrap_socket(*args, **{**kwargs, "server_hostname": GRID_NAME})

    def wrap_bio(self, *args: Any, **kwargs: Any) -> ssl.SSLObject:
        """As :class:`ssl.SSLContext`, under the grid's name."""
        return super().wrap_bio(*args[:2], **{**kwargs, "server_hostname": GRID_NAME})


def pinned_context(ca_pem: str) -> ssl.SSLContext:
    """A context for one grid.

    Raises:
        Integrity: ``grid.ca``: not a certificate in PEM.
    """
    context = PinnedContext(ssl.PROTOCOL_TLS_CLIENT)
    context.minimum_version = ssl.TLSVersion.TLSv1_3
    try:
        context.load_verify_locations(cadata=ca_pem)
    except (ssl.SSLError, ValueError) as problem:
        raise _no_certificate() from problem
    return context


def fingerprint(ca_pem: str) -> str:
    """SHA-256 (hex) of a certificate's DER bytes.

    Raises:
        Integrity: ``grid.ca``: not a certificate in PEM.
    """
    try:
        return hashlib.sha256(ssl.PEM_cert_to_DER_cert(ca_pem.strip())).hexdigest()
    except ValueError as problem:
        raise _no_certificate() from problem


def check_pin(ca_pem: str, pin: str, where: str) -> str:
    """``ca_pem``, if it is the certificate with the hash ``pin``.

    Raises:
        Integrity: ``grid.ca``: it is another one, or none.
    """
    found = fingerprint(ca_pem)
    if found != pin:
        raise Integrity(
            "grid.ca",
            f"{where} has a certificate authority with the hash {found[:16]}..., and {pin[:16]}... "
            "was promised. Somebody may stand in between; nothing secret was sent.",
            "Ask the operator for a fresh join link, over a way that you trust.",
        )
    return ca_pem


def fetch_ca(url: str, pin: str, *, trust_env: bool = True) -> str:
    """The CA certificate (PEM) of the grid whose HTTP interface is at ``url``. It blocks, for up to
    some :data:`FETCH_S` seconds.

    Raises:
        Integrity: ``grid.ca``: what is there has another hash.
        Unavailable: ``grid.unreachable``: nobody answers, or not with a certificate.
    """
    import httpx  # here: most who import this module fetch nothing

    # Unverified on purpose: the hash of what comes is the proof, and nothing is sent.
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.check_hostname = False
    context.verify_mode = ssl.CERT_NONE
    context.minimum_version = ssl.TLSVersion.TLSv1_3
    body = bytearray()
    try:
        with (
            httpx.Client(verify=context, timeout=FETCH_S, trust_env=trust_env) as http,
            http.stream("GET", f"{url}{CA_PATH}") as answer,
        ):
            if answer.status_code != 200:
                raise _unreachable(url, f"it answered {answer.status_code}")
            for chunk in answer.iter_bytes():
                body += chunk
                if len(body) > MAX_CA_BYTES:
                    raise _unreachable(url, "what it sends is no certificate")
    except httpx.HTTPError as problem:
        raise _unreachable(url, str(problem) or type(problem).__name__) from problem
    return check_pin(body.decode("ascii", "replace"), pin, url)


def _unreachable(url: str, why: str) -> Unavailable:
    return Unavailable(
        "grid.unreachable",
        f"The grid's certificate authority cannot be fetched from {url}: {why}.",
        "Check the address, the network, and that the orchestrator runs with TLS.",
    )


def _no_certificate() -> Integrity:
    return Integrity(
        "grid.ca",
        "What should be the grid's certificate authority is no certificate in PEM.",
        "Take the file `ca-cert` of the orchestrator's state directory, or a fresh join link.",
    )
