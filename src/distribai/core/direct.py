"""What is fixed about fetching a blob from the object store itself instead of through a replica.

Who asks with :data:`FOLLOW_HEADER` may be sent on (307) to an address of the store that is good for
a short while; who does not, and every older node and client, gets the bytes from the replica. What
comes is judged by its hash either way. The replica cannot see what moved, so a node tells it
afterwards (``POST /api/v1/blobs/{sha256}/fetched``).
"""

from __future__ import annotations

from typing import Final

FOLLOW_HEADER: Final = "X-DistribAI-Follow"
"""With the value ``1``: the asker can be sent on to the object store."""

SMALL: Final = 1 << 16
"""Fewer bytes than these are never worth another connection."""

CONNECT_S: Final = 5.0
"""Seconds that the object store has to take a connection before the replica is asked again."""

RELAY_S: Final = 600.0
"""Seconds that whoever could not reach the object store asks the replicas instead."""
