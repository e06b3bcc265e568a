"""Where a grid is reached, and whether with TLS, as follows from the settings alone; and the
sockets it listens on."""

from __future__ import annotations

import os
import socket
from ipaddress import ip_address

from distribai.errors import Conflict, UsageError
from distribai.orchestrator.certificates import ServerTls
from distribai.sections import OrchestratorSettings
from distribai.tls import PUBLIC
from distribai.wire.joinlink import JoinLink, split_address


def has_tls(settings: OrchestratorSettings) -> bool:
    """Whether the servers speak TLS: by wish, with a certificate of one's own, because nodes must
    show theirs, or because they listen beyond this machine."""
    if settings.insecure:
        return False
    wanted = settings.tls or bool(settings.tls_cert) or settings.asks_for_certificates
    return wanted or not is_loopback(settings.host)


def check(settings: OrchestratorSettings) -> None:
    """Refuse what contradicts itself.

    Raises:
        UsageError: ``config.invalid``.
    """
    if settings.insecure and (settings.tls or settings.tls_cert):
        raise _bad("insecure", "insecure and tls (or tls_cert) contradict each other.")
    if bool(settings.tls_cert) != bool(settings.tls_key):
        raise _bad("tls_key", "tls_cert and tls_key go together.")
    if settings.asks_for_certificates and (settings.insecure or settings.public_tls):
        raise _bad(
            "client_certificates",
            "Nodes' certificates are checked where TLS ends, and with insecure or public_tls that "
            "is elsewhere.",
        )
    for name in ("public_grpc", "public_http"):
        if address := getattr(settings, name):
            try:
                split_address(address)
            except UsageError as problem:
                raise _bad(name, f"{name} is {address!r}, which is not host:port.") from problem


def _bad(name: str, why: str) -> UsageError:
    return UsageError(
        "config.invalid",
        why,
        "docs/how-to/secure.md has the ways to run a grid that others reach.",
        field=f"orchestrator.{name}",
    )


def hosts(settings: OrchestratorSettings) -> tuple[str, ...]:
    """Names and addresses that the grid's certificate bears beside its own name."""
    found = ["localhost", "127.0.0.1", "::1", public_host(settings.host)]
    public = (settings.public_grpc, settings.public_http)
    found.extend(split_address(address)[0] for address in public if address)
    return tuple(found)


def join_link(
    settings: OrchestratorSettings,
    grpc_port: int,
    http_port: int,
    tls: ServerTls | None,
    grid: str,
    invite: str,
) -> JoinLink:
    """What contributors paste."""
    host = public_host(settings.host)
    grpc = settings.public_grpc or join_address(host, grpc_port)
    http = settings.public_http or join_address(host, http_port)
    own = "" if tls is None else tls.ca
    ca = PUBLIC if settings.public_tls else own
    name = split_address(http)[0] if settings.public_http else host
    return JoinLink(bracketed(name), grpc, http, grid, invite, ca, settings.asks_for_certificates)


def own_url(settings: OrchestratorSettings, http_port: int, tls: ServerTls | None) -> str:
    """The HTTP interface as this machine reaches it. A certificate that everybody trusts bears the
    public name and no other."""
    if tls is not None and tls.ca == PUBLIC and settings.public_http:
        return f"https://{settings.public_http}"
    host = {"0.0.0.0": "127.0.0.1", "::": "::1", "": "127.0.0.1"}.get(settings.host, settings.host)
    return f"{'http' if tls is None else 'https'}://{join_address(host, http_port)}"


def is_loopback(host: str) -> bool:
    """Whether ``host`` is only this machine."""
    if host == "localhost":
        return True
    try:
        return ip_address(host).is_loopback
    except ValueError:
        return False


def public_host(host: str) -> str:
    """What others can reach a bind address by: a wildcard becomes this machine's own address."""
    try:
        wildcard = ip_address(host).is_unspecified
    except ValueError:
        wildcard = False
    if not wildcard:
        return host
    family, target = (
        (socket.AF_INET6, "2001:db8::1") if ":" in host else (socket.AF_INET, "192.0.2.1")
    )
    # Connecting a datagram socket sends nothing; it only picks the address that would be used.
    with socket.socket(family, socket.SOCK_DGRAM) as probe:
        try:
            probe.connect((target, 9))
        except OSError:
            return socket.gethostname()
        return str(probe.getsockname()[0])


def join_address(host: str, port: int) -> str:
    """``host:port``, an IPv6 host in brackets."""
    return f"{bracketed(host)}:{port}"


def bracketed(host: str) -> str:
    """A host as it stands in a URL."""
    return f"[{host}]" if ":" in host else host


def bound(host: str, port: int, flag: str) -> socket.socket:
    """A socket at that address, which nobody else listens on.

    Raises:
        Conflict: ``grid.port``.
    """
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    listener = socket.socket(family, socket.SOCK_STREAM)
    try:
        if os.name == "posix":  # elsewhere the option lets two processes share a port
            listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind((host, port))
    except OSError as problem:
        listener.close()
        raise port_in_use(host, port, flag) from problem
    return listener


def port_in_use(host: str, port: int, flag: str) -> Conflict:
    """The address is somebody else's."""
    return Conflict(
        "grid.port",
        f"{join_address(host, port)} cannot be listened on: the port is in use, or the address is "
        "not this machine's.",
        f"Stop what uses it, or take another port: {flag} (0 takes any free one).",
    )
