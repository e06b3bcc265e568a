"""Examples of the requests and answers about people; see ``api.examples``."""

from __future__ import annotations

from collections.abc import Mapping

from pydantic import BaseModel

from distribai.api import people
from distribai.api.answers import EventRecord
from distribai.core.people import Role, Scope

AT = 1_790_000_000.0
ANN = "acct_mfrggzdfmztwq2lk"
LAB = "org_nbswy3dpfqqho33s"

MEMBERSHIP = people.Membership(
    account_id=ANN, account="ann", organization_id=LAB, organization="lab", role="member"
)
KEY = people.Key(
    id="key_pjwgk43tnfxg64tf",
    account_id=ANN,
    name="nightly",
    prefix="dak_x1y2z3",
    scopes=["read", "submit"],
    created_at=AT,
    expires_at=AT + 2_592_000,
    revoked_at=None,
    last_used_at=AT + 60,
    valid=True,
)
INVITE = people.Invite(
    id="inv_o5xxe3deebuw4yls",
    account_id=ANN,
    account="ann",
    trusted=False,
    note="her two laptops",
    created_at=AT,
    expires_at=AT + 2_592_000,
    uses_left=2,
    revoked=False,
    valid=True,
)

MODELS: Mapping[str, BaseModel] = {
    "LoginBody": people.LoginBody(login="dol_...", name="ann's laptop"),
    "NameBody": people.NameBody(name="lab"),
    "RoleBody": people.RoleBody(role=Role.MEMBER),
    "PolicyBody": people.PolicyBody(accept="hours", hours="22:00-06:00"),
    "QuotaBody": people.QuotaBody(open_jobs=5, bytes=50_000_000_000),
    "KeyBody": people.KeyBody(
        name="nightly", scopes=[Scope.READ, Scope.SUBMIT], expires_s=2_592_000
    ),
    "InviteBody": people.InviteBody(account="ann", uses=2, note="her two laptops"),
    "Identity": people.Identity(
        id=ANN,
        name="ann",
        operator=False,
        key_id=KEY.id,
        scopes=KEY.scopes,
        memberships=[MEMBERSHIP],
    ),
    "AccountSummary": people.AccountSummary(
        id=ANN, name="ann", created_at=AT, closed_at=None, memberships=[MEMBERSHIP]
    ),
    "Account": people.Account(
        id=ANN,
        name="ann",
        created_at=AT,
        closed_at=None,
        memberships=[MEMBERSHIP],
        nodes=[
            people.NodeWork(
                id="node_o5xxe3deebuw4ylsmnuxa43p",
                name="ann's laptop",
                liveness="online",
                standing="probation",
                joined_at=AT,
                last_heard_at=AT + 3600,
                tasks=42,
                tokens=860_160,
                bytes_up=74_000_000,
                bytes_down=91_000_000,
            )
        ],
        tasks=42,
        tokens=860_160,
        bytes_up=74_000_000,
        bytes_down=91_000_000,
    ),
    "Organization": people.Organization(
        id=LAB,
        name="lab",
        created_at=AT,
        policy=people.Policy(accept="hours", hours="22:00-06:00"),
        quota=people.Quota(open_jobs=5, bytes=50_000_000_000),
        usage=people.Usage(open_jobs=1, bytes=412_345),
        members=[MEMBERSHIP],
    ),
    "Key": KEY,
    "NewKey": people.NewKey(key=KEY, secret="dak_x1y2z3...", account="ann"),
    "NewLogin": people.NewLogin(
        account_id=ANN, account="ann", login="dol_...", expires_at=AT + 604_800
    ),
    "Invite": INVITE,
    "NewInvite": people.NewInvite(
        invite=INVITE, join_link="distribai://grid.example/?grpc=...&http=...&invite=...&grid=..."
    ),
    "AuditRecord": people.AuditRecord(
        event=EventRecord(
            cursor="1.0.4711",
            at=AT,
            kind="member.set",
            job_id="",
            task_id="",
            node_id="",
            data={"organization": LAB, "account": ANN, "name": "ann", "role": "member"},
            account_id="acct_operator",
            key_id="key_mfrggzdfmztwq2lk",
        ),
        account="operator",
        key="this machine, at the first start (dop_a1b2c3...)",
    ),
}
"""By the model's name."""
