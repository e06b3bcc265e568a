"""What a machine was measured to have, to and from the wire."""

from __future__ import annotations

import math

from distribai.core.devices import Machine, Speed
from distribai.core.needs import LEVELS
from distribai.core.text import clean
from distribai.wire.checks import MAX_BIG, MAX_INT, MAX_NAME, MAX_NAMES, at_most, malformed
from distribai.wire.v1 import distribai_pb2 as pb

MAX_TROUBLE = 500
"""Characters of a node's words that are kept."""


def machine_to_wire(machine: Machine | None) -> pb.Machine | None:
    """What was measured, or None, which protobuf leaves out."""
    if machine is None:
        return None
    return pb.Machine(
        memory_mb=machine.memory_mb,
        disk_mb=machine.disk_mb,
        disk_mbps=machine.disk_mbps,
        link_mbps=machine.link_mbps,
        isolation=machine.isolation,
        fingerprint=machine.fingerprint,
        speeds=[
            pb.DeviceSpeed(device=s.device, gflops=s.gflops, memory_gbps=s.memory_gbps)
            for s in machine.speeds
        ],
        link_up_mbps=machine.link_up_mbps,
        month_bytes=machine.month_bytes,
        month_left=machine.month_left,
        trouble=machine.trouble,
        limit_down_mbps=machine.limit_down_mbps,
        limit_up_mbps=machine.limit_up_mbps,
    )


def machine_from_wire(message: pb.Machine) -> Machine:
    """What a node was measured to have. A rate that is none counts as unknown; a level of isolation
    that this program does not know counts as none.

    Raises:
        ProtocolMismatch: ``protocol.malformed``.
    """
    if len(message.speeds) > MAX_NAMES:
        malformed(f"a machine has the speeds of {len(message.speeds)} devices")
    for what in ("memory_mb", "disk_mb", "month_bytes", "month_left"):
        at_most(getattr(message, what), MAX_BIG, f"Machine.{what}")
    speeds = tuple(
        Speed(
            at_most(s.device, MAX_INT, "DeviceSpeed.device"), _rate(s.gflops), _rate(s.memory_gbps)
        )
        for s in message.speeds
    )
    return Machine(
        memory_mb=message.memory_mb,
        disk_mb=message.disk_mb,
        disk_mbps=_rate(message.disk_mbps),
        link_mbps=_rate(message.link_mbps),
        isolation=message.isolation if message.isolation in LEVELS else "L0",
        fingerprint=clean(message.fingerprint, MAX_NAME, lines=False),
        speeds=speeds,
        link_up_mbps=_rate(message.link_up_mbps),
        month_bytes=message.month_bytes,
        month_left=message.month_left,
        trouble=clean(message.trouble, MAX_TROUBLE, lines=False),
        limit_down_mbps=_rate(message.limit_down_mbps),
        limit_up_mbps=_rate(message.limit_up_mbps),
    )


def _rate(value: float) -> float:
    return value if math.isfinite(value) and value > 0 else 0.0
