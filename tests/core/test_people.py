from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from distribai.core.people import (
    ALL_SCOPES,
    HOME,
    Asked,
    Policy,
    Principal,
    Quota,
    Role,
    Usage,
    check_name,
    check_policy,
    check_quota,
    check_role,
    decide,
    over_quota,
)
from distribai.errors import CODES, UsageError

ASKED = Asked(parameters=1000, steps=50, tokens=10_000)


def account(**roles: Role) -> Principal:
    named = {HOME if name == "home" else name: role for name, role in roles.items()}
    return Principal("account", "", "acct_a", "ann", "key_a", named, ALL_SCOPES)


def test_what_an_account_sees_follows_from_its_roles_alone() -> None:
    both = account(lab=Role.MEMBER, mill=Role.VIEWER, farm=Role.CONTRIBUTOR)
    assert both.sees() == {"lab", "mill"}
    assert both.works_in() == {"lab"}
    assert not both.operator
    assert account(home=Role.OPERATOR).sees() is account(home=Role.OPERATOR).works_in() is None
    assert account().sees() == account(farm=Role.CONTRIBUTOR).sees() == frozenset()


def test_an_operator_is_one_of_home_and_of_nothing_else() -> None:
    assert not account(lab=Role.OPERATOR).operator
    assert account(lab=Role.OPERATOR).sees() == frozenset()
    assert Principal("node", "node_a", roles={HOME: Role.OPERATOR}).operator is False
    with pytest.raises(UsageError, match="whole grid"):
        check_role(Role.OPERATOR, "lab")
    check_role(Role.OPERATOR, HOME)


@pytest.mark.parametrize("name", ["", "Ann", "a b", "a_b", "-a", "a" * 41, "ä", "a\n", "acct_x"])
def test_names_are_never_ids_and_need_no_quotes(name: str) -> None:
    with pytest.raises(UsageError) as caught:
        check_name(name, "account")
    assert caught.value.code == "people.name"
    assert check_name("ann-2.lab", "account") == "ann-2.lab"


@pytest.mark.parametrize(
    ("policy", "accepted", "told"),
    [
        (Policy(), False, "to the operator"),
        (Policy("always"), True, "every job"),
        (Policy("size", max_tokens=10_000), True, "10000 tokens"),
        (Policy("size", max_tokens=9_999), False, "this has 10000"),
        (Policy("size", max_parameters=999, max_tokens=10**9), False, "999 parameters"),
        (Policy("size", max_parameters=1000, max_tokens=10_000), True, "1000 parameters and 10000"),
        (Policy("hours", hours="00:00-12:00"), False, "it was 13:46"),
        (Policy("hours", hours="13:46-13:47"), True, "13:46-13:47 UTC"),
        (Policy("hours", hours="13:47-13:46"), False, "it was 13:46"),
        (Policy("hours", hours="22:00-14:00"), True, "22:00-14:00"),
    ],
)
def test_a_policy_decides_and_says_why(policy: Policy, accepted: bool, told: str) -> None:
    at = 1_000_000.0  # 1970-01-12 13:46:40 UTC
    verdict = decide(check_policy(policy), ASKED, at)
    assert (verdict.accepted, told in verdict.reason) == (accepted, True), verdict.reason


@given(st.integers(0, 1439), st.integers(0, 1439), st.integers(0, 10**6))
def test_hours_and_their_complement_share_the_day(first: int, last: int, minute: int) -> None:
    def clock(m: int) -> str:
        return f"{m // 60:02d}:{m % 60:02d}"

    if first == last:
        return
    inside, outside = (
        decide(Policy("hours", hours=hours), ASKED, 60.0 * minute).accepted
        for hours in (f"{clock(first)}-{clock(last)}", f"{clock(last)}-{clock(first)}")
    )
    assert inside is not outside


@pytest.mark.parametrize(
    "policy",
    [
        Policy("size"),
        Policy("size", max_tokens=0),
        Policy("always", max_tokens=5),
        Policy("ask", hours="22:00-06:00"),
        Policy("hours"),
        Policy("hours", hours="22-06"),
        Policy("hours", hours="24:00-06:00"),
        Policy("hours", hours="06:00-06:00"),
        Policy("size", max_tokens=5, hours="22:00-06:00"),
    ],
)
def test_a_policy_that_says_nothing_or_too_much_is_refused(policy: Policy) -> None:
    with pytest.raises(UsageError) as caught:
        check_policy(policy)
    assert caught.value.code == "people.policy"


@pytest.mark.parametrize(
    ("quota", "code"),
    [
        (Quota(), ""),
        (Quota(3, 50, 10_000, 100), ""),
        (Quota(open_jobs=2), "quota.jobs"),
        (Quota(steps=49), "quota.steps"),
        (Quota(tokens=9_999), "quota.tokens"),
        (Quota(bytes=99), "quota.bytes"),
        (Quota(open_jobs=0), "quota.jobs"),
    ],
)
def test_a_job_is_held_against_every_quota(quota: Quota, code: str) -> None:
    excess = over_quota(check_quota(quota), "lab", Usage(open_jobs=2, bytes=100), ASKED)
    assert (excess.code if excess else "") == code
    assert not excess or excess.code in CODES


def test_a_negative_quota_is_refused() -> None:
    with pytest.raises(UsageError, match="negative"):
        check_quota(Quota(steps=-1))
