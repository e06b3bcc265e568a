"""The one standing invite of a grid, whichever of its replicas starts."""

from __future__ import annotations

import asyncio
import os
import shutil
from pathlib import Path

from distribai.orchestrator.fleet.tokens import INVITE_FILE, STANDING_INVITE, ensure_invite
from distribai.store.engine import Database
from distribai.store.statements import facts, invites
from tests.orchestrator.harness import World


async def standing(db: Database) -> tuple[int, str]:
    """How many invites there are, and which is the standing one."""
    async with db.read() as tx:
        found = await invites.invites_page(tx, 100)
        fact = await facts.get(tx, STANDING_INVITE)
    assert fact is not None
    return len(found), fact


def place(root: Path, name: str) -> Path:
    path = root / name
    path.mkdir()
    return path


async def test_a_replica_without_the_text_makes_no_second_invite(
    any_world: World, tmp_path: Path
) -> None:
    db, first = any_world.grid.db, any_world.root
    assert await ensure_invite(db, first, os.urandom) == any_world.invite
    other = place(tmp_path, "other")
    assert await ensure_invite(db, other, os.urandom) == ""
    assert not (other / INVITE_FILE).exists()
    assert (await standing(db))[0] == 1
    shutil.copy(first / INVITE_FILE, other / INVITE_FILE)
    assert await ensure_invite(db, other, os.urandom) == any_world.invite
    assert (await standing(db))[0] == 1


async def test_replicas_with_one_directory_of_keys_print_one_invite(
    any_world: World, tmp_path: Path
) -> None:
    db, keys = any_world.grid.db, place(tmp_path, "keys")
    async with db.write() as tx:
        assert await invites.revoke_invite(tx, (await standing(db))[1])
    one, two = place(tmp_path, "one"), place(tmp_path, "two")
    fresh = await ensure_invite(db, one, os.urandom, str(keys))
    assert fresh not in ("", any_world.invite)
    assert await ensure_invite(db, two, os.urandom, str(keys)) == fresh
    assert (keys / INVITE_FILE).read_text() == f"{fresh}\n"
    assert not list(one.iterdir()) + list(two.iterdir())
    assert (await standing(db))[0] == 2, "the revoked one, and one in its place"


async def test_of_replicas_that_start_together_one_makes_the_invite(
    any_world: World, tmp_path: Path
) -> None:
    db = any_world.grid.db
    async with db.write() as tx:
        assert await invites.revoke_invite(tx, (await standing(db))[1])
    places = [place(tmp_path, str(i)) for i in range(3)]
    made = await asyncio.gather(*(ensure_invite(db, p, os.urandom) for p in places))
    assert sorted(bool(text) for text in made) == [False, False, True]
    assert (await standing(db))[0] == 2


async def test_a_file_of_an_earlier_release_stays_the_invite(any_world: World) -> None:
    db = any_world.grid.db
    _, before = await standing(db)
    async with db.write() as tx:
        await facts.drop(tx, STANDING_INVITE)
    assert await ensure_invite(db, any_world.root, os.urandom) == any_world.invite
    assert await standing(db) == (1, before)
