from __future__ import annotations

import dataclasses

import pytest
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
from hypothesis import given, settings
from hypothesis import strategies as st

from distribai.core.ranges import SampleRange
from distribai.core.spec import BlobRef
from distribai.core.tasks import Outcome
from distribai.errors import NotAllowed
from distribai.wire import convert, signing
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
    tokens=st.integers(0, convert.MAX_BIG),
)
def test_a_signature_survives_the_wire(metrics: dict[str, float], reason: str, tokens: int) -> None:
    outcome = dataclasses.replace(OUTCOME, metrics=metrics, reason=reason, tokens=tokens)
    message = convert.outcome_to_wire(outcome, signing.sign_outcome(KEY, outcome))
    read, signature = convert.outcome_from_wire(
        pb.TaskResult.FromString(message.SerializeToString())
    )
    signing.verify_outcome(PUBLIC, signature, read)
