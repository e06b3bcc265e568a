"""What every reader of messages checks, and how it refuses."""

from __future__ import annotations

import re
from typing import NoReturn

from distribai.errors import ProtocolMismatch

_ID = re.compile(r"[A-Za-z0-9_.-]{1,64}")

MAX_INT = 2**31 - 1
"""The largest attempt, device number or count of steps: what a database's integer holds."""

MAX_BIG = 2**63 - 1
"""The largest size, position or count of tokens."""

MAX_NAMES = 1000
"""Entries of a map that a node sends."""

MAX_NAME = 100
"""Characters of a name that are kept."""


def malformed(what: str) -> NoReturn:
    """Refuse a message.

    Raises:
        ProtocolMismatch: ``protocol.malformed``, always.
    """
    raise ProtocolMismatch("protocol.malformed", f"A message is malformed: {what}.")


def check_id(text: str, what: str) -> str:
    """An id or a hash, as this program makes them.

    Raises:
        ProtocolMismatch: ``protocol.malformed``.
    """
    if not _ID.fullmatch(text):
        malformed(f"{what} is {text[:80]!r}")
    return text


def check_attempt(task_id: str, attempt: int, what: str) -> None:
    """A task's id and attempt, which is never 0.

    Raises:
        ProtocolMismatch: ``protocol.malformed``.
    """
    check_id(task_id, f"{what}.task_id")
    at_most(attempt, MAX_INT, f"{what}.attempt")
    if not attempt:
        malformed(f"{what} names no attempt")


def at_most(value: int, limit: int, what: str) -> int:
    """``value``, unless it is beyond ``limit``.

    Raises:
        ProtocolMismatch: ``protocol.malformed``.
    """
    if value > limit:
        malformed(f"{what} is {value}, which is beyond {limit}")
    return value
