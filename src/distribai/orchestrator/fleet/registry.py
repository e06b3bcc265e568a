"""Live sessions of this process, in memory."""

from __future__ import annotations


class Registry:
    """Live sessions by node."""
