"""The bytes of every released message. DISTRIBAI_REGENERATE_GOLDEN=1 writes them anew."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from distribai.wire.v1 import distribai_pb2 as pb
from tests.wire.samples import every_message

GOLDEN = Path(__file__).parent / "golden" / "v1"
MESSAGES = every_message()


@pytest.fixture(scope="module", autouse=True)
def regenerate() -> None:
    if os.environ.get("DISTRIBAI_REGENERATE_GOLDEN") == "1":
        GOLDEN.mkdir(parents=True, exist_ok=True)
        for old in GOLDEN.glob("*.bin"):
            old.unlink()
        for name, message in MESSAGES.items():
            (GOLDEN / f"{name}.bin").write_bytes(message.SerializeToString(deterministic=True))


@pytest.mark.parametrize("name", MESSAGES)
def test_a_message_still_has_its_released_bytes(name: str) -> None:
    golden = (GOLDEN / f"{name}.bin").read_bytes()
    assert MESSAGES[name].SerializeToString(deterministic=True) == golden


@pytest.mark.parametrize("name", MESSAGES)
def test_released_bytes_still_read_as_the_same_message(name: str) -> None:
    golden = (GOLDEN / f"{name}.bin").read_bytes()
    read = getattr(pb, name.split(".")[0]).FromString(golden)
    assert read == MESSAGES[name]


def test_there_is_a_golden_file_for_every_message_and_for_nothing_else() -> None:
    assert {p.stem for p in GOLDEN.glob("*.bin")} == set(MESSAGES)
