"""Who may speak: the operator's token, node session tokens, invites."""

from __future__ import annotations

from distribai.orchestrator.context import Grid
from distribai.orchestrator.records import Principal


async def verify_token(grid: Grid, token: str) -> Principal:
    """Who ``token`` belongs to.

    Raises:
        Unauthenticated: ``auth.invalid``: unknown, expired or revoked.
    """
    raise NotImplementedError
