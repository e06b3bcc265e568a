"""People on a real grid: logins, keys, policies, quotas, and who did what."""

from __future__ import annotations

import asyncio
import os
from collections.abc import AsyncIterator
from dataclasses import replace
from pathlib import Path

import pytest

from distribai.core.people import HOME, OPERATOR, Policy, Quota, Role, Scope
from distribai.core.plain import to_plain
from distribai.core.spec import SnapshotSpec
from distribai.errors import Conflict, NotAllowed, NotFound, Unauthenticated, UsageError
from distribai.orchestrator import callers
from distribai.orchestrator.jobs import commands as jobs
from distribai.orchestrator.jobs import queries as job_queries
from distribai.orchestrator.jobs.why import why_job
from distribai.orchestrator.people import admission, commands, credentials, keys, queries
from distribai.orchestrator.secrets import hash_secret
from distribai.store.statements import people
from tests.http.town import Town, town_on
from tests.store.databases import add_old_operator_token, new_postgres, new_sqlite


@pytest.fixture(params=["sqlite", "postgresql"])
async def any_town(request: pytest.FixtureRequest, tmp_path: Path) -> AsyncIterator[Town]:
    if request.param == "sqlite":
        url = await new_sqlite(tmp_path)
    else:
        url = await new_postgres(request.getfixturevalue("postgres"))
    made = await town_on(tmp_path, url)
    yield made
    await made.world.close()


@pytest.fixture
async def town(tmp_path: Path) -> AsyncIterator[Town]:
    made = await town_on(tmp_path, await new_sqlite(tmp_path))
    yield made
    await made.world.close()


async def test_a_login_is_exchanged_once(any_town: Town) -> None:
    grid = any_town.world.grid
    made = await credentials.new_login(grid, "ann")
    again = await credentials.new_login(grid, "ann")
    with pytest.raises(Unauthenticated):
        await credentials.log_in(grid, made.login, "x")  # the later one took its place
    answers = await asyncio.gather(
        *(credentials.log_in(grid, again.login, "laptop") for _ in range(3)), return_exceptions=True
    )
    (key,) = [a for a in answers if not isinstance(a, BaseException)]
    assert all(isinstance(a, Unauthenticated) for a in answers if a is not key)
    who = await callers.verify_token(grid, key.secret)
    assert (who.name, who.account_id) == ("ann", any_town.ids["ann"])
    late = await credentials.new_login(grid, "ann")
    any_town.world.time.now += keys.LOGIN_S
    with pytest.raises(Unauthenticated):
        await credentials.log_in(grid, late.login, "x")


async def test_no_secret_is_stored(town: Town) -> None:
    made = await credentials.create_invite(
        town.world.grid, "carl", trusted=False, uses=None, expires_s=None
    )
    login = await credentials.new_login(town.world.grid, "nils")
    stored = b"".join(p.read_bytes() for p in town.world.root.glob("grid.sqlite3*"))
    secrets = [*town.keys.values(), login.login, made.join_link.split("invite=")[1].split("&")[0]]
    assert all(len(secret) >= 22 for secret in secrets), "128 bits or more"
    assert [s for s in secrets if s.encode() in stored] == []


async def test_the_operator_s_token_of_an_earlier_grid_goes_on_to_work(any_town: Town) -> None:
    grid = any_town.world.grid
    async with grid.db.write() as tx:
        await add_old_operator_token(tx, hash_secret("dop_of_an_earlier_version"))
    for _ in range(2):
        assert await keys.ensure_operator_key(grid.db, any_town.world.root, os.urandom)
    who = await callers.verify_token(grid, "dop_of_an_earlier_version")
    assert who.operator
    assert who.account_id == OPERATOR
    (old,) = [k for k in (await queries.list_keys(grid, who)).items if "earlier" in k.name]
    assert (await credentials.revoke_key(grid, who, old.id)).valid is False
    with pytest.raises(Unauthenticated):
        await callers.verify_token(grid, "dop_of_an_earlier_version")


async def test_a_key_tells_when_it_was_used_last_and_not_at_every_request(town: Town) -> None:
    world = town.world
    who = await town.principal("ann")

    async def last_used() -> float | None:
        return (await queries.list_keys(world.grid, who)).items[0].last_used_at

    first = await last_used()
    assert first == world.time.now
    world.time.now += 30
    await town.principal("ann")
    assert await last_used() == first
    world.time.now += 31
    await town.principal("ann")
    assert await last_used() == world.time.now


async def test_an_account_that_is_closed_opens_nothing(any_town: Town) -> None:
    grid = any_town.world.grid
    invite = await credentials.create_invite(grid, "carl", trusted=True, uses=None, expires_s=None)
    login = await credentials.new_login(grid, "carl")
    await commands.close_account(grid, "carl")
    with pytest.raises(Unauthenticated):
        await any_town.principal("carl")
    with pytest.raises(Unauthenticated):
        await credentials.log_in(grid, login.login, "x")
    with pytest.raises(Conflict, match="closed"):
        await credentials.new_login(grid, "carl")
    (told,) = [i for i in (await queries.list_invites(grid)).items if i.id == invite.invite.id]
    assert not told.valid


async def test_the_grid_is_never_without_an_operator(any_town: Town) -> None:
    grid = any_town.world.grid
    for act in (
        lambda: commands.close_account(grid, "operator"),
        lambda: commands.remove_member(grid, "home", "operator"),
        lambda: commands.set_role(grid, "home", "operator", Role.VIEWER),
    ):
        with pytest.raises(Conflict) as caught:
            await act()
        assert caught.value.code == "people.last_operator"
    await commands.set_role(grid, HOME, "nils", Role.OPERATOR)
    done = await asyncio.gather(
        commands.remove_member(grid, "home", "operator"),
        commands.remove_member(grid, "home", "nils"),
        return_exceptions=True,
    )
    assert sum(isinstance(d, Conflict) for d in done) == 1
    with pytest.raises(UsageError):
        await commands.set_role(grid, "lab", "nils", Role.OPERATOR)


async def test_names_are_taken_once(any_town: Town) -> None:
    grid = any_town.world.grid
    for make, name in (
        (commands.create_account, "ann"),
        (commands.create_account, "operator"),
        (commands.create_organization, "home"),
    ):
        with pytest.raises(Conflict, match="already"):
            await make(grid, name)
    with pytest.raises(NotFound):
        await commands.set_role(grid, "lab", "nobody", Role.MEMBER)
    with pytest.raises(NotFound):
        await commands.set_policy(grid, "nowhere\0", Policy("always"))


# ------------------------------------------------------------------ whose jobs


async def test_a_member_submits_to_the_only_organization_or_says_which(any_town: Town) -> None:
    grid = any_town.world.grid

    async def choose(name: str, ref: str = "") -> str:
        return await admission.organization_for(grid, await any_town.principal(name), ref)

    assert await choose("ann") == await choose("ann", "lab") == any_town.ids["lab"]
    assert await choose("operator") == HOME
    assert await choose("operator", "mill") == any_town.ids["mill"]
    for name, ref, kind in (
        ("ann", "mill", NotFound),
        ("ann", "nothing", NotFound),
        ("vera", "lab", NotAllowed),
        ("vera", "", NotAllowed),
        ("nils", "", NotAllowed),
    ):
        with pytest.raises(kind):
            await choose(name, ref)
    await commands.set_role(grid, "mill", "ann", Role.MEMBER)
    with pytest.raises(UsageError, match="lab, mill") as caught:
        await choose("ann")
    assert caught.value.code == "organization.choose"


async def test_jobs_of_a_grid_without_people_are_home_s(any_town: Town) -> None:
    job_id = await any_town.world.job()
    assert await job_queries.organization_of(any_town.world.grid, job_id) == HOME


async def test_a_policy_accepts_at_once_and_says_so(any_town: Town) -> None:
    world, grid = any_town.world, any_town.world.grid
    await commands.set_policy(grid, "lab", Policy("size", max_tokens=10**6))
    small = (await any_town.submit("ann", "small")).json()
    assert small["state"] == "queued"
    why = await why_job(grid, small["id"])
    assert "policy of lab: it accepts jobs of at most 1000000 tokens" in why.reasons[-1].text
    events = await job_queries.list_events(grid, small["id"])
    first, second = [e for e in events if e.kind.startswith("job.")]
    assert (first.kind, second.kind) == ("job.submitted", "job.queued")
    assert (second.data["by"], second.account_id) == ("policy of lab", any_town.ids["ann"])
    told = [line.message for line in await job_queries.list_logs(grid, small["id"])]
    assert told[:2] == [
        "The job was submitted by the member ann.",
        "The job was accepted by the policy of lab: it accepts jobs of at most 1000000 tokens.",
    ]

    await commands.set_policy(grid, "lab", Policy("size", max_tokens=10))
    large = (await any_town.submit("ann", "large")).json()
    assert large["state"] == "submitted"
    assert "and this has" in (await why_job(grid, large["id"])).reasons[0].text
    await jobs.accept_job(grid, large["id"], "operator")
    assert "accepted" not in {r.code for r in (await why_job(grid, large["id"])).reasons}
    node = await world.node("a")
    await world.settle()
    assert node.tasks


async def test_quotas_hold_at_the_door(any_town: Town) -> None:
    grid = any_town.world.grid
    await commands.set_quota(grid, "lab", Quota(open_jobs=1))
    first, second = await asyncio.gather(
        any_town.submit("ann", "one"), any_town.submit("ann", "two")
    )
    codes = sorted(a.json().get("code", "") for a in (first, second))
    assert codes == ["", "quota.jobs"], "two at once do not both take the last place"
    text = replace(await any_town.world.spec(), name="more")
    body = {"spec": to_plain(text)}
    async with any_town.http("ann") as ann:
        plan = await ann.post("/api/v1/jobs/plan", json=body)
        assert plan.status_code == 200, "it is full for now only"
        assert plan.json()["not_now"]["code"] == "quota.jobs"
        elsewhere = {**body, "organization": "home"}
        planned, sent = [
            await ann.post(f"/api/v1/jobs{at}", json=elsewhere) for at in ("/plan", "")
        ]
    assert (planned.status_code, sent.status_code) == (404, 404), "not hers"
    assert planned.json()["code"] == sent.json()["code"] == "organization.unknown"
    made = first if first.status_code == 201 else second
    await jobs.cancel_job(grid, made.json()["id"], "", "operator")
    assert (await any_town.submit("ann", "three")).status_code == 201

    for quota, code in (
        (Quota(steps=5), "quota.steps"),
        (Quota(tokens=100), "quota.tokens"),
        (Quota(bytes=100), "quota.bytes"),
    ):
        await commands.set_quota(grid, "lab", quota)
        async with any_town.http("ann") as ann:
            answer = await ann.post("/api/v1/jobs", json=body)
            plan = await ann.post("/api/v1/jobs/plan", json=body)
        assert (answer.status_code, answer.json()["code"]) == (409, code)
        if code == "quota.bytes":
            assert plan.json()["not_now"]["code"] == code
        else:
            assert (plan.status_code, plan.json()["detail"]) == (409, answer.json()["detail"])
    limit = await any_town.world.spec(snapshots=SnapshotSpec(keep=6))
    grid.settings = replace(grid.settings, max_snapshots=5)
    async with any_town.http("ann") as ann:
        for at in ("/plan", ""):
            answer = await ann.post(f"/api/v1/jobs{at}", json={"spec": to_plain(limit)})
            assert (answer.status_code, answer.json()["field"]) == (422, "snapshots.keep")
    async with any_town.http("ann") as ann:
        begun = await ann.post("/api/v1/blobs", json={"sha256": "ab" * 32, "size": 1000})
        assert begun.json()["code"] == "quota.bytes"
    found = await queries.show_organization(grid, await any_town.principal("vera"), "lab")
    assert found.usage.open_jobs == 1
    assert found.usage.bytes > 100
    assert found.quota == Quota(bytes=100)


# ------------------------------------------------------------------ who did what


async def test_the_audit_says_who_did_what_by_which_key(any_town: Town) -> None:
    grid = any_town.world.grid
    async with any_town.http("operator") as operator:
        await operator.put("/api/v1/organizations/lab/quota", json={"steps": 1000})
        job = (await any_town.submit("ann", "audited")).json()["id"]
        await operator.post(f"/api/v1/jobs/{job}/accept")
        await any_town.world.node("a")
        await any_town.world.settle()
        feed = (await operator.get("/api/v1/audit")).json()["items"]
        own = (await operator.get("/api/v1/audit?account=ann")).json()["items"]
        behind = await operator.get(f"/api/v1/audit?after={feed[-2]['event']['cursor']}")
    told = [(a["account"], a["event"]["kind"]) for a in feed]
    assert told == [
        ("operator", "organization.quota"),
        ("ann", "job.submitted"),
        ("operator", "task.queued"),
        ("operator", "job.queued"),
    ]
    assert feed[0]["event"]["data"]["quota"]["steps"] == 1000
    assert feed[1]["key"].startswith("ann (dak_")
    assert {a["account"] for a in own} == {"ann"}
    assert behind.json()["items"] == feed[-1:]
    names = (await queries.list_accounts(grid)).items
    assert {a.name for a in names} == {"operator", "ann", "bob", "carl", "nils", "vera"}


async def test_an_invite_lets_in_as_many_as_it_says(any_town: Town) -> None:
    world, grid = any_town.world, any_town.world.grid
    made = await credentials.create_invite(grid, "carl", trusted=True, uses=1, expires_s=100)
    world.invite = made.join_link.split("invite=")[1].split("&")[0]
    first = await world.node("first")
    assert first.end is None
    second = await world.node("second")
    assert second.end is not None
    assert second.end.code == "node.invite"
    await first.vanish()
    await first.connect()
    assert first.end is None, "a key that is known needs no invite"

    other = await credentials.create_invite(grid, "carl", trusted=True, uses=None, expires_s=None)
    world.invite = other.join_link.split("invite=")[1].split("&")[0]
    await credentials.revoke_invite(grid, other.invite.id)
    third = await world.node("third")
    assert third.end is not None
    with pytest.raises(NotFound):
        await credentials.revoke_invite(grid, "inv_nothing")
    page = await queries.show_account(grid, await any_town.principal("carl"), "carl")
    assert [n.name for n in page.nodes] == ["first"]


async def test_a_key_of_a_scope_is_narrow_in_the_database_too(town: Town) -> None:
    secret = await town.narrow("ann", Scope.READ)
    async with town.world.grid.db.read() as tx:
        row = await people.valid_key(tx, hash_secret(secret))
    assert row is not None
    assert row.scopes == ["read"]
    assert secret.startswith(row.prefix)
    assert len(row.prefix) < 12
