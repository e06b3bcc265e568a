"""Where a webhook may be sent: the text of its address, and the network addresses behind the name.

A grid that posts to whatever address somebody gives it could be made to speak to its own network:
to a router, a database, a cloud's metadata service. So an address is parsed once, here, and what
connects later uses these parts and parses nothing again; the name is resolved once, every answer
must be a public unicast address, and the connection goes to the answer that was checked.

IPv6 has several ways to write an IPv4 address: v4-mapped (RFC 4291 2.5.5.2), NAT64 (RFC 6052) and
6to4 (RFC 3056). What is checked is the address inside. The ranges that Python's ``is_global`` lets
through, depending on its version, and that are no public unicast all the same are named here, after
IANA's registries of special-purpose addresses.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass
from ipaddress import (
    IPv4Address,
    IPv4Network,
    IPv6Address,
    IPv6Network,
    ip_address,
    ip_network,
)
from typing import Final

from distribai.errors import UsageError

Address = IPv4Address | IPv6Address

Rule = Callable[[Address, int], str]
"""Why a connection to (address, port) is refused; empty: it is not."""

PORTS: Final = frozenset({80, 443})
"""Ports of public receivers. No other service of a stranger is to be knocked at."""

MAX_URL: Final = 2000
"""Characters of an address."""

_URL = re.compile(r"(https?)://([^/?]+)(.*)", re.IGNORECASE)
_AUTHORITY = re.compile(r"(?:\[([0-9a-fA-F:.]+)\]|([A-Za-z0-9.-]+))(?::([0-9]{1,5}))?")
_NAME = re.compile(r"[a-z0-9]([a-z0-9-]{0,61}[a-z0-9])?(\.[a-z0-9]([a-z0-9-]{0,61}[a-z0-9])?)*")
_PATH = re.compile(r"[!-~]*")
_FORBIDDEN = frozenset('\\"<>^`{|}#')

_NAT64 = IPv6Network("64:ff9b::/96")
_SIX_TO_FOUR = IPv6Network("2002::/16")
_GLOBAL_UNICAST = IPv6Network("2000::/3")
_NOT_PUBLIC_4: Final = tuple(
    IPv4Network(n)
    for n in ("192.0.0.0/24", "192.88.99.0/24", "198.18.0.0/15", "224.0.0.0/4", "240.0.0.0/4")
)
_NOT_PUBLIC_6: Final = tuple(IPv6Network(n) for n in ("2001::/23", "2001:db8::/32", "3fff::/20"))
_LAN: Final = tuple(
    ip_network(n)
    for n in ("10.0.0.0/8", "172.16.0.0/12", "192.168.0.0/16", "127.0.0.0/8", "fc00::/7", "::1/128")
)
"""Private and loopback ranges. Link-local is not among them: clouds keep their secrets there."""


@dataclass(frozen=True, slots=True)
class Target:
    """The parts of a webhook's address. ``host`` is a name or a literal without brackets, in lower
    case; ``path`` is what the request line says, with the query."""

    scheme: str
    host: str
    port: int
    path: str

    @property
    def literal(self) -> Address | None:
        """The address that ``host`` is, None for a name."""
        try:
            return ip_address(self.host)
        except ValueError:
            return None


def parse_target(url: str) -> Target:
    """Take an address apart.

    Raises:
        UsageError: ``webhook.url``: it is no plain http or https address: credentials, fragments,
            zones, other characters than ASCII, a host that is neither a name nor an address.
    """
    if len(url) > MAX_URL:
        raise _bad(f"it has more than {MAX_URL} characters")
    if not _PATH.fullmatch(url) or _FORBIDDEN & set(url):
        raise _bad("it has characters that an address must not have")
    parts = _URL.fullmatch(url)
    if parts is None:
        raise _bad("it does not begin with http:// or https:// and a host")
    scheme, authority, rest = parts[1].lower(), parts[2], parts[3]
    if "@" in authority:
        raise _bad("it carries a user's name; the signature says who sends")
    found = _AUTHORITY.fullmatch(authority)
    if found is None:
        raise _bad("its host is neither a name nor an address")
    host = _host(found[1], found[2])
    port = int(found[3]) if found[3] else {"http": 80, "https": 443}[scheme]
    if not 1 <= port <= 65535:
        raise _bad(f"{port} is no port")
    return Target(scheme, host, port, rest if rest.startswith("/") else f"/{rest}")


def _host(bracketed: str | None, plain: str | None) -> str:
    if bracketed is not None:
        try:
            return str(IPv6Address(bracketed))
        except ValueError as problem:
            raise _bad("its host is no IPv6 address") from problem
    name = (plain or "").lower()
    if len(name) > 253 or not _NAME.fullmatch(name):
        raise _bad("its host is no name")
    return name


def _bad(why: str) -> UsageError:
    return UsageError(
        "webhook.url",
        f"The webhook's address cannot be used: {why}.",
        "It looks like https://example.com/hooks/distribai. A name with other letters is given in "
        "its ASCII form (xn--...).",
        field="url",
    )


def inner(address: Address) -> Address:
    """The IPv4 address that an IPv6 one carries, else the address itself."""
    if isinstance(address, IPv4Address):
        return address
    if address.ipv4_mapped is not None:
        return address.ipv4_mapped
    if address in _NAT64:
        return IPv4Address(int(address) & 0xFFFFFFFF)
    if address in _SIX_TO_FOUR:
        return IPv4Address(int(address) >> 80 & 0xFFFFFFFF)
    return address


def is_public(address: Address) -> bool:
    """Whether the address, or the one that it carries, is a public unicast address."""
    address = inner(address)
    if not address.is_global or address.is_multicast:
        return False
    if isinstance(address, IPv4Address):
        return not any(address in network for network in _NOT_PUBLIC_4)
    return address in _GLOBAL_UNICAST and not any(address in n for n in _NOT_PUBLIC_6)


def public_only(address: Address, port: int) -> str:
    """The rule: public unicast addresses, ports 80 and 443."""
    if not is_public(address):
        return f"{address} is no public address"
    if port not in PORTS:
        return f"port {port} is neither 80 nor 443"
    return ""


def own_lan_too(address: Address, port: int) -> str:
    """The rule of an operator whose receivers are at home (``webhooks.allow_private``): private and
    loopback addresses as well, on any port. Link-local ones stay closed."""
    carried = inner(address)
    if any(carried.version == n.version and carried in n for n in _LAN):
        return ""
    return public_only(address, port)
