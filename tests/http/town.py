"""A real grid with people in it: two organizations that must not know of each other.

``ann`` is a member of lab and ``vera`` a viewer, ``carl`` a contributor with a machine; ``bob`` is
a member of mill; ``nils`` is in no organization.
"""

from __future__ import annotations

import hashlib
import os
from dataclasses import dataclass, field, replace
from pathlib import Path

import httpx

from distribai.core.people import OPERATOR, Principal, Role, Scope
from distribai.core.plain import to_plain
from distribai.core.spec import BlobRef
from distribai.orchestrator import callers
from distribai.orchestrator.people import commands, credentials, keys
from distribai.wire.joinlink import JoinLink
from tests.http.interface import caller
from tests.orchestrator.harness import FakeNode, World

ROLES = {
    "ann": ("lab", Role.MEMBER),
    "vera": ("lab", Role.VIEWER),
    "carl": ("lab", Role.CONTRIBUTOR),
    "bob": ("mill", Role.MEMBER),
}


@dataclass
class Town:
    """The grid, its people's keys and ids, and everything else that has an id."""

    world: World
    keys: dict[str, str] = field(default_factory=dict)
    ids: dict[str, str] = field(default_factory=dict)

    @classmethod
    async def build(cls, world: World) -> Town:
        """Settle the people in a grid."""
        town = cls(world)
        grid = world.grid
        link = JoinLink("here", "here:1", "here:2", "grid_test", world.invite)
        grid.join_link = str(link)
        town.keys["operator"] = await keys.ensure_operator_key(grid.db, world.root, os.urandom)
        town.ids["operator"] = OPERATOR
        for name in ("lab", "mill"):
            town.ids[name] = await commands.create_organization(grid, name)
        for name in (*ROLES, "nils"):
            made = await commands.create_account(grid, name)
            town.ids[name] = made.account_id
            town.keys[name] = (await credentials.log_in(grid, made.login, name)).secret
        for name, (team, role) in ROLES.items():
            await commands.set_role(grid, team, name, role)
        return town

    def http(self, name: str = "") -> httpx.AsyncClient:
        """The interface as somebody; nobody by default."""
        return self.http_as(self.keys[name] if name else "")

    def http_as(self, token: str) -> httpx.AsyncClient:
        """The interface with a token."""
        return caller(self.world.grid, token)

    async def node_of(self, name: str) -> FakeNode:
        """A machine of somebody's, which joins by an invite for it."""
        made = await credentials.create_invite(
            self.world.grid, name, trusted=False, uses=1, expires_s=None
        )
        before, self.world.invite = (
            self.world.invite,
            made.join_link.split("invite=")[1].split("&")[0],
        )
        try:
            return await self.world.node(f"{name}s-machine")
        finally:
            self.world.invite = before

    async def narrow(self, name: str, *scopes: Scope) -> str:
        """A key of somebody's with these scopes alone."""
        principal = await callers.verify_token(self.world.grid, self.keys[name])
        return (await credentials.create_key(self.world.grid, principal, "narrow", scopes)).secret

    async def principal(self, name: str) -> Principal:
        """Who somebody is now."""
        return await callers.verify_token(self.world.grid, self.keys[name])

    async def upload(self, client: httpx.AsyncClient, data: bytes) -> str:
        """Send bytes whole; their SHA-256."""
        sha256 = hashlib.sha256(data).hexdigest()
        begun = await client.post("/api/v1/blobs", json={"sha256": sha256, "size": len(data)})
        assert begun.status_code in (200, 201), begun.text
        if not begun.json()["complete"]:
            path = f"/api/v1/blobs/uploads/{begun.json()['upload_id']}"
            done = await client.patch(path, content=data, headers={"Upload-Offset": "0"})
            assert done.status_code == 201, done.text
        return sha256

    async def submit(self, name: str, job: str, **changes: object) -> httpx.Response:
        """Somebody uploads a text and submits a small job."""
        text = "".join(f"{job}: line {i} of the text\n" for i in range(200)).encode()
        async with self.http(name) as client:
            ref = BlobRef(await self.upload(client, text), len(text))
            spec = await self.world.spec(name=job, **changes)
            spec = replace(spec, data=replace(spec.data, files=(ref,)))
            return await client.post("/api/v1/jobs", json={"spec": to_plain(spec)})


async def town_on(root: Path, url: str) -> Town:
    """A town on a database."""
    return await Town.build(await World(root, url).open())
