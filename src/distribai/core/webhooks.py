"""What is fixed between a grid and whoever receives its webhooks: which events, how a delivery is
signed, and how long it is tried. Pure."""

from __future__ import annotations

import hashlib
import hmac
import re
from collections.abc import Iterable
from typing import Final

from distribai.errors import UsageError

SIGNATURE_HEADER: Final = "X-DistribAI-Signature"

TIMEOUT_S: Final = 5.0
"""Seconds that one delivery may take, from the name's resolution to the end of the answer."""

MAX_ANSWER: Final = 64 << 10
"""Bytes that are read of a receiver's answer; nothing of them is kept."""

FIRST_PAUSE_S: Final = 5.0
LONGEST_PAUSE_S: Final = 3600.0
"""The pause after the first failure, and the longest one; each is twice the one before."""

MAX_REFUSALS: Final = 8
"""A receiver that is there and answers 4xx so often to one delivery does not want that one."""

DISABLE_AFTER_S: Final = 86_400.0
"""Seconds without one success after which a failing webhook is disabled."""

MAX_KINDS: Final = 20
"""Patterns of one filter."""

KIND_PATTERN: Final = r"^[a-z][a-z_]{0,30}(\.[a-z_]{1,30}|\.\*)?$"
"""``job.merged``, or ``job.*``, or ``job``, which means the same."""

_KIND = re.compile(KIND_PATTERN)


def check_kinds(patterns: Iterable[str]) -> tuple[str, ...]:
    """A filter in its one form: sorted, no pattern twice, ``job`` written ``job.*``.

    Raises:
        UsageError: ``usage.invalid``: too many, or one that can match nothing.
    """
    found = set()
    for pattern in patterns:
        if not _KIND.fullmatch(pattern):
            raise UsageError(
                "usage.invalid",
                f"{pattern[:60]!r} is no kind of events.",
                "Give kinds as events have them, or a whole family: job.completed, task.*.",
                field="kind",
            )
        found.add(pattern if "." in pattern else f"{pattern}.*")
    if len(found) > MAX_KINDS:
        raise UsageError(
            "usage.invalid",
            f"A filter has at most {MAX_KINDS} kinds, not {len(found)}.",
            "Give families: job.*.",
            field="kind",
        )
    return tuple(sorted(found))


def sign(secret: str, timestamp: int, body: bytes) -> str:
    """The signature header's value: ``t=SECONDS,v1=HEX``, HMAC-SHA256 over ``SECONDS.body``.

    The time is under the signature, so that a receiver can refuse a delivery that somebody sends
    it again a day later."""
    mac = hmac.new(secret.encode(), f"{timestamp}.".encode() + body, hashlib.sha256)
    return f"t={timestamp},v1={mac.hexdigest()}"


def secret_of(key: bytes, webhook_id: str) -> str:
    """A webhook's secret. It follows from the grid's key and the webhook's id, so that no database
    and no backup of one holds it."""
    mac = hmac.new(key, f"distribai webhook secret {webhook_id}".encode(), hashlib.sha256)
    return f"whsec_{mac.hexdigest()}"


def key_id(key: bytes) -> str:
    """What the database may know of a grid's key: enough to tell two of them apart."""
    return hmac.new(key, b"distribai webhook key id", hashlib.sha256).hexdigest()[:16]


def pause_s(failures: int, chance: float) -> float:
    """Seconds until the next try after so many failures in a row; ``chance`` in [0, 1) spreads the
    tries of many webhooks over a tenth of the pause."""
    pause = min(LONGEST_PAUSE_S, FIRST_PAUSE_S * 2.0 ** min(max(failures - 1, 0), 30))
    return pause * (1.0 + 0.1 * chance)


def is_refusal(status: int | None) -> bool:
    """Whether a receiver that is there does not want this delivery: 4xx, but for those that ask to
    come again later."""
    return status is not None and 400 <= status < 500 and status not in (408, 425, 429)
