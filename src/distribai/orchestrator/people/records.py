"""What is told of people: frozen, plain values, as ``orchestrator.records``."""

from __future__ import annotations

from dataclasses import dataclass

from distribai.core.people import Policy, Quota, Usage
from distribai.orchestrator.records import EventRecord


@dataclass(frozen=True, slots=True)
class MemberRecord:
    """One membership, with both sides by id and name."""

    account_id: str
    account: str
    organization_id: str
    organization: str
    role: str


@dataclass(frozen=True, slots=True)
class AccountSummary:
    """An account as one line of a list."""

    id: str
    name: str
    created_at: float
    closed_at: float | None
    memberships: tuple[MemberRecord, ...]


@dataclass(frozen=True, slots=True)
class NodeWork:
    """What one machine of an account did: tasks that were accepted, target tokens in them, bytes
    that it moved, up from the node."""

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


@dataclass(frozen=True, slots=True)
class AccountRecord:
    """An account's own page: what it is where, its machines, and their work in all."""

    id: str
    name: str
    created_at: float
    closed_at: float | None
    memberships: tuple[MemberRecord, ...]
    nodes: tuple[NodeWork, ...]
    tasks: int
    tokens: int
    bytes_up: int
    bytes_down: int


@dataclass(frozen=True, slots=True)
class Identity:
    """Who asks, by which key, and what that may do."""

    id: str
    name: str
    operator: bool
    key_id: str
    scopes: tuple[str, ...]
    memberships: tuple[MemberRecord, ...]


@dataclass(frozen=True, slots=True)
class OrganizationRecord:
    """An organization with its rules, what it has of what they limit, and its members."""

    id: str
    name: str
    created_at: float
    policy: Policy
    quota: Quota
    usage: Usage
    members: tuple[MemberRecord, ...]


@dataclass(frozen=True, slots=True)
class KeyRecord:
    """A key without its secret, of which only ``prefix`` is shown. ``valid``: it opens something
    now."""

    id: str
    account_id: str
    name: str
    prefix: str
    scopes: tuple[str, ...]
    created_at: float
    expires_at: float | None
    revoked_at: float | None
    last_used_at: float | None
    valid: bool


@dataclass(frozen=True, slots=True)
class NewKey:
    """A key that was just made. ``secret`` is told only now."""

    key: KeyRecord
    secret: str
    account: str


@dataclass(frozen=True, slots=True)
class NewLogin:
    """A one-time login for an account, told only now; it lets in once, until ``expires_at``."""

    account_id: str
    account: str
    login: str
    expires_at: float


@dataclass(frozen=True, slots=True)
class InviteRecord:
    """An invite without its secret. ``trusted`` None: as the grid's mode; ``uses_left`` None: any
    number; ``valid``: it lets nodes in."""

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


@dataclass(frozen=True, slots=True)
class NewInvite:
    """An invite that was just made, and the join link with it, which is told only now."""

    invite: InviteRecord
    join_link: str


@dataclass(frozen=True, slots=True)
class AuditRecord:
    """A change that a person asked for: the event, and the names of the account and its key."""

    event: EventRecord
    account: str
    key: str
