"""Who is asking: from a bearer token to an account or a node."""

from __future__ import annotations

from distribai.core.people import Principal
from distribai.errors import Unauthenticated
from distribai.orchestrator.context import Grid
from distribai.orchestrator.fleet import passes, tokens
from distribai.orchestrator.people import access
from distribai.orchestrator.secrets import hash_secret


async def verify_token(grid: Grid, token: str) -> Principal:
    """Who ``token`` belongs to.

    Raises:
        Unauthenticated: ``auth.invalid``: unknown, expired or revoked.
        NotAllowed: ``auth.forbidden``: the token of a node that is quarantined or banned.
    """
    if passes.looks_like(token):
        return await tokens.node_of_pass(grid, token)
    hashed = hash_secret(token)
    async with grid.db.read() as tx:
        holder = await access.holder_of(tx, hashed)
        node = None if holder is not None else await tokens.node_of_token(tx, hashed)
    if holder is not None:
        return await access.used(grid, holder)
    if node is not None:
        return node
    raise Unauthenticated(
        "auth.invalid",
        "The token is unknown, expired or revoked.",
        "Log in again (`distribai login`), or ask the operator for a one-time login; a node "
        "gets a new token whenever it connects.",
    )
