"""The join link: all that a contributor has to paste.

::

    distribai://HOST/?grpc=host:port&http=host:port&invite=TOKEN&grid=ID&ca=SHA256
                     &certificates=required

``HOST`` is for people; the addresses are in ``grpc`` and ``http``, which may differ in host and
port. ``grid`` is the grid's id, which the orchestrator's challenge must repeat. ``invite`` is
needed once, for a key that is new to the grid. ``ca`` says who vouches for the servers: the SHA-256
of the grid's CA certificate, or ``public`` for the authorities that the system trusts; a link
without it is for a grid without TLS. ``certificates=required`` says that the stream takes only who
shows a certificate of the grid's CA (``node.certificate``). A parameter that this program does not
know is refused: a link that names the grid's CA must never be read by a program that would ignore
it, and one that cannot show certificates says so instead of knocking for ever.
"""

from __future__ import annotations

import ipaddress
import re
from dataclasses import dataclass
from urllib.parse import parse_qsl, quote, urlencode, urlsplit

from distribai.errors import UsageError
from distribai.tls import PUBLIC

SCHEME = "distribai"
_NEEDED = ("grpc", "http", "grid")
_KNOWN = (*_NEEDED, "invite", "ca", "certificates")
_REQUIRED = "required"
_SHA256 = re.compile(r"[0-9a-f]{64}")
_HINT = "Copy the whole line that `distribai orchestrator start` printed, in quotes."


@dataclass(frozen=True, slots=True)
class JoinLink:
    """A parsed join link; ``grpc`` and ``http`` are ``host:port`` (IPv6 hosts in brackets)."""

    host: str
    grpc: str
    http: str
    grid: str
    invite: str = ""
    ca: str = ""
    certificates: bool = False

    @property
    def http_url(self) -> str:
        """Base URL of the HTTP interface, without a slash at the end."""
        return f"{'https' if self.ca else 'http'}://{self.http}"

    @property
    def loopback(self) -> bool:
        """Whether both addresses are this machine's own."""
        return is_loopback(self.grpc) and is_loopback(self.http)

    def __str__(self) -> str:
        query = {"grpc": self.grpc, "http": self.http}
        if self.invite:
            query["invite"] = self.invite
        query["grid"] = self.grid
        if self.ca:
            query["ca"] = self.ca
        if self.certificates:
            query["certificates"] = _REQUIRED
        return f"{SCHEME}://{self.host}/?{urlencode(query, safe=':[]', quote_via=quote)}"


def parse(text: str) -> JoinLink:
    """Read a join link.

    Raises:
        UsageError: ``node.link``, with what is wrong; a link's invite is never in the message.
    """
    try:
        parts = urlsplit(text.strip())
        pairs = parse_qsl(parts.query, keep_blank_values=True, strict_parsing=bool(parts.query))
        host = parts.netloc
    except ValueError as problem:
        raise _bad(f"it cannot be read ({problem})") from problem
    if parts.scheme != SCHEME:
        raise _bad(f"it must start with {SCHEME}://")
    if not host or parts.path not in ("", "/") or parts.fragment:
        raise _bad(f"it must look like {SCHEME}://HOST/?grpc=...&http=...&grid=...")
    values: dict[str, str] = {}
    for name, value in pairs:
        if name not in _KNOWN:
            raise _bad(f"it has a parameter {name!r} that this version does not know")
        if name in values:
            raise _bad(f"it has {name!r} twice")
        values[name] = value
    for name in _NEEDED:
        if not values.get(name):
            raise _bad(f"it has no {name!r}")
    for name in ("grpc", "http"):
        split_address(values[name])
    ca = values.get("ca", "")
    if "ca" in values and ca != PUBLIC and not _SHA256.fullmatch(ca):
        raise _bad(f"its 'ca' is neither a SHA-256 (64 hex digits) nor {PUBLIC!r}")
    certificates = values.get("certificates")
    if certificates is not None and (certificates != _REQUIRED or not ca):
        raise _bad(f"its 'certificates' is not {_REQUIRED!r}, or it has no 'ca'")
    return JoinLink(
        host,
        values["grpc"],
        values["http"],
        values["grid"],
        values.get("invite", ""),
        ca,
        certificates is not None,
    )


def split_address(address: str) -> tuple[str, int]:
    """Host (without brackets) and port of ``host:port``.

    Raises:
        UsageError: ``node.link``, not an address.
    """
    try:
        parts = urlsplit(f"//{address}")
        host, port = parts.hostname, parts.port
    except ValueError as problem:
        raise _bad(f"{address!r} is not host:port") from problem
    if not host or not port or parts.netloc != address or "@" in address:
        raise _bad(f"{address!r} is not host:port")
    return host, port


def is_loopback(address: str) -> bool:
    """Whether ``host:port`` is on this machine."""
    host, _ = split_address(address)
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:  # a name; only `localhost` is promised to be this machine
        return False


def _bad(what: str) -> UsageError:
    return UsageError("node.link", f"The join link is not well formed: {what}.", _HINT)
