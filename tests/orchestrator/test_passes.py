"""Short-lived tokens: what is refused, and that nobody notices them."""

from __future__ import annotations

import hashlib
import hmac
import json
from base64 import urlsafe_b64decode, urlsafe_b64encode
from typing import Any

import jwt
import pytest
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
from sqlalchemy import select, update

from distribai.errors import DistribAIError
from distribai.orchestrator import callers
from distribai.orchestrator.fleet import passes
from distribai.orchestrator.fleet.liveness import flush
from distribai.orchestrator.fleet.registration import MODE, OPEN
from distribai.store.statements import facts, fleet
from distribai.store.tables import meta, nodes, sessions
from tests.orchestrator.harness import FakeNode, World, breathe


def parts(token: str) -> tuple[dict[str, Any], dict[str, Any], str]:
    head, body, signature = token.split(".")
    return *(json.loads(urlsafe_b64decode(x + "==")) for x in (head, body)), signature  # type: ignore[return-value]


def joined(head: dict[str, Any], body: dict[str, Any], signature: str) -> str:
    texts = [urlsafe_b64encode(json.dumps(x).encode()).decode().rstrip("=") for x in (head, body)]
    return ".".join([*texts, signature])


async def code(world: World, token: str) -> str:
    """Why a token is refused; the node's id when it is not."""
    try:
        return (await callers.verify_token(world.grid, token)).node_id
    except DistribAIError as problem:
        return problem.code


async def later(world: World, node: FakeNode, seconds: float) -> None:
    """Time passes, the node is heard, and what was heard is written."""
    world.time.now += seconds
    await node.heartbeat()
    await flush(world.grid)
    await breathe()


def signed(world: World, key: Ed25519PrivateKey, kid: str, **changes: Any) -> str:
    claims = {
        "iss": "grid_test",
        "aud": passes.AUDIENCE,
        "sub": world.nodes[0].id,
        "sid": world.nodes[0].session,
        "iat": world.time.now,
        "exp": world.time.now + 60,
        **changes,
    }
    claims = {k: v for k, v in claims.items() if v is not None}
    return jwt.encode(claims, key, "EdDSA", headers={"kid": kid})


async def test_a_node_s_token_names_its_key_its_grid_and_its_end(any_world: World) -> None:
    node = await any_world.node("a")
    head, body, _ = parts(node.token)
    assert (head["alg"], head["kid"]) == ("EdDSA", any_world.grid.ring.kid)
    assert (body["sub"], body["sid"], body["iss"]) == (node.id, node.session, "grid_test")
    assert body["exp"] == any_world.time.now + passes.LIFETIME_S
    assert await code(any_world, node.token) == node.id


async def test_what_is_not_quite_the_grid_s_token_opens_nothing(world: World) -> None:
    node = await world.node("a")
    other = await world.node("b")
    ring = world.grid.ring
    assert ring.key is not None
    head, body, signature = parts(node.token)
    assert await code(world, signed(world, ring.key, ring.kid)) == node.id
    for changes in (
        {"aud": "another"},
        {"aud": None},
        {"iss": "grid_other"},
        {"sub": other.id},
        {"sub": "node_unknown"},
        {"sid": other.session},
        {"sid": None},
        {"exp": None},
        {"iat": None},
        {"exp": world.time.now - 1},
        {"exp": world.time.now},
        {"exp": world.time.now + 10 * passes.LIFETIME_S},
        {"exp": "soon", "iat": "now"},
        {"exp": True, "iat": False},
    ):
        assert await code(world, signed(world, ring.key, ring.kid, **changes)) == "auth.invalid", (
            changes
        )
    stranger = Ed25519PrivateKey.from_private_bytes(bytes(32))
    public = ring.key.public_key().public_bytes_raw()
    plain = joined({**head, "alg": "HS256"}, body, "").rsplit(".", 1)[0]
    mac = urlsafe_b64encode(hmac.new(public, plain.encode(), hashlib.sha256).digest()).decode()
    for token in (
        signed(world, stranger, ring.kid),
        signed(world, stranger, "unknown"),
        signed(world, stranger, ""),
        signed(world, stranger, "x" * 1000),
        joined(head, {**body, "sub": other.id, "sid": other.session}, signature),
        joined({**head, "alg": "none"}, body, ""),
        f"{plain}.{mac.rstrip('=')}",
        joined({"alg": "EdDSA", "kid": 5}, body, signature),
        joined({"alg": "EdDSA", "kid": ["["] * 9}, body, signature),
        "a.b.c",
        "..",
        "." * 5000,
        node.token + "." + "x" * 5000,
    ):
        assert await code(world, token) == "auth.invalid", token[:60]


@pytest.mark.parametrize("odd", ["\ud800", "\0", "é", "%", "x" * 33])
async def test_what_no_database_and_no_answer_can_hold_is_refused_in_a_header(
    any_world: World, odd: str
) -> None:
    """Anybody can send one: a header is read before it is known who has signed it."""
    world = any_world
    node = await world.node("a")
    head, body, signature = parts(node.token)
    for changes in ({"kid": odd}, {"kid": head["kid"] + odd}, {"crit": [odd], odd: 1}):
        token = joined({**head, **changes}, body, signature)
        with pytest.raises(DistribAIError) as caught:
            await callers.verify_token(world.grid, token)
        assert caught.value.code == "auth.invalid", changes
        caught.value.message.encode()
        async with world.grid.db.read() as tx:
            with pytest.raises(DistribAIError) as caught:
                await passes.check_challenge(world.grid, tx, token)
        assert caught.value.code == "auth.invalid", changes


async def test_a_token_ends_and_the_running_session_has_had_the_next_one_by_then(
    any_world: World,
) -> None:
    node = await any_world.node("a")
    first, session = node.token, node.session
    await later(any_world, node, passes.LIFETIME_S / 2 - 20)
    assert node.token == first, "not before half of its time"
    await later(any_world, node, 40)
    second = node.token
    assert second != first
    assert [await code(any_world, t) for t in (first, second)] == [node.id, node.id]
    await later(any_world, node, passes.LIFETIME_S / 2)
    assert await code(any_world, first) == "auth.invalid"
    assert await code(any_world, node.token) == node.id
    assert node.session == session


async def test_a_node_of_the_first_protocol_has_a_token_that_lasts_as_long_as_its_session(
    world: World,
) -> None:
    node = await world.node("old", protocol=1)
    token = node.token
    assert not passes.looks_like(token)
    await later(world, node, 2 * passes.LIFETIME_S)
    assert node.token == token
    assert await code(world, token) == node.id
    assert node.end is None


@pytest.mark.parametrize("standing", ["banned", "quarantined"])
async def test_a_barred_node_s_token_is_refused_at_once_though_it_has_not_ended(
    any_world: World, standing: str
) -> None:
    node = await any_world.node("a")
    await any_world.job()
    task = await node.next_training()
    outcome = await node.outcome(task)
    async with any_world.grid.db.write() as tx:
        await tx.run(update(nodes).values(standing=standing))
    assert await code(any_world, node.token) == "auth.forbidden"
    await node.report(outcome)
    assert node.acks[-1].code == "auth.forbidden", "nor does a result of it count"
    assert not node.acks[-1].counted
    await flush(any_world.grid)
    await breathe()
    assert node.end is not None
    assert node.end.code == f"node.{standing}"


async def test_a_token_dies_with_its_session(world: World) -> None:
    node = await world.node("a")
    await node.leave()
    async with world.grid.db.write() as tx:
        await tx.run(update(sessions).values(ended_at=tx.now))
    assert await code(world, node.token) == "auth.invalid"


async def test_another_process_knows_the_tokens_of_one_that_has_died(any_world: World) -> None:
    node = await any_world.node("a")
    token = node.token
    again = await any_world.restart()
    try:
        if again.grid.db.dialect == "sqlite":
            # One process at a time: its streams have ended with it, and their tokens.
            assert await code(again, token) == "auth.invalid"
        else:
            assert await code(again, token) == node.id
        node.world = again
        again.nodes.append(node)
        await node.connect()
        assert parts(node.token)[0]["kid"] != parts(token)[0]["kid"]
        assert await code(again, node.token) == node.id
    finally:
        await again.close()


async def test_keys_change_daily_and_leave_when_no_token_of_theirs_can_be_good(
    world: World,
) -> None:
    await passes.ready(world.grid)
    first = world.grid.ring.kid
    world.time.now += passes.ROTATE_S - 1
    await passes.ready(world.grid)
    assert world.grid.ring.kid == first
    world.time.now += 1
    node = await world.node("a")
    second = world.grid.ring.kid
    assert second != first
    world.grid.ring.known.clear()
    assert await code(world, node.token) == node.id
    world.time.now += 2 * passes.ROTATE_S
    await passes.ready(world.grid)
    async with world.grid.db.read() as tx:
        keys = await tx.all(select(meta.c.key).where(meta.c.key.startswith("token_key.")))
    assert [row.key for row in keys] == [f"token_key.{world.grid.ring.kid}"]
    assert await code(world, node.token) == "auth.invalid"


async def test_no_private_key_and_no_token_lies_in_the_database(world: World) -> None:
    node = await world.node("a")
    key = world.grid.ring.key
    assert key is not None
    async with world.grid.db.read() as tx:
        stored = repr([await tx.all(select(table)) for table in (meta, nodes, sessions)])
    assert key.public_key().public_bytes_raw().hex() in stored
    assert key.private_bytes_raw().hex() not in stored
    assert node.token not in stored
    assert world.invite not in stored


async def test_a_stranger_of_an_open_grid_begins_on_probation(world: World) -> None:
    async with world.grid.db.write() as tx:
        await facts.put(tx, MODE, OPEN)
    stranger = await world.node("a")
    async with world.grid.db.read() as tx:
        assert await fleet.standing(tx, stranger.id) == "probation"
