"""Who may ask how often: each caller's key, owner and network, and each node's stream.

::

    no credentials, or ones that never worked   the network's small allowance (``anonymous``)
    credentials that have worked                the network's large one, then the key's and the
                                                owner's, once it is known whose they are
    a new stream                                the network's allowance of ``joins``
    a message of a stream                       the node's; above it the stream is read slower

A network is what one subscriber is commonly given: an IPv4 /24, an IPv6 /48. This machine itself
(loopback, where also a proxy stands that names no other address) is no network and has no such
limit. All buckets are in memory and each process's own: behind n replicas a caller may ask n times
as often.
"""

from __future__ import annotations

import hashlib
import ipaddress
import math
from collections import OrderedDict
from collections.abc import Callable
from urllib.parse import unquote

from distribai.core.limits import CAPACITY, Buckets, Rate
from distribai.errors import TooMany
from distribai.sections import LimitSettings

SLOWED = 500
"""Messages in a row that a stream is slowed for before it is ended: so much is no burst."""


class Limits:
    """The limits of one process.

    Args:
        clock: monotonic seconds.
    """

    def __init__(self, settings: LimitSettings, clock: Callable[[], float]) -> None:
        self._clock = clock
        s = settings
        self.anonymous = Buckets(Rate(s.anonymous_per_s, s.anonymous_burst))
        self.network = Buckets(Rate(s.network_per_s, s.network_burst))
        self.key = Buckets(Rate(s.key_per_s, s.key_burst))
        self.owner = Buckets(Rate(s.owner_per_s, s.owner_burst))
        self.joins = Buckets(Rate(s.joins_per_s, s.joins_burst))
        self.messages = Buckets(Rate(s.messages_per_s, s.messages_burst))
        self._proven: OrderedDict[str, None] = OrderedDict()

    def arrive(self, address: str, credentials: str) -> None:
        """A request from ``address``, before anything is done for it.

        Raises:
            TooMany: ``limit.rate``.
        """
        network = network_of(address)
        if not network:
            return
        proven = self.is_proven(credentials)
        self._take(self.network if proven else self.anonymous, network, f"network {network}")

    def is_proven(self, credentials: str) -> bool:
        """They have let somebody in before, and have not been refused since."""
        return bool(credentials) and _hash(credentials) in self._proven

    def refused(self, credentials: str) -> None:
        """Credentials that nobody issued, or that are good no more."""
        self._proven.pop(_hash(credentials), None)

    def admit(self, credentials: str, owner: str) -> None:
        """A request whose caller is known, by credentials that are proven from then on: ``owner``
        is an account, or a node.

        Raises:
            TooMany: ``limit.rate``.
        """
        hashed = _hash(credentials)
        self._proven[hashed] = None
        self._proven.move_to_end(hashed)
        if len(self._proven) > CAPACITY:
            self._proven.popitem(last=False)
        self._take(self.key, hashed, "key")
        self._take(self.owner, owner, owner)

    def join(self, peer: str) -> None:
        """A new stream from gRPC's ``peer``.

        Raises:
            TooMany: ``limit.rate``.
        """
        if network := network_of(address_of(peer)):
            self._take(self.joins, network, f"network {network}")

    def message(self, node_id: str) -> float:
        """A message of a node's stream: 0.0, or for how many seconds it must wait to ask again."""
        return self.messages.take(node_id, self._clock())

    def _take(self, buckets: Buckets, key: str, who: str) -> None:
        wait = buckets.take(key, self._clock())
        if wait:
            raise too_many(who, buckets.rate, wait)


def too_many(who: str, rate: Rate, wait: float) -> TooMany:
    """The refusal."""
    return TooMany(
        "limit.rate",
        f"The {who} asks too often: {rate.per_s:g} a second are allowed, {rate.burst:g} at once.",
        f"Try again in {math.ceil(wait)} s. The limits are the operator's settings in [limits].",
        retry_after=wait,
    )


def network_of(address: str) -> str:
    """The network of an IP address; empty for this machine, and where there is no IP address (a
    Unix socket)."""
    try:
        ip = ipaddress.ip_address(address.partition("%")[0])
    except ValueError:
        return ""
    if isinstance(ip, ipaddress.IPv6Address) and ip.ipv4_mapped is not None:
        ip = ip.ipv4_mapped
    if ip.is_loopback:
        return ""
    return str(ipaddress.ip_network((ip, 24 if ip.version == 4 else 48), strict=False))


def address_of(peer: str) -> str:
    """The IP address in gRPC's name of a peer (``ipv4:192.0.2.1:5``, ``ipv6:%5B2001:db8::1%5D:5``);
    empty when it has none."""
    kind, _, rest = unquote(peer).partition(":")
    return rest.rpartition(":")[0].strip("[]") if kind in ("ipv4", "ipv6") else ""


def _hash(credentials: str) -> str:
    return hashlib.sha256(credentials.encode()).hexdigest()
