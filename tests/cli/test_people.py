"""People as they are typed, against a real grid on a real port; and the page that tells of them."""

from __future__ import annotations

import asyncio
import json
import os
import random
import re
import shlex
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
import structlog

from distribai.client import AsyncClient, Client
from distribai.client import people as calls
from distribai.config import Home
from distribai.errors import Conflict, NotAllowed, NotFound
from distribai.orchestrator.context import Grid
from distribai.orchestrator.http.app import create_app
from distribai.orchestrator.people import keys
from distribai.sections import OrchestratorSettings
from distribai.store.blobs import BlobStore
from distribai.store.engine import Database
from distribai.wire.joinlink import JoinLink
from tests.cli.conftest import Run
from tests.http.serving import serving
from tests.store.databases import new_sqlite

PAGE = Path(__file__).parents[2] / "docs" / "how-to" / "people.md"


@pytest.fixture
def town(tmp_path: Path) -> Iterator[tuple[str, str]]:
    """The address of a grid on SQLite and its operator's first key."""
    root = tmp_path / "grid"
    root.mkdir()

    async def prepare() -> tuple[str, str]:
        url = await new_sqlite(root)
        db = Database(url, durable=False)
        token = await keys.ensure_operator_key(db, root, os.urandom)
        await db.close()
        return url, token

    url, token = asyncio.run(prepare())
    grid = Grid(
        db=Database(url, durable=False),  # its connections are made in the server's thread
        blobs=BlobStore.open(root / "blobs", root / "staging", max_bytes=1 << 24),
        settings=OrchestratorSettings(state_dir=root),
        clock=time.monotonic,
        entropy=random.Random(1).randbytes,
        grid_id="grid_test",
        join_link=str(JoinLink("here", "here:1", "here:2", "grid_test", "invite")),
    )
    before = structlog.get_config()  # other tests' server may be running beside this one
    structlog.configure(logger_factory=structlog.ReturnLoggerFactory())
    try:
        with serving(create_app(grid), grid.db.close) as address:
            yield address, token
    finally:
        structlog.configure(**before)


@pytest.fixture
def operator(offline: Run, town: tuple[str, str], monkeypatch: pytest.MonkeyPatch) -> Run:
    monkeypatch.setenv("DISTRIBAI_URL", town[0])
    monkeypatch.setenv("DISTRIBAI_TOKEN", town[1])
    return offline


def ok(run: Run, *words: str) -> str:
    done = run(*words)
    assert done.status == 0, (words, done.err)
    return done.out


def test_a_member_is_advised_what_a_member_can_do(
    operator: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = operator
    assert "distribai node start --join LINK" in run("nodes", "list").err
    ok(run, "team", "create", "lab")
    wrong = run("grid", "quota", "lab", "--steps", "-1")
    assert (wrong.status, "try: Give steps another value" in wrong.err) == (2, True), wrong.err
    login = ok(run, "account", "create", "ann").split("--token ")[1].strip()
    ok(run, "team", "add", "lab", "ann")
    (tmp_path / "text.txt").write_text("some words to train on\n" * 2000)
    create = ("job", "create", "--data", "text.txt", "--batch", "1", "--seq-len", "16")
    made = run(*create, "mine", "2")
    assert f"distribai job accept {made.out.strip()}" in made.err

    monkeypatch.delenv("DISTRIBAI_TOKEN")
    ok(run, "login", "--token", login)
    made = run(*create, "hers", "2")
    assert made.status == 0, made.err
    assert "ask one" in made.err
    why = ok(run, "job", "why", "hers")
    assert "try: Ask the grid's operator" in why
    assert "job accept" not in made.err + why
    nobody = run("nodes", "list").err
    assert "None of your machines has joined" in nobody
    assert "ask an operator for an invite" in " ".join(nobody.split())


def test_a_team_from_its_first_account_to_its_last_word(
    operator: Run, town: tuple[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    run = operator
    ok(run, "team", "create", "lab")
    login = ok(run, "account", "create", "ann").split("--token ")[1].strip()
    assert "ann as member" in ok(run, "team", "add", "lab", "ann")
    assert "ann as viewer" in ok(run, "team", "role", "lab", "ann", "viewer")
    ok(run, "team", "role", "lab", "ann", "member")
    assert "lab: ask" in ok(run, "grid", "policy", "lab")
    assert "at most 1.0M tokens" in ok(
        run, "grid", "policy", "lab", "size", "--max-tokens", "1000000"
    )
    assert "22:00-06:00 UTC" in ok(run, "grid", "policy", "lab", "hours", "--hours", "22:00-06:00")
    assert run("grid", "policy", "lab", "hours").status == 2
    ok(run, "grid", "quota", "lab", "--open-jobs", "3")
    told = json.loads(ok(run, "grid", "quota", "lab", "--steps", "1000", "--json"))
    assert (told["quota"]["open_jobs"], told["quota"]["steps"]) == (3, 1000)
    told = json.loads(ok(run, "grid", "quota", "lab", "--clear", "--steps", "9", "--json"))
    assert (told["quota"]["open_jobs"], told["quota"]["steps"]) == (None, 9)
    shown = ok(run, "team", "show", "lab")
    assert "ann" in shown
    assert "at most 9" in shown
    assert "member of lab" in ok(run, "account", "list")
    assert "lab" in ok(run, "team", "list")

    link = ok(run, "grid", "invite", "create", "ann", "--uses", "2", "--expires", "30d")
    assert 'distribai node start --join "distribai://here/?' in link
    (invite,) = json.loads(ok(run, "grid", "invite", "list", "--json"))
    assert (invite["account"], invite["uses_left"], invite["trusted"]) == ("ann", 2, False)
    assert "lets nobody in" in ok(run, "grid", "invite", "revoke", invite["id"])
    assert "over" in ok(run, "grid", "invite", "list")

    monkeypatch.delenv("DISTRIBAI_TOKEN")
    done = run("login", "--token", login)
    assert (done.status, "You are ann" in done.out) == (0, True), done.err
    assert login not in Home.find(os.environ).credentials.read_text()
    assert Home.find(os.environ).credentials.stat().st_mode & 0o077 == 0
    assert "member of lab" in ok(run, "account", "show")
    assert run("login", "--token", login).status == 4, "a login is good for once"
    assert "You are ann" not in run("login", "--token", "dak_forged").out
    assert run("account", "list").status == 4
    assert run("account", "show", "operator").status == 3

    secret = ok(run, "grid", "key", "create", "ci", "--scope", "read", "--expires", "1h").strip()
    key, *_ = json.loads(ok(run, "grid", "key", "list", "--json"))
    assert (key["name"], key["scopes"], key["valid"]) == ("ci", ["read"], True)
    assert secret.startswith(key["prefix"])
    assert "ci) is revoked" in ok(run, "grid", "key", "revoke", key["id"])
    assert "revoked" in ok(run, "grid", "key", "list")
    assert run("grid", "key", "create", "x", "--expires", "soon").status == 2

    monkeypatch.setenv("DISTRIBAI_TOKEN", town[1])
    feed = ok(run, "grid", "audit")
    assert re.search(r"organization\.policy .*operator by this machine", feed)
    assert re.search(r"key\.revoked .*ann by login on", feed)
    own = json.loads(ok(run, "grid", "audit", "--account", "ann", "--json"))
    assert [a["event"]["kind"] for a in own] == ["key.created", "key.created", "key.revoked"]
    assert "without ann" in ok(run, "team", "remove", "lab", "ann")
    assert "closed" in ok(run, "account", "close", "ann")
    monkeypatch.delenv("DISTRIBAI_TOKEN")
    assert run("account", "show").status == 4


def test_a_login_does_not_drop_the_key_of_this_machine_s_own_grid(
    operator: Run, town: tuple[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    path = Home.find(os.environ).credentials
    path.parent.mkdir(parents=True)
    kept = {"url": "http://127.0.0.1:1", "token": "dop_own", "state_dir": "/srv/grid"}
    path.write_text(json.dumps(kept))
    login = json.loads(ok(operator, "account", "create", "ann", "--json"))["login"]
    refused = operator("login", "--token", login)
    assert refused.status == 5
    assert "code: auth.kept" in refused.err
    assert "restored" not in refused.err
    assert "--replace" in refused.err
    assert json.loads(path.read_text()) == kept
    assert "You are ann" in ok(operator, "login", "--token", login, "--replace")


def test_a_member_says_for_which_organization(operator: Run, tmp_path: Path) -> None:
    ok(operator, "team", "create", "lab")
    ok(operator, "grid", "policy", "lab", "always")
    (tmp_path / "text.txt").write_text("some words in a line\n" * 2000)
    words = ["job", "create", "mine", "10", "--data", "text.txt", "--seq-len", "16"]
    words += ["--organization"]
    done = operator(*words, "lab")
    assert (done.status, "Accepted" in done.err) == (0, True), done.err
    assert operator(*words, "nowhere").status == 3


async def test_the_awaited_client_makes_the_same_calls(town: tuple[str, str]) -> None:
    url, token = town
    async with AsyncClient(url, token) as client:
        made = await client.send(calls.create_organization("lab"))
        assert (await client.send(calls.organization("lab"))).id == made.id
        assert (await client.send(calls.me())).operator
        with pytest.raises(NotFound):
            await client.send(calls.organization("a b"))


def test_the_page_s_example_does_what_it_says(
    operator: Run, town: tuple[str, str], capsys: pytest.CaptureFixture[str]
) -> None:
    text = PAGE.read_text(encoding="utf-8")
    (example,) = re.findall(r"```python\n(.*?)```", text, re.DOTALL)
    names: dict[str, object] = {"URL": town[0], "KEY": town[1]}
    exec(compile(example, str(PAGE), "exec"), names)  # the page is part of this repository
    with Client(*town) as client:
        lab = client.people.organization("lab")
        assert (lab.policy.accept, lab.quota.open_jobs) == ("hours", 5)
        assert {m.account: m.role for m in lab.members} == {"ann": "member"}
        with pytest.raises(Conflict):
            client.people.create_organization("lab")
    with Client(town[0], str(names["secret"])) as client, pytest.raises(NotAllowed):
        client.people.accounts()


def test_the_page_s_command_lines_run_in_their_order(operator: Run) -> None:
    section = PAGE.read_text(encoding="utf-8").split("## From nothing to a member", 1)[1]
    lines = re.findall(r"^    distribai (.*)$", section.split("\n## ", 1)[0], re.MULTILINE)
    # What ann types on her machine has a placeholder in it, and is tried above.
    lines = [line for line in lines if "grid.example" not in line]
    assert len(lines) > 4
    for line in lines:
        ok(operator, *shlex.split(line, comments=True))
