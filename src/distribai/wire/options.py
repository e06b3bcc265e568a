"""gRPC channel options that both sides must agree on.

A connection that died without a word (a laptop's lid, a NAT entry that timed out) is noticed by
HTTP/2 pings. gRPC's server counts pings that arrive more often than it allows and hangs up after
two, so the server's allowance and the client's interval live in one place. 20 s is well below the
30 s of silence after which a node counts as degraded, and below common NAT timeouts for TCP.
"""

from __future__ import annotations

KEEPALIVE_MS = 20_000
KEEPALIVE_TIMEOUT_MS = 10_000

CONNECT_MS = 20_000
"""The time that a connection may take to come about, TLS and HTTP/2's first frames included: some
four round trips, and a home line that uploads at the same time makes each of them seconds long."""

MAX_MESSAGE_BYTES = 4 * 2**20
"""Tensors never travel in messages, so nothing legitimate is near this."""

_BOTH: tuple[tuple[str, int], ...] = (
    ("grpc.keepalive_time_ms", KEEPALIVE_MS),
    ("grpc.keepalive_timeout_ms", KEEPALIVE_TIMEOUT_MS),
    ("grpc.keepalive_permit_without_calls", 1),
    ("grpc.http2.max_pings_without_data", 0),
    ("grpc.max_send_message_length", MAX_MESSAGE_BYTES),
    ("grpc.max_receive_message_length", MAX_MESSAGE_BYTES),
)

CLIENT_OPTIONS: tuple[tuple[str, int], ...] = (
    *_BOTH,
    # gRPC gives up a connection that takes longer than its first and its least backoff. What waits
    # between two tries is the link's own backoff: each of its tries has a fresh channel.
    ("grpc.initial_reconnect_backoff_ms", CONNECT_MS),
    ("grpc.min_reconnect_backoff_ms", CONNECT_MS),
    ("grpc.max_reconnect_backoff_ms", CONNECT_MS),
)

SERVER_OPTIONS: tuple[tuple[str, int], ...] = (
    *_BOTH,
    ("grpc.http2.min_ping_interval_without_data_ms", KEEPALIVE_MS // 4),
    ("grpc.http2.max_ping_strikes", 0),
    # Who connects and says nothing holds a descriptor for that long.
    ("grpc.server_handshake_timeout_ms", 20_000),
    # Two orchestrators on one port would each get half of the nodes.
    ("grpc.so_reuseport", 0),
)
