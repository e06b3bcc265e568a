from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from distribai.errors import UsageError
from distribai.wire.joinlink import JoinLink, parse, split_address

GOOD = "distribai://grid.example/?grpc=a:50051&http=b:8766&invite=inv_x&grid=g1"


def test_a_join_link_is_read() -> None:
    link = parse(f"  {GOOD}\n")
    assert link == JoinLink("grid.example", "a:50051", "b:8766", "g1", "inv_x")
    assert link.http_url == "http://b:8766"
    assert str(link) == GOOD
    assert not link.loopback


@pytest.mark.parametrize("ca", ["0" * 64, "public"])
def test_a_link_says_who_vouches_for_the_grid(ca: str) -> None:
    link = parse(f"{GOOD}&ca={ca}")
    assert link.ca == ca
    assert link.http_url == "https://b:8766"
    assert parse(str(link)) == link


def test_a_link_says_that_certificates_are_asked_for() -> None:
    text = f"{GOOD}&ca=public&certificates=required"
    link = parse(text)
    assert link.certificates
    assert str(link) == text
    assert not parse(f"{GOOD}&ca=public").certificates


def test_a_known_node_needs_no_invite() -> None:
    assert parse("distribai://h/?grpc=a:1&http=b:2&grid=g").invite == ""


@pytest.mark.parametrize(
    ("text", "why"),
    [
        ("", "start with"),
        ("https://h/?grpc=a:1&http=b:2&grid=g", "start with"),
        ("distribai:///?grpc=a:1&http=b:2&grid=g", "look like"),
        ("distribai://h/path?grpc=a:1&http=b:2&grid=g", "look like"),
        ("distribai://h/?grpc=a:1&http=b:2&grid=g#x", "look like"),
        ("distribai://h/?http=b:2&grid=g", "no 'grpc'"),
        ("distribai://h/?grpc=a:1&http=b:2", "no 'grid'"),
        ("distribai://h/?grpc=a:1&http=b:2&grid=", "no 'grid'"),
        ("distribai://h/?grpc=a:1&grpc=c:1&http=b:2&grid=g", "twice"),
        ("distribai://h/?grpc=a:1&http=b:2&grid=g&tls=1", "'tls'"),
        ("distribai://h/?grpc=a:1&http=b:2&grid=g&ca=abc", "SHA-256"),
        ("distribai://h/?grpc=a:1&http=b:2&grid=g&ca=", "SHA-256"),
        (f"distribai://h/?grpc=a:1&http=b:2&grid=g&ca={'A' * 64}", "SHA-256"),
        ("distribai://h/?grpc=a:1&http=b:2&grid=g&certificates=required", "no 'ca'"),
        ("distribai://h/?grpc=a:1&http=b:2&grid=g&ca=public&certificates=no", "not 'required'"),
        ("distribai://h/?grpc=a&http=b:2&grid=g", "host:port"),
        ("distribai://h/?grpc=a:99999&http=b:2&grid=g", "host:port"),
        ("distribai://h/?grpc=:1&http=b:2&grid=g", "host:port"),
        ("distribai://h/?grpc=u@a:1&http=b:2&grid=g", "host:port"),
        ("distribai://h/?grpc=a:1/x&http=b:2&grid=g", "host:port"),
        ("distribai://h/?grpc", "cannot be read"),
        ("distribai://[h/?grpc=a:1&http=b:2&grid=g", "cannot be read"),
    ],
)
def test_a_bad_join_link_is_refused_with_the_reason(text: str, why: str) -> None:
    with pytest.raises(UsageError) as caught:
        parse(text)
    assert caught.value.code == "node.link"
    assert why in caught.value.message


def test_the_invite_is_not_repeated_in_an_error() -> None:
    with pytest.raises(UsageError) as caught:
        parse("distribai://h/?grpc=a:1&invite=inv_secret&grid=g")
    assert "inv_secret" not in str(caught.value)


@pytest.mark.parametrize(
    ("address", "loopback"),
    [("127.0.0.1:1", True), ("localhost:1", True), ("[::1]:1", True), ("10.0.0.1:1", False),
     ("example.org:1", False)],
)  # fmt: skip
def test_loopback_addresses_are_known(address: str, loopback: bool) -> None:
    assert JoinLink("h", address, address, "g").loopback is loopback


def test_an_ipv6_address_keeps_its_brackets_in_the_link() -> None:
    link = JoinLink("h", "[::1]:50051", "[::1]:8766", "g")
    assert parse(str(link)) == link
    assert split_address(link.grpc) == ("::1", 50051)


@settings(max_examples=100)
@given(st.text(st.characters(codec="utf-8", exclude_categories=["Cc", "Zs", "Zl", "Zp"])))
def test_any_invite_survives_the_link(invite: str) -> None:
    link = JoinLink("h", "a:1", "b:2", "g", invite)
    assert parse(str(link)) == link
