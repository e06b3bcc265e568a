"""The same request twice makes one thing: keys that callers choose, kept with what they made.

A key belongs to its caller and to a kind of request (*scope*); the fingerprint is that of
everything in the request that decides what is made. The key is written in the transaction that
makes the object, so that there is a key exactly when there is an object. It is forgotten after
``orchestrator.idempotency_s`` (``orchestrator.retention``): nobody repeats a request that long.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import TypeVar

from distribai.core.plain import fingerprint
from distribai.errors import Conflict
from distribai.orchestrator.context import Grid
from distribai.store.engine import Tx
from distribai.store.statements import idempotency as statements

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Key:
    """One caller's key for one request."""

    owner: str
    scope: str
    key: str
    fingerprint: str


def key_for(owner: str, scope: str, key: str | None, request: object) -> Key | None:
    """The key of a request; None when the caller gave none. ``request`` is whatever of it decides
    what is made, as plain values."""
    return None if key is None else Key(owner[:64], scope, key, fingerprint(request))


class SameKey(Exception):
    """Undoes the transaction that lost a race for a key."""


async def made_before(tx: Tx, key: Key | None) -> str | None:
    """The id of what the key made.

    Raises:
        Conflict: ``http.idempotency``: the key was used for another request.
    """
    if key is None:
        return None
    row = await statements.get(tx, key.owner, key.scope, key.key)
    if row is None:
        return None
    if row.fingerprint != key.fingerprint:
        raise Conflict(
            "http.idempotency",
            f"The idempotency key {key.key[:60]!r} was used for another request.",
            "Take a fresh key for every new thing.",
        )
    return str(row.object_id)


async def remember(tx: Tx, key: Key | None, object_id: str) -> None:
    """Write the key with what this transaction makes.

    Raises:
        SameKey: the same request came twice at once, and the other one was first.
    """
    if key is not None and not await statements.add(
        tx, key.owner, key.scope, key.key, key.fingerprint, object_id
    ):
        raise SameKey


async def stand_for(tx: Tx, key: Key, object_id: str, before: str | None) -> bool:
    """Let the key stand for ``object_id`` in place of ``before``, which is gone (None: for the
    first time); False when somebody else was faster."""
    if before is None:
        return await statements.add(tx, key.owner, key.scope, key.key, key.fingerprint, object_id)
    return await statements.replace(tx, key.owner, key.scope, key.key, before, object_id)


async def once(grid: Grid, key: Key | None, make: Callable[[Tx], Awaitable[str]]) -> str:
    """The id of what ``make`` makes in one transaction, or has made before under this key.

    Raises:
        Conflict: ``http.idempotency``: the key was used for another request.
    """
    if key is not None:
        async with grid.db.read() as tx:
            if (made := await made_before(tx, key)) is not None:
                return made
    try:
        async with grid.db.write() as tx:
            object_id = await make(tx)
            await remember(tx, key, object_id)
            return object_id
    except SameKey:
        async with grid.db.read() as tx:
            made = await made_before(tx, key)
        assert made is not None, "a fresh key is not forgotten"
        return made


async def told_once(
    grid: Grid,
    key: Key | None,
    make: Callable[[Tx], Awaitable[tuple[str, T]]],
    again: Callable[[Tx, str], Awaitable[T]],
) -> T:
    """The answer of ``make``, which gives the id of what it makes beside it; if the key has made it
    before, the answer of ``again`` for that id. For what has a secret that is stored as a hash: the
    answer of the first time cannot be given again, so ``again`` puts another secret in its place.

    Raises:
        Conflict: ``http.idempotency``: the key was used for another request.
    """
    try:
        async with grid.db.write() as tx:
            if (made := await made_before(tx, key)) is not None:
                return await again(tx, made)
            object_id, answer = await make(tx)
            await remember(tx, key, object_id)
            return answer
    except SameKey:
        return await told_once(grid, key, make, again)
