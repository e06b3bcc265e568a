"""A stream ends with the right to read it: key, account, membership, role."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from pathlib import Path

import pytest

from distribai.core.people import Scope
from distribai.orchestrator.http import events
from distribai.orchestrator.people import commands, credentials
from distribai.store import outbox
from tests.http.test_events import Listener
from tests.http.town import Town, town_on
from tests.store.databases import new_sqlite


@pytest.fixture
async def town(tmp_path: Path) -> AsyncIterator[Town]:
    made = await town_on(tmp_path, await new_sqlite(tmp_path))
    made.world.grid.clock = time.monotonic
    yield made
    await made.world.close()


async def happens(town: Town, job: str) -> None:
    async with town.world.grid.db.write() as tx:
        await outbox.append(tx, [outbox.Change("job.paused", job)])
    town.world.grid.wake.set()


async def revoke(town: Town, name: str) -> None:
    who = await town.principal(name)
    await credentials.revoke_key(town.world.grid, who, who.key_id)


async def leave(town: Town, name: str) -> None:
    await commands.remove_member(town.world.grid, "lab", name)


async def close(town: Town, name: str) -> None:
    await commands.close_account(town.world.grid, name)


WAYS: dict[str, tuple[Callable[[Town, str], Awaitable[None]], str]] = {
    "the key is revoked": (revoke, "auth.invalid"),
    "the account is closed": (close, "auth.invalid"),
    "the membership ends": (leave, "auth.forbidden"),
}


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("busy", [True, False])
async def test_a_stream_ends_when(
    town: Town, monkeypatch: pytest.MonkeyPatch, way: str, busy: bool
) -> None:
    monkeypatch.setattr(events, "HEARTBEAT_S", 0.05)
    job = (await town.submit("ann", "watched")).json()["id"]
    app = town.http("vera")._transport.app  # type: ignore[attr-defined]
    listener = Listener(app, town.keys["vera"], f"/api/v1/jobs/{job}/events?after=latest")
    await listener.when(lambda: bool(listener.last_id))
    await happens(town, job)
    await listener.until(1)
    act, code = WAYS[way]
    await act(town, "vera")
    if busy:
        await happens(town, job)
    await asyncio.wait_for(listener.task, 180)
    assert [kind for kind, _ in listener.events] == ["job.paused", "end"]
    assert (listener.events[-1][1]["code"], listener.ended) == (code, True)
    assert town.world.grid.tail.readers == 0


async def test_a_stream_ends_when_its_key_expires(
    town: Town, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(events, "HEARTBEAT_S", 0.05)
    who = await town.principal("operator")
    made = await credentials.create_key(town.world.grid, who, "short", [Scope.READ], expires_s=60.0)
    app = town.http("operator")._transport.app  # type: ignore[attr-defined]
    listener = Listener(app, made.secret, "/api/v1/events?after=latest")
    await listener.when(lambda: listener.comments >= 1)
    town.world.time.now += 61
    await asyncio.wait_for(listener.task, 180)
    assert listener.events[-1][0] == "end"
    assert listener.events[-1][1]["code"] == "auth.invalid"


async def test_a_job_of_an_organization_that_one_has_left_is_unknown_to_its_stream(
    town: Town, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(events, "HEARTBEAT_S", 0.05)
    from distribai.core.people import Role

    await commands.set_role(town.world.grid, "mill", "vera", Role.VIEWER)
    job = (await town.submit("ann", "watched")).json()["id"]
    app = town.http("vera")._transport.app  # type: ignore[attr-defined]
    listener = Listener(app, town.keys["vera"], f"/api/v1/jobs/{job}/events?after=latest")
    await listener.when(lambda: bool(listener.last_id))
    await leave(town, "vera")
    await asyncio.wait_for(listener.task, 180)
    assert listener.events[-1][1]["code"] == "job.unknown"


@pytest.mark.parametrize("what", ["events", "logs"])
async def test_a_page_that_waits_is_refused_when_its_key_was_revoked_meanwhile(
    town: Town, what: str
) -> None:
    job = (await town.submit("ann", "watched")).json()["id"]
    path = f"/api/v1/jobs/{job}/{what}"
    async with town.http("vera") as vera:
        after = "latest" if what == "events" else "1000"
        asking = asyncio.create_task(vera.get(path, params={"after": after, "wait": 3}))
        await asyncio.sleep(0.2)
        await revoke(town, "vera")
        await happens(town, job)
        answer = await asyncio.wait_for(asking, 180)
    assert (answer.status_code, answer.json()["code"]) == (401, "auth.invalid")
