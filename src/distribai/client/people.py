"""Requests about people: each a value for both kinds of client, and :class:`People` for the
blocking one."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, TypeVar, cast

from distribai.api import people as api
from distribai.api.answers import Listing, Page
from distribai.client import http
from distribai.client.calls import Call, segment

T = TypeVar("T")

V1 = "/api/v1"


def _account(ref: str, tail: str = "") -> str:
    return f"{V1}/accounts/{segment(ref, 'account', 'distribai account list')}{tail}"


def _organization(ref: str, tail: str = "") -> str:
    return f"{V1}/organizations/{segment(ref, 'organization', 'distribai team list')}{tail}"


def once(key: str) -> dict[str, str]:
    """The header that makes a request one thing however often it is sent; none for no key."""
    return {"Idempotency-Key": key} if key else {}


def log_in(login: str, name: str) -> Call[api.NewKey]:
    """Exchange a one-time login for a key."""
    return Call("POST", f"{V1}/login", api.NewKey, body={"login": login, "name": name})


def me() -> Call[api.Identity]:
    """Who asks."""
    return Call("GET", f"{V1}/me", api.Identity)


def accounts(cursor: str = "") -> Call[Page[api.AccountSummary]]:
    """One page of accounts."""
    return Call("GET", f"{V1}/accounts", Page[api.AccountSummary], {"cursor": cursor})


def create_account(name: str, idempotency_key: str = "") -> Call[api.NewLogin]:
    """Make an account, and a one-time login for it."""
    return Call(
        "POST", f"{V1}/accounts", api.NewLogin, body={"name": name}, headers=once(idempotency_key)
    )


def account(ref: str) -> Call[api.Account]:
    """An account's page."""
    return Call("GET", _account(ref), api.Account)


def new_login(ref: str) -> Call[api.NewLogin]:
    """A fresh one-time login for an account."""
    return Call("POST", _account(ref, "/login"), api.NewLogin)


def close_account(ref: str) -> Call[api.Account]:
    """Close an account."""
    return Call("POST", _account(ref, "/close"), api.Account)


def organizations(cursor: str = "") -> Call[Page[api.Organization]]:
    """One page of the organizations that the caller may see."""
    return Call("GET", f"{V1}/organizations", Page[api.Organization], {"cursor": cursor})


def create_organization(name: str, idempotency_key: str = "") -> Call[api.Organization]:
    """Make an organization."""
    return Call(
        "POST",
        f"{V1}/organizations",
        api.Organization,
        body={"name": name},
        headers=once(idempotency_key),
    )


def organization(ref: str) -> Call[api.Organization]:
    """One organization."""
    return Call("GET", _organization(ref), api.Organization)


def set_role(organization: str, account: str, role: str) -> Call[api.Organization]:
    """Add a member, or change its role."""
    who = segment(account, "account", "distribai account list")
    path = _organization(organization, f"/members/{who}")
    return Call("PUT", path, api.Organization, body={"role": role})


def remove_member(organization: str, account: str) -> Call[api.Organization]:
    """Remove a member."""
    who = segment(account, "account", "distribai account list")
    return Call("DELETE", _organization(organization, f"/members/{who}"), api.Organization)


def set_policy(
    organization: str,
    accept: str,
    *,
    max_parameters: int | None = None,
    max_tokens: int | None = None,
    hours: str = "",
) -> Call[api.Organization]:
    """Set when an organization's jobs are accepted at once."""
    body = {
        "accept": accept,
        "max_parameters": max_parameters,
        "max_tokens": max_tokens,
        "hours": hours,
    }
    return Call("PUT", _organization(organization, "/policy"), api.Organization, body=body)


def set_quota(
    organization: str,
    *,
    open_jobs: int | None = None,
    steps: int | None = None,
    tokens: int | None = None,
    bytes: int | None = None,
) -> Call[api.Organization]:
    """Set what an organization may have; what is not given is not limited."""
    body = {"open_jobs": open_jobs, "steps": steps, "tokens": tokens, "bytes": bytes}
    return Call("PUT", _organization(organization, "/quota"), api.Organization, body=body)


def keys(account: str = "", cursor: str = "") -> Call[Page[api.Key]]:
    """One page of the caller's keys, or for operators of another account's."""
    return Call("GET", f"{V1}/keys", Page[api.Key], {"account": account, "cursor": cursor})


def create_key(
    name: str,
    scopes: Sequence[str] = (),
    expires_s: float | None = None,
    idempotency_key: str = "",
) -> Call[api.NewKey]:
    """Make a key of the caller's account."""
    body = {"name": name, "scopes": list(scopes), "expires_s": expires_s}
    return Call("POST", f"{V1}/keys", api.NewKey, body=body, headers=once(idempotency_key))


def revoke_key(key_id: str) -> Call[api.Key]:
    """Revoke a key."""
    path = f"{V1}/keys/{segment(key_id, 'key', 'distribai grid key list')}"
    return Call("DELETE", path, api.Key)


def invites(cursor: str = "") -> Call[Page[api.Invite]]:
    """One page of invites."""
    return Call("GET", f"{V1}/invites", Page[api.Invite], {"cursor": cursor})


def create_invite(
    account: str,
    *,
    trusted: bool = False,
    uses: int | None = None,
    expires_s: float | None = None,
    note: str = "",
    idempotency_key: str = "",
) -> Call[api.NewInvite]:
    """Make an invite for an account's machines."""
    body = {
        "account": account,
        "trusted": trusted,
        "uses": uses,
        "expires_s": expires_s,
        "note": note,
    }
    return Call("POST", f"{V1}/invites", api.NewInvite, body=body, headers=once(idempotency_key))


def revoke_invite(invite_id: str) -> Call[api.Invite]:
    """Revoke an invite."""
    path = f"{V1}/invites/{segment(invite_id, 'invite', 'distribai grid invite list')}"
    return Call("DELETE", path, api.Invite)


def audit(
    after: str = "", wait: float = 0.0, account: str = "", limit: int = 200
) -> Call[Listing[api.AuditRecord]]:
    """What people did behind ``after``; waits for something up to ``wait`` seconds."""
    params: dict[str, str | int | float] = {
        "after": after,
        "wait": wait,
        "limit": limit,
        "account": account,
    }
    return Call("GET", f"{V1}/audit", Listing[api.AuditRecord], params, patience=wait)


class People:
    """The same requests, made at once by a blocking client's ``send``."""

    def __init__(self, send: Callable[[Call[Any]], Any]) -> None:
        self._send = send

    def _ask(self, call: Call[T]) -> T:
        return cast(T, self._send(call))

    def _all(self, call: Callable[[str], Call[Page[T]]]) -> list[T]:
        """The entries of all pages."""
        return list(http.pages(self._send, call))

    def log_in(self, login: str, name: str = "login") -> api.NewKey:
        """Exchange a one-time login for a key, whose secret is told only now."""
        return self._ask(log_in(login, name))

    def me(self) -> api.Identity:
        """Who asks, and what that may do."""
        return self._ask(me())

    def accounts(self) -> list[api.AccountSummary]:
        """All accounts."""
        return self._all(accounts)

    def create_account(self, name: str) -> api.NewLogin:
        """Make an account, and a one-time login to hand to its owner."""
        return self._ask(create_account(name))

    def account(self, ref: str) -> api.Account:
        """An account's page (id or name): its machines, and what they did."""
        return self._ask(account(ref))

    def new_login(self, ref: str) -> api.NewLogin:
        """A fresh one-time login for an account."""
        return self._ask(new_login(ref))

    def close_account(self, ref: str) -> api.Account:
        """Close an account: its keys and invites let nobody in any more."""
        return self._ask(close_account(ref))

    def organizations(self) -> list[api.Organization]:
        """The organizations that the caller is in; for operators all."""
        return self._all(organizations)

    def create_organization(self, name: str) -> api.Organization:
        """Make an organization."""
        return self._ask(create_organization(name))

    def organization(self, ref: str) -> api.Organization:
        """One organization (id or name)."""
        return self._ask(organization(ref))

    def set_role(self, organization: str, account: str, role: str) -> api.Organization:
        """Add a member, or change its role: operator, member, viewer or contributor."""
        return self._ask(set_role(organization, account, role))

    def remove_member(self, organization: str, account: str) -> api.Organization:
        """Remove a member."""
        return self._ask(remove_member(organization, account))

    def set_policy(self, organization: str, accept: str, **limits: Any) -> api.Organization:
        """Set the acceptance policy; ``limits`` as in :func:`set_policy`."""
        return self._ask(set_policy(organization, accept, **limits))

    def set_quota(self, organization: str, **limits: int | None) -> api.Organization:
        """Set the quotas; ``limits`` as in :func:`set_quota`."""
        return self._ask(set_quota(organization, **limits))

    def keys(self, account: str = "") -> list[api.Key]:
        """The caller's keys, or for operators another account's."""
        return self._all(lambda cursor: keys(account, cursor))

    def create_key(
        self, name: str, scopes: Sequence[str] = (), expires_s: float | None = None
    ) -> api.NewKey:
        """Make a key, which may do no more and lasts no longer than the one in use."""
        return self._ask(create_key(name, scopes, expires_s))

    def revoke_key(self, key_id: str) -> api.Key:
        """Revoke a key."""
        return self._ask(revoke_key(key_id))

    def invites(self) -> list[api.Invite]:
        """All invites."""
        return self._all(invites)

    def create_invite(self, account: str, **how: Any) -> api.NewInvite:
        """Make an invite for an account's machines; ``how`` as in :func:`create_invite`."""
        return self._ask(create_invite(account, **how))

    def revoke_invite(self, invite_id: str) -> api.Invite:
        """Revoke an invite."""
        return self._ask(revoke_invite(invite_id))

    def audit(self, after: str = "", wait: float = 0.0, account: str = "") -> list[api.AuditRecord]:
        """Some of what people did behind ``after``; empty when there was nothing within
        ``wait``."""
        return self._ask(audit(after, wait, account)).items
