from __future__ import annotations

import dataclasses

import pytest
from cryptography.hazmat.primitives.asymmetric.ed25519 import (
    Ed25519PrivateKey,
    Ed25519PublicKey,
)
from hypothesis import given, settings
from hypothesis import strategies as st

from distribai.core.ranges import SampleRange
from distribai.core.spec import BlobRef
from distribai.core.tasks import Outcome
from distribai.errors import NotAllowed
from distribai.wire import checks, convert, signing
from distribai.wire.v1 import distribai_pb2 as pb

KEY = Ed25519PrivateKey.from_private_bytes(bytes(range(32)))
PUBLIC = KEY.public_key().public_bytes_raw()
OUTCOME = Outcome(
    "task_a", 2, "done", BlobRef("ab" * 32, 9), (SampleRange(0, 8),), 3, 99, "h", {"x": 1}
)


def test_a_register_signature_holds_for_its_grid_and_nonce_only() -> None:
    signature = signing.sign_register(KEY, "g1", b"n" * 32)
    signing.verify_register(PUBLIC, signature, "g1", b"n" * 32)
    for grid, nonce in (("g2", b"n" * 32), ("g1", b"m" * 32)):
        with pytest.raises(NotAllowed) as caught:
            signing.verify_register(PUBLIC, signature, grid, nonce)
        assert caught.value.code == "node.key"


def test_a_request_for_a_certificate_is_vouched_for_in_its_grid_and_challenge_only() -> None:
    signature = signing.sign_certify(KEY, "g1", "c1", "request")
    signing.verify_certify(PUBLIC, signature, "g1", "c1", "request")
    for said in (("g2", "c1", "request"), ("g1", "c2", "request"), ("g1", "c1", "another")):
        with pytest.raises(NotAllowed) as caught:
            signing.verify_certify(PUBLIC, signature, *said)
        assert caught.value.code == "node.key"


def test_the_signed_bytes_are_the_documented_ones() -> None:
    assert signing.certify_message("g", "c", "r") == b"distribai-certify-v1\0g\0c\0r"
    assert signing.register_message("g", b"xy") == b"distribai-register-v1\0g\0xy"
    assert signing.outcome_message(OUTCOME) == (
        b'distribai-result-v1\0{"attempt":2,"base_hash":"h","delta":{"sha256":"'
        + b"ab" * 32
        + b'","size":9},"error_code":"","metrics":{"x":1.0},"reason":"",'
        b'"samples":[{"start":0,"stop":8}],"status":"done","steps":3,"task_id":"task_a",'
        b'"text":"","tokens":99}'
    )


def test_a_changed_outcome_is_noticed() -> None:
    signature = signing.sign_outcome(KEY, OUTCOME)
    with pytest.raises(NotAllowed):
        signing.verify_outcome(PUBLIC, signature, dataclasses.replace(OUTCOME, tokens=100))


@pytest.mark.parametrize("public", [b"", b"\xff" * 32, b"x" * 31])
def test_something_that_is_no_key_is_refused(public: bytes) -> None:
    with pytest.raises(NotAllowed) as caught:
        signing.verify_outcome(public, bytes(64), OUTCOME)
    assert caught.value.code == "node.key"


@settings(max_examples=60)
@given(
    metrics=st.dictionaries(
        st.text(max_size=5), st.floats(allow_nan=False, allow_infinity=False) | st.integers(0, 9)
    ),
    reason=st.text(max_size=20),
    tokens=st.integers(0, checks.MAX_BIG),
)
def test_a_signature_survives_the_wire(metrics: dict[str, float], reason: str, tokens: int) -> None:
    outcome = dataclasses.replace(OUTCOME, metrics=metrics, reason=reason, tokens=tokens)
    message = convert.outcome_to_wire(outcome, signing.sign_outcome(KEY, outcome))
    read, signature = convert.outcome_from_wire(
        pb.TaskResult.FromString(message.SerializeToString())
    )
    signing.verify_outcome(PUBLIC, signature, read)


P = 2**255 - 19
D = -121665 * pow(121666, -1, P) % P
IDENTITY = (0, 1)
Point = tuple[int, int]


def add(a: Point, b: Point) -> Point:
    """On the curve -x^2 + y^2 = 1 + d x^2 y^2 (RFC 8032, 5.1), in plain fractions."""
    (x1, y1), (x2, y2) = a, b
    product = D * x1 * x2 * y1 * y2
    x = (x1 * y2 + x2 * y1) * pow(1 + product, -1, P)
    y = (y1 * y2 + x1 * x2) * pow(1 - product, -1, P)
    return x % P, y % P


def times(k: int, point: Point) -> Point:
    found = IDENTITY
    for _ in range(k):
        found = add(found, point)
    return found


def root(square: int) -> int | None:
    """A square root modulo p (RFC 8032, 5.1.3)."""
    x = pow(square, (P + 3) // 8, P)
    for candidate in (x, x * pow(2, (P - 1) // 4, P) % P):
        if candidate * candidate % P == square % P:
            return candidate
    return None


def points(y: int) -> set[Point]:
    """Those of the curve that have this y."""
    x = root((y * y - 1) * pow(D * y * y + 1, -1, P))
    return set() if x is None else {(x, y % P), (-x % P, y % P)}


def test_a_key_of_small_order_signs_nothing() -> None:
    ys = [int.from_bytes(y, "little") for y in signing._SMALL_ORDER]
    small = {point for y in ys for point in points(y)}
    assert len(small) == 8, "all there are"
    assert all(times(8, point) == IDENTITY for point in small)
    # Beside y itself, y + p is read as y where it fits into 255 bits.
    assert {y % P + k for y in ys for k in (0, P) if y % P + k < 2**255} == set(ys)
    for y in signing._SMALL_ORDER:
        for public in (y, y[:31] + bytes([y[31] | 0x80])):
            for r in signing._SMALL_ORDER:
                with pytest.raises(NotAllowed) as caught:
                    signing.verify_register(public, r + bytes(32), "g", b"n")
                assert caught.value.code == "node.key"
    everything = bytes([1]) + bytes(31)
    Ed25519PublicKey.from_public_bytes(everything).verify(everything + bytes(32), b"the library")
