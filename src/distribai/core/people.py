"""Who may do what: roles, scopes, an organization's acceptance policy and its quotas.

Everything here is pure: what an account may see and change follows from its roles and its key's
scopes alone, whether a job is accepted at once from the policy, the job's size and the time of day.
Every decision comes with its reason.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Final, Literal

from distribai.errors import UsageError

HOME: Final = "org_home"
"""The operator's own organization; jobs of grids that knew no organizations belong to it."""

HOME_NAME: Final = "home"

OPERATOR: Final = "acct_operator"
"""The account that is made with the grid; nodes of earlier grids belong to it."""

OPERATOR_NAME: Final = "operator"

NAME: Final = re.compile(r"[a-z0-9][a-z0-9.-]{0,39}")
"""Names of accounts and organizations. There is no underscore in them, so none looks like an id."""

DAY_MINUTES: Final = 24 * 60


class Role(StrEnum):
    """What an account is in an organization."""

    OPERATOR = "operator"
    MEMBER = "member"
    VIEWER = "viewer"
    CONTRIBUTOR = "contributor"


ROLES: Mapping[Role, str] = {
    Role.OPERATOR: "Decides about jobs, nodes and people of the whole grid, and sees everything; "
    "given in the organization `home` alone.",
    Role.MEMBER: "Submits jobs to the organization, changes them, and sees all of its jobs.",
    Role.VIEWER: "Sees the organization's jobs, their weights and their logs, and changes nothing.",
    Role.CONTRIBUTOR: "Sees the account's own nodes and what they did, and no job's data.",
}
"""Every role in one sentence, for the docs."""


class Scope(StrEnum):
    """What a key may be used for, within what its account may do."""

    READ = "read"
    SUBMIT = "submit"
    KEYS = "keys"
    OPERATE = "operate"
    METRICS = "metrics"


SCOPES: Mapping[Scope, str] = {
    Scope.READ: "Look at what the account may see.",
    Scope.SUBMIT: "Upload, submit and change jobs, ask for samples.",
    Scope.KEYS: "Make and revoke keys of the account.",
    Scope.OPERATE: "The operator's commands: decide about jobs, people, policies and invites.",
    Scope.METRICS: "Read /metrics, with the operator's role.",
}
"""Every scope in one sentence, for the docs."""

ALL_SCOPES: Final = frozenset(Scope)


@dataclass(frozen=True, slots=True)
class Principal:
    """Who a bearer token belongs to: an account by one of its keys, or a node by its session.

    ``roles`` are the account's, by organization. Both :meth:`sees` and :meth:`works_in` follow
    from the roles; ``scopes`` narrow what the key may be used for.
    """

    kind: Literal["account", "node"]
    node_id: str = ""
    account_id: str = ""
    name: str = ""
    key_id: str = ""
    roles: Mapping[str, Role] = field(default_factory=dict)
    scopes: frozenset[Scope] = frozenset()

    @property
    def title(self) -> str:
        """How events and job records call it: ``operator``, ``operator eve``, ``member ann``."""
        role = "operator" if self.operator else "member"
        return role if self.name == role else f"{role} {self.name}"

    @property
    def owner(self) -> str:
        """Whose idempotency keys and limits these are. The first operator's keys of earlier grids
        stand under its name."""
        if self.kind == "node":
            return self.node_id
        return OPERATOR_NAME if self.account_id == OPERATOR else self.account_id

    @property
    def operator(self) -> bool:
        """Whether it is one of the grid's operators."""
        return self.kind == "account" and self.roles.get(HOME) is Role.OPERATOR

    def sees(self) -> frozenset[str] | None:
        """The organizations whose jobs it may look at; None: all."""
        return self._where(Role.MEMBER, Role.VIEWER)

    def works_in(self) -> frozenset[str] | None:
        """The organizations that it may submit to and whose jobs it may change; None: all."""
        return self._where(Role.MEMBER)

    def _where(self, *roles: Role) -> frozenset[str] | None:
        if self.operator:
            return None
        return frozenset(o for o, role in self.roles.items() if role in roles)


def check_name(name: str, what: str) -> str:
    """``name``, if an account or organization may have it.

    Raises:
        UsageError: ``people.name``.
    """
    if NAME.fullmatch(name) is None:
        raise UsageError(
            "people.name",
            f"{name[:60]!r} cannot be the name of an {what}.",
            "Take up to 40 lower-case letters, digits, dots and hyphens.",
            field="name",
        )
    return name


def check_role(role: Role, organization_id: str) -> None:
    """Refuse an operator outside of ``home``: the role is the whole grid's.

    Raises:
        UsageError: ``people.role``.
    """
    if role is Role.OPERATOR and organization_id != HOME:
        raise UsageError(
            "people.role",
            "An operator is an operator of the whole grid, not of one organization.",
            f"Give the role in the organization `{HOME_NAME}`.",
            field="role",
        )


# ------------------------------------------------------------------ acceptance


@dataclass(frozen=True, slots=True)
class Policy:
    """When an organization's jobs are accepted without asking the operator.

    Attributes:
        accept: ``ask`` never, ``always``, by ``size``, by ``hours``.
        max_parameters: with ``size``: parameters of the model at most; None: any number.
        max_tokens: with ``size``: target tokens of the job at most, with as many workers as it
            asks for (``workers_max``); None: any number.
        hours: with ``hours``: the time of day in UTC, ``22:00-06:00``, in which a job must be
            submitted.
    """

    accept: Literal["ask", "always", "size", "hours"] = "ask"
    max_parameters: int | None = None
    max_tokens: int | None = None
    hours: str = ""


@dataclass(frozen=True, slots=True)
class Asked:
    """How large a job is: parameters, inner steps of each worker, and target tokens with as many
    workers as it asks for."""

    parameters: int
    steps: int
    tokens: int


@dataclass(frozen=True, slots=True)
class Verdict:
    """Whether a job is accepted at once, and the sentence that says why or why not."""

    accepted: bool
    reason: str


def check_policy(policy: Policy) -> Policy:
    """The policy, if it says something that can be followed.

    Raises:
        UsageError: ``people.policy``: a figure is missing, or one is given that would do nothing.
    """
    sized = policy.max_parameters is not None or policy.max_tokens is not None
    if policy.accept == "size" and not sized:
        raise _policy("by size it needs a limit: of parameters, of tokens, or both")
    if policy.accept != "size" and sized:
        raise _policy(f"limits of size do nothing with `{policy.accept}`")
    if policy.accept != "hours" and policy.hours:
        raise _policy(f"hours do nothing with `{policy.accept}`")
    if policy.accept == "hours":
        parse_hours(policy.hours)
    if any(n is not None and n < 1 for n in (policy.max_parameters, policy.max_tokens)):
        raise _policy("limits are positive")
    return policy


def _policy(what: str) -> UsageError:
    return UsageError(
        "people.policy",
        f"The policy cannot be followed: {what}.",
        "`always`; `size` with max_tokens or max_parameters; `hours` with 22:00-06:00; or `ask`.",
        field="policy",
    )


def parse_hours(text: str) -> tuple[int, int]:
    """First minute of the day and the one after the last, of ``22:00-06:00``; the second is the
    smaller one when midnight lies between.

    Raises:
        UsageError: ``people.policy``.
    """
    match = re.fullmatch(r"([01]\d|2[0-3]):([0-5]\d)-([01]\d|2[0-3]):([0-5]\d)", text)
    if match is None:
        raise _policy(f"{text[:40]!r} are no hours")
    a, b, c, d = map(int, match.groups())
    if (a, b) == (c, d):
        raise _policy("the hours begin where they end")
    return 60 * a + b, 60 * c + d


def decide(policy: Policy, asked: Asked, now: float) -> Verdict:
    """Whether a job is accepted at once; the reason speaks of the policy as "it".

    Args:
        policy: of the job's organization; see :func:`check_policy`.
        asked: the job's size.
        now: seconds since 1970.
    """
    if policy.accept == "always":
        return Verdict(True, "it accepts every job")
    if policy.accept == "size":
        return _by_size(policy, asked)
    if policy.accept == "hours":
        first, last = parse_hours(policy.hours)
        minute = int(now // 60) % DAY_MINUTES
        inside = first <= minute < last if first < last else minute >= first or minute < last
        when = f"{minute // 60:02d}:{minute % 60:02d}"
        return Verdict(inside, f"it accepts jobs at {policy.hours} UTC, and it was {when}")
    return Verdict(False, "it leaves every job to the operator")


def _by_size(policy: Policy, asked: Asked) -> Verdict:
    limits = (
        ("parameters", asked.parameters, policy.max_parameters),
        ("tokens", asked.tokens, policy.max_tokens),
    )
    for what, wanted, limit in limits:
        if limit is not None and wanted > limit:
            reason = f"it accepts jobs of at most {limit} {what}, and this has {wanted}"
            return Verdict(False, reason)
    told = " and ".join(f"{limit} {what}" for what, _, limit in limits if limit is not None)
    return Verdict(True, f"it accepts jobs of at most {told}")


# ------------------------------------------------------------------ quotas


@dataclass(frozen=True, slots=True)
class Quota:
    """What an organization may have at most; None: as much as it likes.

    Attributes:
        open_jobs: jobs that have not ended.
        steps: inner steps of one job.
        tokens: target tokens of one job, with as many workers as it asks for.
        bytes: what its members have uploaded and its jobs have stored, in all.
    """

    open_jobs: int | None = None
    steps: int | None = None
    tokens: int | None = None
    bytes: int | None = None


@dataclass(frozen=True, slots=True)
class Usage:
    """What an organization has now: open jobs, and bytes as in :class:`Quota`."""

    open_jobs: int
    bytes: int


@dataclass(frozen=True, slots=True)
class Excess:
    """A quota that a job would break: its code, a sentence and what to try. ``passing``: it is
    full for now; the same job may fit later."""

    code: str
    reason: str
    hint: str
    passing: bool = False


def check_quota(quota: Quota) -> Quota:
    """The quota, if its figures are possible.

    Raises:
        UsageError: ``people.quota``: a figure is negative.
    """
    figures = (quota.open_jobs, quota.steps, quota.tokens, quota.bytes)
    if any(figure is not None and figure < 0 for figure in figures):
        raise UsageError("people.quota", "A quota is never negative.", "0 allows nothing.")
    return quota


def over_quota(quota: Quota, organization: str, usage: Usage, asked: Asked) -> Excess | None:
    """The first quota that one more job of this size would break, those first that it would break
    at any time; None when it may be submitted."""
    if quota.steps is not None and asked.steps > quota.steps:
        reason = f"{organization} may ask for {quota.steps} steps in a job; this has {asked.steps}"
        return Excess("quota.steps", reason, "Take fewer steps, or ask the operator.")
    if quota.tokens is not None and asked.tokens > quota.tokens:
        reason = (
            f"{organization} may ask for {quota.tokens} tokens in a job; this may take "
            f"{asked.tokens} with all the workers that it asks for"
        )
        hint = "Take fewer steps, a smaller batch or `workers_max`, or ask the operator."
        return Excess("quota.tokens", reason, hint)
    if quota.open_jobs is not None and usage.open_jobs >= quota.open_jobs:
        reason = f"{organization} may have {quota.open_jobs} open jobs, and has {usage.open_jobs}"
        return Excess("quota.jobs", reason, "Wait until one ends, or cancel one.", passing=True)
    return over_bytes(quota, organization, usage)


def over_bytes(quota: Quota, organization: str, usage: Usage, more: int = 0) -> Excess | None:
    """The quota of bytes, if it is broken, or would be by ``more`` bytes."""
    if quota.bytes is None or usage.bytes + more <= quota.bytes:
        return None
    reason = f"{organization} may store {quota.bytes} bytes, and has {usage.bytes}"
    if more:
        reason += f"; this file has {more}"
    return Excess("quota.bytes", reason, "Ask the operator for more.", passing=True)
