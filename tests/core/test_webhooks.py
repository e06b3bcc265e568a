"""Signatures, secrets, filters and pauses of webhooks."""

from __future__ import annotations

import hashlib
import hmac

import pytest
from hypothesis import given
from hypothesis import strategies as st

from distribai.core.webhooks import (
    LONGEST_PAUSE_S,
    check_kinds,
    is_refusal,
    key_id,
    pause_s,
    secret_of,
    sign,
)
from distribai.errors import UsageError


def test_a_signature_is_hmac_sha256_over_time_and_body() -> None:
    expected = hmac.new(b"whsec_x", b'1700000000.{"a":1}', hashlib.sha256).hexdigest()
    assert sign("whsec_x", 1_700_000_000, b'{"a":1}') == f"t=1700000000,v1={expected}"


@given(st.binary(max_size=64), st.integers(0, 2**40))
def test_another_time_body_or_secret_is_another_signature(body: bytes, at: int) -> None:
    signed = sign("s", at, body).partition("v1=")[2]
    for other in (sign("s", at + 1, body), sign("s", at, body + b"x"), sign("t", at, body)):
        assert other.partition("v1=")[2] != signed


def test_secrets_follow_from_key_and_id_and_tell_nothing_of_the_key() -> None:
    key = bytes(range(32))
    assert secret_of(key, "hook_a") == secret_of(key, "hook_a")
    assert len({secret_of(key, "hook_a"), secret_of(key, "hook_b"), secret_of(key[::-1], "hook_a")})
    assert key_id(key) not in secret_of(key, "hook_a")
    assert key_id(key) != key_id(key[::-1])


@given(st.integers(1, 10_000), st.floats(0, 0.999))
def test_pauses_grow_to_an_hour_and_a_tenth_and_no_further(failures: int, chance: float) -> None:
    assert 5.0 <= pause_s(failures, chance) <= LONGEST_PAUSE_S * 1.1
    assert pause_s(failures + 1, 0.0) >= pause_s(failures, 0.0)


def test_the_first_pauses_double() -> None:
    assert [pause_s(n, 0.0) for n in (1, 2, 3, 4)] == [5.0, 10.0, 20.0, 40.0]


def test_a_filter_has_one_form() -> None:
    assert check_kinds(["task", "job.completed", "task.*"]) == ("job.completed", "task.*")
    assert check_kinds([]) == ()


@pytest.mark.parametrize("kind", ["", "*", "job.", "job.*.x", "Job", "job%", "job._*", "a b"])
def test_a_kind_that_can_match_nothing_is_refused(kind: str) -> None:
    with pytest.raises(UsageError):
        check_kinds([kind])


def test_a_refusal_is_4xx_that_does_not_ask_to_come_again() -> None:
    refusals = [s for s in range(100, 600) if is_refusal(s)]
    assert {400, 404, 410, 422} < set(refusals)
    assert not set(refusals) & {200, 301, 408, 425, 429, 500, 503}
    assert not is_refusal(None)
