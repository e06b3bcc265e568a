"""Which versions of the wire contract this program speaks.

A version is raised when an older peer could misunderstand a message, not when a field is added.

== ===================================================================================
1  the first one
2  session tokens expire, and ``SessionToken`` brings new ones over the running session
== ===================================================================================
"""

from __future__ import annotations

from distribai.errors import ProtocolMismatch

PROTOCOL = 2
"""The newest version that this program speaks."""

PROTOCOL_MIN = 1
"""The oldest version that this program still speaks."""


def negotiate(theirs_min: int, theirs_max: int) -> int:
    """The newest version that both sides speak.

    The node calls it with the range of the ``Challenge``; the orchestrator with the one version of
    ``RegisterSession`` as both ends.

    Raises:
        ProtocolMismatch: ``protocol.version``, there is none.
    """
    version = min(PROTOCOL, theirs_max)
    if version < max(PROTOCOL_MIN, theirs_min) or theirs_min > theirs_max:
        theirs = str(theirs_min) if theirs_min == theirs_max else f"{theirs_min} to {theirs_max}"
        older = theirs_max < PROTOCOL_MIN
        raise ProtocolMismatch(
            "protocol.version",
            f"The other side speaks protocol version {theirs}; "
            f"this program speaks {PROTOCOL_MIN} to {PROTOCOL}.",
            "Upgrade the other side." if older else "Upgrade DistribAI: pip install -U distribai",
        )
    return version
