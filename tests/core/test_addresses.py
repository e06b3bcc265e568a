"""Where webhooks may go."""

from __future__ import annotations

from ipaddress import IPv4Address, IPv6Address, ip_address

import pytest
from hypothesis import given
from hypothesis import strategies as st

from distribai.core.addresses import (
    Target,
    inner,
    is_public,
    own_lan_too,
    parse_target,
    public_only,
)
from distribai.errors import UsageError

V4 = st.integers(0, 2**32 - 1).map(IPv4Address)
V6 = st.integers(0, 2**128 - 1).map(IPv6Address)


def mapped(v4: IPv4Address) -> IPv6Address:
    return IPv6Address(0xFFFF << 32 | int(v4))


def nat64(v4: IPv4Address) -> IPv6Address:
    return IPv6Address(int(IPv6Address("64:ff9b::")) | int(v4))


def six_to_four(v4: IPv4Address, rest: int) -> IPv6Address:
    return IPv6Address(0x2002 << 112 | int(v4) << 80 | rest)


@given(V4, st.integers(0, 2**80 - 1))
def test_an_ipv4_address_inside_an_ipv6_one_is_judged_as_itself(v4: IPv4Address, rest: int) -> None:
    for dressed in (mapped(v4), nat64(v4), six_to_four(v4, rest)):
        assert inner(dressed) == v4
        assert is_public(dressed) is is_public(v4)


@given(V4)
def test_no_public_ipv4_address_is_of_a_special_range(v4: IPv4Address) -> None:
    if is_public(v4):
        first = int(v4) >> 24
        assert first not in (0, 10, 127)
        assert first < 224
        assert not v4.is_private
        assert not v4.is_link_local


@given(V6)
def test_a_public_ipv6_address_carries_a_public_one_or_is_global_unicast(v6: IPv6Address) -> None:
    if is_public(v6):
        found = inner(v6)
        assert isinstance(found, IPv4Address) or int(found) >> 125 == 1


@pytest.mark.parametrize(
    "text",
    [
        "127.0.0.1",
        "10.1.2.3",
        "172.31.255.255",
        "192.168.0.1",
        "100.64.0.1",
        "169.254.169.254",
        "0.0.0.0",
        "192.0.0.170",
        "192.88.99.1",
        "198.18.0.1",
        "203.0.113.9",
        "224.0.0.1",
        "255.255.255.255",
        "::",
        "::1",
        "::127.0.0.1",
        "::ffff:169.254.169.254",
        "::ffff:0:127.0.0.1",
        "64:ff9b::7f00:1",
        "64:ff9b:1::1",
        "2002:7f00:1::",
        "2001::1",
        "2001:db8::1",
        "3fff::1",
        "5f00::1",
        "fc00::1",
        "fe80::1",
        "fec0::1",
        "ff0e::1",
    ],
)
def test_addresses_that_are_not_public_are_refused(text: str) -> None:
    assert "no public address" in public_only(ip_address(text), 443)


@pytest.mark.parametrize("text", ["1.1.1.1", "93.184.216.34", "2606:4700::1", "::ffff:8.8.8.8"])
def test_public_addresses_pass_on_two_ports_alone(text: str) -> None:
    address = ip_address(text)
    assert public_only(address, 443) == public_only(address, 80) == ""
    assert "neither 80 nor 443" in public_only(address, 22)


@given(V4 | V6, st.integers(1, 65535))
def test_the_own_lan_is_open_only_on_top_of_what_is_public(
    address: IPv4Address | IPv6Address, port: int
) -> None:
    if public_only(address, port) == "":
        assert own_lan_too(address, port) == ""


def test_the_own_lan_is_private_and_loopback_and_never_link_local() -> None:
    for text in ("192.168.1.9", "10.0.0.1", "127.0.0.1", "::1", "fd00::1", "::ffff:10.0.0.1"):
        assert own_lan_too(ip_address(text), 8080) == ""
    for text in ("169.254.169.254", "fe80::1", "0.0.0.0", "100.64.0.1", "::ffff:169.254.1.1"):
        assert own_lan_too(ip_address(text), 80)


@pytest.mark.parametrize(
    ("url", "target"),
    [
        ("https://example.com/a?b=c", Target("https", "example.com", 443, "/a?b=c")),
        ("HTTP://Example.COM", Target("http", "example.com", 80, "/")),
        ("https://example.com?x", Target("https", "example.com", 443, "/?x")),
        ("http://1.2.3.4:443/", Target("http", "1.2.3.4", 443, "/")),
        ("https://[2606:4700::0001]:80/x", Target("https", "2606:4700::1", 80, "/x")),
        ("https://xn--bcher-kva.example/", Target("https", "xn--bcher-kva.example", 443, "/")),
    ],
)
def test_an_address_is_taken_apart_once(url: str, target: Target) -> None:
    assert parse_target(url) == target


@pytest.mark.parametrize(
    "url",
    [
        "",
        "ftp://example.com/",
        "example.com",
        "https://",
        "https:///path",
        "https://user@example.com/",
        "https://user:pass@example.com/",
        "https://a@127.0.0.1:80@example.com/",
        "https://example.com\\@127.0.0.1/",
        "https://example.com#@127.0.0.1/",
        "https://exam ple.com/",
        "https://example.com/a b",
        "https://example.com/\r\nX-Evil: 1",
        "https://example.com:0/",
        "https://example.com:99999/",
        "https://example.com:443:80/",
        "https://example.com./",
        "https://-a.example/",
        "https://a..b/",
        "https://bücher.example/",
        "https://[fe80::1%25eth0]/",
        "https://[::1/",
        "https://[1.2.3.4]/",
        f"https://example.com/{'x' * 2000}",
    ],
)
def test_what_two_parsers_could_read_differently_is_refused(url: str) -> None:
    with pytest.raises(UsageError) as caught:
        parse_target(url)
    assert caught.value.code == "webhook.url"


@given(st.text(max_size=60))
def test_whatever_is_given_is_taken_apart_or_refused(text: str) -> None:
    for url in (text, f"https://{text}"):
        try:
            target = parse_target(url)
        except UsageError:
            continue
        assert target.path.startswith("/")
        assert not set(target.host) & set("@/\\#?[] ")
