"""Requests and answers about people: accounts, organizations, keys, invites, the audit feed."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import BaseModel, ConfigDict, Field

from distribai.api.answers import Answer, EventRecord
from distribai.core.people import Role, Scope

YEARS_S = 100 * 366 * 86400.0
"""No key or invite is given a date beyond that many seconds from now."""

MAX_FIGURE = 2**63 - 1

Figure = Annotated[int | None, Field(ge=0, le=MAX_FIGURE)]
Seconds = Annotated[float | None, Field(gt=0, le=YEARS_S)]
Label = Annotated[str, Field(min_length=1, max_length=100)]

# ------------------------------------------------------------------ requests


class _Body(BaseModel):
    model_config = ConfigDict(extra="forbid")


class LoginBody(_Body):
    """A one-time login, and what the key that it is exchanged for shall be called."""

    login: Annotated[str, Field(min_length=1, max_length=200)]
    name: Label = "login"


class NameBody(_Body):
    """The name of a new account or organization: lower-case letters, digits, dots, hyphens."""

    name: Annotated[str, Field(max_length=100)]


class RoleBody(_Body):
    """What an account shall be in an organization."""

    role: Role


class PolicyBody(_Body):
    """When jobs are accepted at once: ``ask`` never, ``always``, by ``size`` (with one limit or
    both), by ``hours`` (of the day in UTC, like ``22:00-06:00``)."""

    accept: Literal["ask", "always", "size", "hours"]
    max_parameters: Figure = None
    max_tokens: Figure = None
    hours: Annotated[str, Field(max_length=20)] = ""


class QuotaBody(_Body):
    """What an organization may have; null does not limit it."""

    open_jobs: Figure = None
    steps: Figure = None
    tokens: Figure = None
    bytes: Figure = None


class KeyBody(_Body):
    """A key to be made. Without scopes it gets those of the key that asks, without ``expires_s``
    (seconds from now) its date too."""

    name: Label
    scopes: list[Scope] = []
    expires_s: Seconds = None


class InviteBody(_Body):
    """An invite to be made: for whose nodes, whether they are trusted from the beginning, how many
    it lets in and for how many seconds (null: no limit)."""

    account: Annotated[str, Field(max_length=64)]
    trusted: bool = False
    uses: Annotated[int | None, Field(ge=1, le=1_000_000)] = None
    expires_s: Seconds = None
    note: Annotated[str, Field(max_length=100)] = ""


# ------------------------------------------------------------------ answers


class Membership(Answer):
    """What an account is in an organization."""

    account_id: str
    account: str
    organization_id: str
    organization: str
    role: str


class Identity(Answer):
    """Who asks, by which key, and what that may do."""

    id: str
    name: str
    operator: bool
    key_id: str
    scopes: list[str]
    memberships: list[Membership]


class AccountSummary(Answer):
    """An account as one line of a list."""

    id: str
    name: str
    created_at: float
    closed_at: float | None
    memberships: list[Membership]


class NodeWork(Answer):
    """What one machine of an account did: accepted tasks, target tokens in them, bytes that it
    moved; *up* is from the node."""

    id: str
    name: str
    liveness: str
    standing: str
    joined_at: float
    last_heard_at: float
    tasks: int
    tokens: int
    bytes_up: int
    bytes_down: int


class Account(Answer):
    """An account's page: what it is where, its machines, and their work in all."""

    id: str
    name: str
    created_at: float
    closed_at: float | None
    memberships: list[Membership]
    nodes: list[NodeWork]
    tasks: int
    tokens: int
    bytes_up: int
    bytes_down: int


class Policy(Answer):
    """When an organization's jobs are accepted at once."""

    accept: str
    max_parameters: int | None = None
    max_tokens: int | None = None
    hours: str = ""


class Quota(Answer):
    """What an organization may have at most."""

    open_jobs: int | None = None
    steps: int | None = None
    tokens: int | None = None
    bytes: int | None = None


class Usage(Answer):
    """What an organization has of what its quota limits."""

    open_jobs: int
    bytes: int


class Organization(Answer):
    """An organization with its rules and its members."""

    id: str
    name: str
    created_at: float
    policy: Policy
    quota: Quota
    usage: Usage
    members: list[Membership]


class Key(Answer):
    """A key without its secret. ``valid``: it opens something now."""

    id: str
    account_id: str
    name: str
    prefix: str
    scopes: list[str]
    created_at: float
    expires_at: float | None
    revoked_at: float | None
    last_used_at: float | None
    valid: bool


class NewKey(Answer):
    """A key that was just made; ``secret`` is told only now."""

    key: Key
    secret: str
    account: str


class NewLogin(Answer):
    """A one-time login, told only now; it lets in once, until ``expires_at``."""

    account_id: str
    account: str
    login: str
    expires_at: float


class Invite(Answer):
    """An invite without its secret. ``trusted`` null: as the grid's mode; ``valid``: it lets nodes
    in."""

    id: str
    account_id: str
    account: str
    trusted: bool | None
    note: str
    created_at: float
    expires_at: float | None
    uses_left: int | None
    revoked: bool
    valid: bool


class NewInvite(Answer):
    """An invite that was just made, and the join link with it, told only now."""

    invite: Invite
    join_link: str


class AuditRecord(Answer):
    """A change that a person asked for: the event, the account's name, the key's name."""

    event: EventRecord
    account: str
    key: str
