from __future__ import annotations

import pytest

from distribai.errors import ProtocolMismatch
from distribai.wire.versions import PROTOCOL, PROTOCOL_MIN, negotiate


def test_the_newest_common_version_is_taken() -> None:
    assert negotiate(PROTOCOL_MIN, PROTOCOL + 5) == PROTOCOL
    assert negotiate(0, PROTOCOL) == PROTOCOL


@pytest.mark.parametrize(
    ("low", "high", "hint"),
    [
        (PROTOCOL + 1, PROTOCOL + 3, "pip install"),
        (0, PROTOCOL_MIN - 1, "other side"),
        (PROTOCOL_MIN, PROTOCOL_MIN - 1, "other side"),
    ],
)
def test_versions_that_do_not_fit_are_refused(low: int, high: int, hint: str) -> None:
    with pytest.raises(ProtocolMismatch) as caught:
        negotiate(low, high)
    assert caught.value.code == "protocol.version"
    assert hint in caught.value.hint
